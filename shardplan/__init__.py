"""shardplan: plan, stream and evaluate sharded Hugging Face language models with JAX, Haliax and Levanter.

Importing the package is instant; JAX and Levanter are imported when a public name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardplan.checkpoint.best_effort import best_effort_sharding
    from shardplan.checkpoint.load import HFCheckpointConverter, load_pretrained
    from shardplan.checkpoint.saving.save import save_pretrained
    from shardplan.checkpoint.saving.save_orbax import save_orbax
    from shardplan.config import load_config
    from shardplan.eval.evaluate import evaluate
    from shardplan.execution.device_mesh import make_mesh
    from shardplan.explain.rank_slices import rank_slices
    from shardplan.explain.what_if import what_if
    from shardplan.explain.why_not import why_not
    from shardplan.levanter_config.writer import trainer_yaml
    from shardplan.levanter_patch import patch_levanter
    from shardplan.lint.repair import review
    from shardplan.monitoring.audit import audit
    from shardplan.plan import Plan
    from shardplan.runtime.exit_codes import end_process
    from shardplan.runtime.processes.group import watch
    from shardplan.search.make_plan import make_plan
    from shardplan.verify.verify_plan import verify_plan

__version__ = "0.1.0"
__all__ = [
    "HFCheckpointConverter", "Plan", "audit", "best_effort_sharding", "end_process", "evaluate", "load_config",
    "load_pretrained", "make_mesh", "make_plan", "patch_levanter", "rank_slices", "review", "save_orbax",
    "save_pretrained", "trainer_yaml", "verify_plan", "watch", "what_if", "why_not",
]  # fmt: skip

_MODULES = {
    "HFCheckpointConverter": "shardplan.checkpoint.load",
    "Plan": "shardplan.plan",
    "audit": "shardplan.monitoring.audit",
    "best_effort_sharding": "shardplan.checkpoint.best_effort",
    "end_process": "shardplan.runtime.exit_codes",
    "evaluate": "shardplan.eval.evaluate",
    "load_config": "shardplan.config",
    "load_pretrained": "shardplan.checkpoint.load",
    "make_mesh": "shardplan.execution.device_mesh",
    "make_plan": "shardplan.search.make_plan",
    "patch_levanter": "shardplan.levanter_patch",
    "rank_slices": "shardplan.explain.rank_slices",
    "review": "shardplan.lint.repair",
    "save_orbax": "shardplan.checkpoint.saving.save_orbax",
    "save_pretrained": "shardplan.checkpoint.saving.save",
    "trainer_yaml": "shardplan.levanter_config.writer",
    "verify_plan": "shardplan.verify.verify_plan",
    "watch": "shardplan.runtime.processes.group",
    "what_if": "shardplan.explain.what_if",
    "why_not": "shardplan.explain.why_not",
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'shardplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
