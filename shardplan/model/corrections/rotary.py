"""YaRN rotary embeddings as transformers computes them; Levanter's YaRN differs.

Levanter's YaRN has no `attention_factor` and no `truncate`, gives `mscale` another meaning, and limits the upper end of
its ramp to size / 2 - 1 instead of size - 1. Formulas: https://arxiv.org/abs/2309.00071, section 3.2 and 3.4.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import numpy as np
from haliax import Axis, NamedArray
from levanter.layers.rotary import RotaryEmbeddings, RotaryEmbeddingsConfig


@dataclass(frozen=True)
class YarnConfig(RotaryEmbeddingsConfig):
    """The values of YaRN; `shardplan.model.huggingface.rope_keys` fills in the defaults of transformers."""

    theta: float = 10000.0
    """Base of the rotary frequencies."""
    factor: float = 1.0
    """Divisor of low frequencies."""
    attention_factor: float = 1.0
    """Factor of queries and keys."""
    beta_fast: float = 32.0
    """A frequency with at least this many rotations over `original_max_position_embeddings` is not scaled."""
    beta_slow: float = 1.0
    """A frequency with at most this many rotations is divided by `factor`."""
    original_max_position_embeddings: float = 2048
    """Number of positions of the model before its frequencies were scaled."""
    truncate: bool = True
    """Whether the ends of the ramp from `beta_fast` to `beta_slow` are rounded to whole indices of frequencies."""

    def build(self, HeadSize: Axis) -> "YarnEmbeddings":
        """Make the embeddings of heads of this size."""
        return YarnEmbeddings(HeadSize, self)

    @classmethod
    def make_from_hf_config(cls, rope_theta: float, config: dict[str, Any]) -> "YarnConfig":
        """Make the configuration from the `rope_theta` and `rope_scaling` of a config.json."""
        return cls(
            theta=rope_theta, **{key: value for key, value in config.items() if key not in ("rope_type", "type")}
        )

    def to_hf_config(self) -> tuple[float, dict[str, Any]]:
        """Return the `rope_theta` and `rope_scaling` of a config.json."""
        values = asdict(self)
        return values.pop("theta"), {"rope_type": "yarn", **values}

    def frequencies(self, size: int) -> np.ndarray:
        """Compute the frequencies of heads with `size` channels: float64[size / 2], in radians per position."""
        index = np.arange(size // 2)
        base = self.theta ** (-2 * index / size)

        def frequency_of(rotations: float) -> float:
            """Return the fractional index of the frequency with this many rotations over the original positions."""
            positions_per_radian = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return size * math.log(positions_per_radian) / (2 * math.log(self.theta))

        low, high = frequency_of(self.beta_fast), frequency_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = np.clip((index - low) / (high - low if high != low else 1e-3), 0, 1)
        return base * (1 - ramp) + base / self.factor * ramp


RotaryEmbeddingsConfig.register_subclass("transformers_yarn", YarnConfig)


class YarnEmbeddings(RotaryEmbeddings):
    """Rotates queries or keys by angles that YaRN scales."""

    HeadDim: Axis = eqx.field(static=True)
    config: YarnConfig = eqx.field(static=True)

    def __call__(self, q: NamedArray, position_ids: NamedArray) -> NamedArray:
        """Rotate `q` [..., position, head_size] by the angles of its positions int32[..., position]."""
        half = self.HeadDim.resize(self.HeadDim.size // 2)
        frequencies = hax.named(self.config.frequencies(self.HeadDim.size).astype(np.float32), half)
        angles = frequencies.broadcast_axis(position_ids.axes) * position_ids
        angles = hax.concatenate(self.HeadDim, (angles, angles))
        first, second = q[self.HeadDim, : half.size], q[self.HeadDim, half.size :]
        rotated = hax.concatenate(self.HeadDim, (-second, first))
        cos, sin = (wave(angles) * self.config.attention_factor for wave in (hax.cos, hax.sin))
        return q * cos.astype(q.dtype) + rotated * sin.astype(q.dtype)
