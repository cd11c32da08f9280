"""A layer of a decoder: attention and an MLP that change the residual stream, joined by a wiring with norms."""

from dataclasses import dataclass
from enum import Enum

import equinox as eqx
import jax
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call
from levanter.layers.attention import AttentionMask

from shardplan.decoder.parts.attention.grouped_attention import AttentionLayer, GroupedAttention, Kernel
from shardplan.decoder.parts.attention.latent_attention import LatentAttention, LatentAttentionLayer
from shardplan.decoder.parts.attention.rotary import Positions
from shardplan.decoder.parts.attention.sparse_attention import SparseAttention, SparseAttentionLayer
from shardplan.decoder.parts.mlp.experts import ExpertsConfig, ExpertsLayer
from shardplan.decoder.parts.mlp.mlp import MlpConfig, MlpLayer
from shardplan.decoder.parts.norm import Norm, NormConfig
from shardplan.model.dtypes.kept_weights import numbers_of


class Wiring(Enum):
    """How a layer changes the residual stream x with attention A and MLP M; every N is a norm with its own weights."""

    PRE = "x += A(N(x)); x += M(N(x))"
    POST = "x += N(A(x)); x += N(M(x))"
    SANDWICH = "x += N(A(N(x))); x += N(M(N(x)))"
    AFTER_SUM = "x = N(x + A(x)); x = N(x + M(x))"
    PARALLEL = "x += A(N(x)) + M(N(x))"
    PARALLEL_SHARED = "n = N(x); x += A(n) + M(n)"

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms in the wiring, which are fields of `DecoderLayer`."""
        match self:
            case Wiring.PRE | Wiring.PARALLEL:
                return "attention_norm", "mlp_norm"
            case Wiring.POST | Wiring.AFTER_SUM:
                return "attention_out_norm", "mlp_out_norm"
            case Wiring.SANDWICH:
                return "attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"
            case Wiring.PARALLEL_SHARED:
                return ("attention_norm",)


@dataclass(frozen=True)
class LayerConfig:
    """The parts of a layer, and how they are connected."""

    attention: GroupedAttention | LatentAttention | SparseAttention
    mlp: MlpConfig | ExpertsConfig
    norm: NormConfig
    """The configuration of every norm in the wiring."""
    wiring: Wiring = Wiring.PRE
    residual_multiplier: float = 1.0
    """Factor of attention's and the MLP's outputs, before they are added to the residual stream."""

    @property
    def grouped_attention(self) -> GroupedAttention:
        """The attention of the layer, if it is grouped attention without latents."""
        assert isinstance(self.attention, GroupedAttention)
        return self.attention

    @property
    def latent_attention(self) -> LatentAttention:
        """The attention of the layer, if it is latent attention."""
        assert isinstance(self.attention, LatentAttention)
        return self.attention

    @property
    def sparse_attention(self) -> SparseAttention:
        """The attention of the layer, if it is Native Sparse Attention."""
        assert isinstance(self.attention, SparseAttention)
        return self.attention

    @property
    def dense_mlp(self) -> MlpConfig:
        """The MLP of the layer, if it has no experts."""
        assert isinstance(self.mlp, MlpConfig)
        return self.mlp

    def init(self, Embed: Axis, key: jax.Array) -> "DecoderLayer":
        """Make the layer with random weights."""
        attention, mlp = jax.random.split(key)
        norms = {name: self.norm.init(Embed) for name in self.wiring.norms}
        return DecoderLayer(
            self_attn=self.attention.init(Embed, attention),
            mlp=self.mlp.init(Embed, mlp),
            attention_norm=norms.get("attention_norm"),
            attention_out_norm=norms.get("attention_out_norm"),
            mlp_norm=norms.get("mlp_norm"),
            mlp_out_norm=norms.get("mlp_out_norm"),
            config=self,
        )


class DecoderLayer(eqx.Module):
    """The modules of a layer; norms that its wiring lacks are None."""

    self_attn: AttentionLayer | LatentAttentionLayer | SparseAttentionLayer
    mlp: MlpLayer | ExpertsLayer
    attention_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    config: LayerConfig = eqx.field(static=True)

    @named_call  # for profiles and reports
    def __call__(self, x: NamedArray, mask: AttentionMask, positions: Positions, kernel: Kernel) -> NamedArray:
        """Return the residual stream {batch, position, embed} after the layer."""

        def attend(x: NamedArray) -> NamedArray:
            return self._multiplied(self.self_attn(x, mask, positions, kernel))

        def transform(x: NamedArray) -> NamedArray:
            return self._multiplied(self.mlp(x))

        match self.config.wiring:
            case Wiring.PARALLEL:
                return x + attend(_normed(self.attention_norm, x)) + transform(_normed(self.mlp_norm, x))
            case Wiring.PARALLEL_SHARED:
                normed = _normed(self.attention_norm, x)
                return x + attend(normed) + transform(normed)
            case Wiring.AFTER_SUM:
                x = _normed(self.attention_out_norm, x + attend(x))
                return _normed(self.mlp_out_norm, x + transform(x))
            case _:
                x = x + _normed(self.attention_out_norm, attend(_normed(self.attention_norm, x)))
                return x + _normed(self.mlp_out_norm, transform(_normed(self.mlp_norm, x)))

    def _multiplied(self, branch: NamedArray) -> NamedArray:
        multiplier = self.config.residual_multiplier
        return branch if multiplier == 1.0 else branch * multiplier


class RepeatedLayers(eqx.Module):
    """The block of layers that a segment repeats."""

    layers: tuple[DecoderLayer, ...]

    @staticmethod
    def init(configs: tuple[LayerConfig, ...], Embed: Axis, *, key: jax.Array) -> "RepeatedLayers":
        """Make the layers with random weights."""
        keys = jax.random.split(key, len(configs))
        return RepeatedLayers(tuple(config.init(Embed, each) for config, each in zip(configs, keys, strict=True)))

    def __call__(self, x: NamedArray, mask: AttentionMask, positions: Positions, kernel: Kernel) -> NamedArray:
        """Return the residual stream {batch, position, embed} after the layers."""
        for layer in self.layers:
            # the numbers of kept weights of one layer at a time are in memory
            x = numbers_of(layer, x.dtype)(x, mask, positions, kernel)
        return x


def _normed(norm: Norm | None, x: NamedArray) -> NamedArray:
    return x if norm is None else norm(x)
