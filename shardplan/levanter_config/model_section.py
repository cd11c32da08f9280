"""What the `model` section of a Levanter configuration says beside the architecture."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardplan.config import CHECKPOINTING, WorkloadConfig
from shardplan.errors import ConfigError, nearest
from shardplan.levanter_config.section import Section, text_of

ATTENTION_BACKENDS = ("default", "jax_flash", "nvte", "splash", "vanilla")
POSITION_KEYS = ("max_seq_len", "seq_len")
"""Of the `model` section: what the later schema calls the number of positions, and what the flat one does."""


@dataclass(frozen=True)
class ModelSection:
    """What the `model` section of a configuration says that is not the architecture; None where it does not."""

    gradient_checkpointing: str | None = None
    """One of `CHECKPOINTING`."""
    position: int | None = None
    """Tokens per sequence."""
    attention_backend: str | None = None
    """`attn_backend` as written."""

    def workload(self, asked: WorkloadConfig) -> WorkloadConfig:
        """The workload `asked` for, with the positions and the checkpointing that the section says."""
        return replace(
            asked,
            position=self.position or asked.position,
            gradient_checkpointing=self.gradient_checkpointing or asked.gradient_checkpointing,
        )


NO_MODEL_SECTION = ModelSection()


def model_section(values: Mapping[str, Any]) -> ModelSection:
    """What the `model` section among the sections `values` of a configuration says; nothing where there is none.

    Raises:
        ConfigError: a value that Levanter does not take.
    """
    if not isinstance(values.get("model"), dict):
        return NO_MODEL_SECTION
    section = Section("model", values["model"])
    positions = [section.size(key, None) for key in POSITION_KEYS if key in section.values]
    backend = section.values.get("attn_backend")
    checkpointing = None
    if "gradient_checkpointing" in section.values:
        checkpointing = _checkpointing(section.values["gradient_checkpointing"])
    return ModelSection(checkpointing, positions[0] if positions else None, None if backend is None else str(backend))


def _checkpointing(value: Any) -> str:
    """The name of a kind of gradient checkpointing; Levanter takes booleans, names, and Haliax's policies."""
    if isinstance(value, bool):
        return "default" if value else "save_all"
    if isinstance(value, dict):
        if value.get("disable") or value.get("save_block_internals") is True:
            return "save_all"
        if value.get("nested"):
            return "nested"
        if "offload" in (value.get("save_carries"), value.get("save_inputs")):
            return "offload"
        return "recompute" if value.get("save_carries") is False else "default"
    names = {"full": "recompute", **{name: name for name in CHECKPOINTING if name not in ("auto", "default")}}
    if not isinstance(value, str) or value not in names:
        hint = nearest(str(value), names)
        raise ConfigError(f"model.gradient_checkpointing is {text_of(value)}; {hint} (or true, or false)")
    return names[value]
