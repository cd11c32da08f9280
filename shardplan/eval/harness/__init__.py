"""shardplan as the model `shardplan` of lm-evaluation-harness (`lm_eval`), registered when this is imported."""

from shardplan.errors import ConfigError

INSTALL_LM_EVAL = "pip install 'lm_eval>=0.4.13'"
"""Command that installs the harness; shardplan itself is on no package index."""

try:
    import lm_eval  # noqa: F401 - before what takes seconds to import
    from lm_eval import evaluator

    from shardplan.eval.harness.language_model import ShardplanLM, own_model
    from shardplan.eval.harness.tasks import select_tasks
except ModuleNotFoundError as error:
    if error.name != "lm_eval":
        raise
    raise ConfigError(f"lm_eval is not installed, which this needs: {INSTALL_LM_EVAL}") from error

evaluator.evaluate = select_tasks(evaluator.evaluate, own_model)

__all__ = ["INSTALL_LM_EVAL", "ShardplanLM"]
