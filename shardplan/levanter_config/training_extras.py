"""Reads how a training differs from training all parameters with Adam: adapters, averages, reference models.

Each of these changes what is in memory during a training step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.levanter_config.programs import LevanterProgram

OPTIMIZERS = {"adam": "adamw", "adamH": "adamw", "adopt": "adamw", "cautious": "adamw", "lion": "lion"}
"""Levanter's `optimizer.type` -> the optimizer of optax with a state of the same size."""
DEFAULT_OPTIMIZER = "adam"
LARGER_STATE = ("kron", "mars", "soap", "sophia-g", "sophia-h")
"""Optimizers whose state is larger than adamw's, or unknown; the state of all others is smaller."""
LORA_KEYS = ("r", "target_modules", "exclude_modules")


@dataclass(frozen=True)
class TrainingExtras:
    """The sections of a training file that change a step's memory; None or empty if the file omits them."""

    optimizer: str = DEFAULT_OPTIMIZER
    """`optimizer.type`."""
    adapter_key: str | None = None
    """The section of the adapter, `lora` or `adapter`, if only the adapter's own parameters are trained."""
    adapter_type: str = "lora"
    lora: Mapping[str, Any] | None = None
    """The values of `LORA_KEYS` in the adapter's section."""
    averages: bool = False
    """Whether `trainer.model_averaging` keeps a moving average of the trained parameters."""
    is_preference: bool = False
    """Whether every example is a pair of sequences, as in DPO."""
    has_reference: bool = False
    """Whether a second model with the parameters before training is in memory."""
    quantization: bool = False
    """Whether `trainer.quantization` computes matrix products in another type."""

    @property
    def is_other_step(self) -> bool:
        """Whether the step computes something other than an update of all parameters."""
        return self.adapter_key is not None or self.is_preference


def parse_extras(sections: Mapping[str, Any], program: LevanterProgram) -> TrainingExtras:
    """Read how a file's training differs from training all parameters with Adam; other programs do not differ.

    >>> from shardplan.levanter_config.programs import PROGRAMS
    >>> parse_extras({"trainer": {"model_averaging": {"type": "ema"}}}, PROGRAMS[0]).averages
    True
    """
    if program.kind != "train":
        return TrainingExtras()
    trainer, optimizer = _section(sections, "trainer"), _section(sections, "optimizer")
    adapter_key = _adapter_key(sections, program)
    adapter = _section(sections, adapter_key) if adapter_key else {}
    is_preference = program.name in ("train_dpo", "lora_dpo")
    reference = _section(sections, "reference").get("type", "separate")
    return TrainingExtras(
        optimizer=str(optimizer.get("type", DEFAULT_OPTIMIZER)),
        adapter_key=adapter_key,
        adapter_type=str(adapter.get("type", "lora")),
        lora={key: adapter[key] for key in LORA_KEYS if adapter.get(key) is not None} if adapter_key else None,
        averages=trainer.get("model_averaging") is not None,
        is_preference=is_preference,
        has_reference=program.name == "train_dpo" and reference == "separate",
        quantization=trainer.get("quantization") is not None,
    )


def _adapter_key(sections: Mapping[str, Any], program: LevanterProgram) -> str | None:
    if program.name in ("lora_lm", "lora_dpo"):
        return "lora"  # also where the file omits the section, which has a default
    is_adapter = _section(sections, "adapter").get("type", "none") != "none"
    return "adapter" if is_adapter and "adapter" in program.keys else None


def _section(sections: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = sections.get(name)
    return section if isinstance(section, Mapping) else {}
