"""`shardplan verify --config C`: have the TPU compiler judge the plan, on a machine without a TPU."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from shardplan.commands.output import check_json_target, write_json
from shardplan.config import parse_config
from shardplan.config.command_flags import CompilingConfig, PlanCommand, VerifyCommand
from shardplan.errors import InfeasibleError
from shardplan.plan.plan import Plan

if TYPE_CHECKING:
    from shardplan.verify.case import Case
    from shardplan.verify.verdict import Verdict


def main(argv: Sequence[str]) -> None:
    """Run `shardplan verify` with the arguments `argv`."""
    config = parse_config(argv, VerifyCommand)
    check_json_target(config.json)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardplan.report.verdicts import verdict_json
    from shardplan.verify.run import verify
    from shardplan.verify.select_cases import build_cases

    cases = build_cases(config, config.options, config.against)

    def progress(case: "Case", verdict: "Verdict") -> None:
        if len(cases) > 1:
            print(f"{case.label}: {verdict.outcome} ({verdict.compile_seconds:.0f} s)", file=sys.stderr)

    verdicts = verify(cases, config.compiler, progress)
    ranked = sorted(zip(cases, verdicts, strict=True), key=lambda pair: pair[1].rank(pair[0].plan.workload))
    values = {"verdicts": [{"label": case.label, **verdict_json(verdict)} for case, verdict in ranked]}
    if config.json != "-":
        show(ranked, sys.stdout)
    if config.json is not None:
        write_json(values, config.json)
    check_fits(ranked[0][1])


def verify_plan(config: CompilingConfig, plan: Plan, out: TextIO) -> None:
    """Compile `plan`, as `--verify` of the other commands does, and print the verdict.

    Raises:
        InfeasibleError: it does not fit, or is refused.
    """
    from shardplan.verify.run import verify
    from shardplan.verify.select_cases import build_case

    case = build_case(config, plan)
    (verdict,) = verify([case], config.compiler)
    show([(case, verdict)], out)
    check_fits(verdict)


def best_plan(config: PlanCommand, out: TextIO) -> Plan:
    """Print the compiler's ranking of the `config.verify` best plans by estimate, and return its fastest.

    Raises:
        InfeasibleError: none fits.
    """
    from shardplan.search.make_plan import model_from_config, rank_plans
    from shardplan.verify.run import verify
    from shardplan.verify.select_cases import build_case

    plans = rank_plans(config, int(config.verify), model_from_config(config))
    cases = [build_case(config, plan, f"plan {number}") for number, plan in enumerate(plans, 1)]
    verdicts = verify(cases, config.compiler)
    ranked = sorted(zip(cases, verdicts, strict=True), key=lambda pair: pair[1].rank(pair[0].plan.workload))
    show(ranked, out)
    case, verdict = ranked[0]
    check_fits(verdict)
    assert verdict.time is not None
    case.plan.search.reasons.insert(
        0,
        f"fastest of {len(plans)} compiled plans ({case.label} by estimate): {verdict.time.step_seconds:.3g} s a step "
        "by the TPU compiler",
    )
    return case.plan


def show(ranked: "Sequence[tuple[Case, Verdict]]", stream: TextIO) -> None:
    """Print the first verdict, and the ranking if there are several."""
    from shardplan.report.tables import console
    from shardplan.report.verdicts import print_ranking, print_verdict

    out = console(stream)
    case, verdict = ranked[0]
    print_verdict(case.label, case.plan, verdict, out)
    if len(ranked) > 1:
        print_ranking([(case.label, case.plan, verdict) for case, verdict in ranked], out)


def check_fits(verdict: "Verdict") -> None:
    """Check that a verdict is that the program fits.

    Raises:
        InfeasibleError: it does not.
    """
    if not verdict.fits:
        from shardplan.report.verdicts import reason_text

        raise InfeasibleError(f"{verdict.slice}: {verdict.program} {verdict.outcome}: {reason_text(verdict.reason)}")
