"""One program for the compiler: a plan, the configuration of its model, and the compiler options."""

from dataclasses import dataclass, field
from typing import Any

from shardplan.config.sections import CompiledProgram
from shardplan.plan.plan import Plan


@dataclass(frozen=True)
class Case:
    """One program to compile, with all inputs that determine it."""

    label: str
    plan: Plan
    hf_config: dict[str, Any]
    """The model's config.json."""
    program: CompiledProgram = CompiledProgram.STEP
    options: dict[str, str] = field(default_factory=dict)
    """Compiler options."""

    @property
    def program_kind(self) -> str:
        """The kind of workload whose step is compiled, or `load`."""
        return self.program.value if self.program == CompiledProgram.LOAD else self.plan.workload.kind
