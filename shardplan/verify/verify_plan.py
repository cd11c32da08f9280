"""Defines verify_plan, which returns the verdict on one plan, for programs and notebooks."""

from shardplan.config.plan_config import CompilingConfig
from shardplan.config.sections import CompilerConfig, ModelConfig
from shardplan.errors import check_argument
from shardplan.plan.arguments import check_plan
from shardplan.plan.plan import Plan
from shardplan.verify.run import verify
from shardplan.verify.select_cases import build_case
from shardplan.verify.verdict import Verdict


def verify_plan(plan: Plan, compiler: CompilerConfig | None = None) -> Verdict:
    """Have the TPU compiler judge the step of a plan, which needs libtpu but no TPU, and takes seconds to minutes.

    Args:
        plan: the plan. The config.json of its model is read again.
        compiler: limits, and the folder in which compiled programs are kept.

    Returns:
        The verdict: whether the step fits, its memory, and its modelled time. If the compiler refuses the step or
            reaches a limit, the verdict says so.

    Raises:
        ConfigError: libtpu is not installed, or the plan is not for a TPU slice.
    """
    check_plan("verify_plan", plan)
    compiler = compiler or CompilerConfig()
    check_argument("verify_plan", "compiler", compiler, CompilerConfig, "a CompilerConfig of shardplan.config")
    model = ModelConfig(ref=plan.model.ref, config=plan.model.config, levanter_class=plan.model.class_name)
    (verdict,) = verify([build_case(CompilingConfig(model=model, compiler=compiler), plan)], compiler)
    return verdict
