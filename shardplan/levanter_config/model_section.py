"""Parses those keys of a Levanter configuration's `model:` section that the lint needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardplan.errors import ConfigError, nearest
from shardplan.levanter_config.section import SectionReader, short_repr
from shardplan.plan.workload.checkpointing import HALIAX_WORDS, CheckpointPolicy
from shardplan.plan.workload.workload import Workload

ATTENTION_BACKENDS = ("default", "jax_flash", "nvte", "splash", "vanilla")
"""Values that Levanter takes for `attn_backend`."""
POSITION_KEYS = ("max_seq_len", "seq_len")
"""Keys for the number of positions: the name in Levanter, and the one in levanter 1.2."""


SIZE_KEYS = ("hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads")
"""Keys of the model section for the architecture, named as in Levanter's model configurations."""


@dataclass(frozen=True)
class ModelSection:
    """The values of a model section; None for what the file omits."""

    gradient_checkpointing: str | None = None
    """The text of a policy, as the key `workload.gradient_checkpointing` expects it."""
    position: int | None = None
    """Tokens per sequence."""
    attention_backend: str | None = None
    """`attn_backend` as written."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The keys of `SIZE_KEYS` that the file has, with their values."""

    def apply_to(self, workload: Workload) -> Workload:
        """Return `workload` with the number of positions and the checkpointing of this section."""
        return replace(
            workload,
            position=self.position or workload.position,
            gradient_checkpointing=self.gradient_checkpointing or workload.gradient_checkpointing,
        )


NO_MODEL_SECTION = ModelSection()


def parse_model_section(sections: Mapping[str, Any]) -> ModelSection:
    """Parse the `model` section among the `sections` of a configuration; it may be absent.

    Raises:
        ConfigError: Levanter does not accept a value.
    """
    if not isinstance(sections.get("model"), dict):
        return NO_MODEL_SECTION
    section = SectionReader("model", sections["model"])
    positions = [section.size(key, None) for key in POSITION_KEYS if key in section.values]
    backend = section.values.get("attn_backend")
    checkpointing = None
    if "gradient_checkpointing" in section.values:
        checkpointing = _checkpointing(section.values["gradient_checkpointing"])
    sizes = {key: section.size(key, 0) for key in SIZE_KEYS if section.values.get(key) is not None}
    position = positions[0] if positions else None
    return ModelSection(checkpointing, position, None if backend is None else str(backend), sizes)


def _checkpointing(value: Any) -> str:
    """Convert a value of `gradient_checkpointing`, a boolean, a name or the fields of a Haliax policy, to text."""
    if isinstance(value, bool):
        return "default" if value else "save_all"
    if isinstance(value, dict):
        return str(_policy(value))
    names = {"full": "recompute", **{name: name for name in HALIAX_WORDS if name != "default"}}
    if not isinstance(value, str) or value not in names:
        hint = nearest(str(value), names)
        raise ConfigError(f"model.gradient_checkpointing is {short_repr(value)}; {hint} (or true, or false)")
    return names[value]


def _policy(value: dict[str, Any]) -> CheckpointPolicy:
    """Convert the fields of a Haliax `ScanCheckpointPolicy` to a policy."""
    internals = value.get("save_block_internals")
    if value.get("disable") or internals is True:
        return CheckpointPolicy("save_all")
    if value.get("simple"):
        return CheckpointPolicy("nested" if value.get("nested") else "default", blocks=_blocks(value))
    kept = internals if isinstance(internals, list) else []
    offloaded = value.get("offload_block_internals") or []
    return CheckpointPolicy(_policy_kind(value), tuple(map(str, kept)), tuple(map(str, offloaded)), _blocks(value))


def _blocks(value: dict[str, Any]) -> int | None:
    """Return the number of blocks of layers that a policy gives; None if Haliax chooses it.

    Raises:
        ConfigError: the number is not positive.
    """
    nested = value.get("nested")
    if nested is None or isinstance(nested, bool):
        return None
    if not isinstance(nested, int) or nested < 1:
        raise ConfigError(
            f"model.gradient_checkpointing.nested is {short_repr(nested)}; it must be true, false or a number of blocks"
        )
    return nested


def _policy_kind(value: dict[str, Any]) -> str:
    """Return the kind of a gradient checkpointing policy that lists the kept activations.

    Raises:
        ConfigError: the policy has two kinds at once.
    """
    moved = [key for key in ("save_carries", "save_inputs") if value.get(key) == "offload"]
    if value.get("nested") and moved:
        raise ConfigError(
            f"model.gradient_checkpointing is nested, and {moved[0]} is offload; such a policy is not planned: leave "
            "one of them out"
        )
    if value.get("nested"):
        return "nested"
    if moved:
        return "offload_carries" if moved == ["save_carries"] else "offload"
    return "recompute" if value.get("save_carries") is False else "default"
