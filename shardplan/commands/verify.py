"""`shardplan verify --config C`: have the TPU compiler judge the plan, on a machine without a TPU."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from shardplan.commands.inputs import input_paths
from shardplan.commands.output import check_outputs, write_json, write_report
from shardplan.config import parse_config
from shardplan.config.command_flags import PlanCommand, VerifyCommand
from shardplan.config.model_config import check_model_config
from shardplan.config.plan_config import CompilingConfig
from shardplan.config.sections import CompilerConfig
from shardplan.errors import InfeasibleError, UndecidedError
from shardplan.plan.plan import Plan
from shardplan.runtime.environment import compute_on_cpu

if TYPE_CHECKING:
    from shardplan.verify.case import Case
    from shardplan.verify.verdict import Verdict

USUAL_TIME = "a compile usually takes 1 to 4 minutes"


def main(argv: Sequence[str]) -> None:
    """Run `shardplan verify` with the arguments `argv`."""
    config = parse_config(argv, VerifyCommand)
    check_outputs(input_paths(config), json=config.json, report=config.report)
    compute_on_cpu()
    if config.plan is None:
        check_model_config(config)
    from shardplan.report.page.judgement import judgement_json
    from shardplan.runtime.progress import show_steps
    from shardplan.verify.select_cases import build_cases

    with show_steps("verify") as report:
        report("planning, and reading what to compare with")
        cases = build_cases(config, config.options, config.against)
    verdicts = compile_cases(cases, config.compiler)
    ranked = sorted(zip(cases, verdicts, strict=True), key=lambda pair: pair[1].rank(pair[0].plan.workload))
    values = {"verdicts": [judgement_json(case.label, case.plan, verdict) for case, verdict in ranked]}
    if config.json != "-":
        show(ranked, sys.stdout)
    if config.json is not None:
        write_json(values, config.json)
    if config.report is not None:
        write_report(config.report, cases[0].plan, ranked)
    check_fits(ranked[0][1])


def compile_cases(cases: "Sequence[Case]", compiler: CompilerConfig) -> "list[Verdict]":
    """Return the compiler's verdict on every case, and show progress while it compiles."""
    from shardplan.runtime.devices import is_first_process
    from shardplan.runtime.progress import print_note, show_steps
    from shardplan.verify.run import verify

    compiling: dict[int, str] = {}
    verdicts = 0
    with show_steps("verify", is_first_process()) as report:

        def report_state() -> None:
            now = f"; compiling {', '.join(compiling.values())}; {USUAL_TIME}" if compiling else ""
            report(f"{verdicts} of {len(cases)} verdicts{now}")

        def on_compile(case: "Case") -> None:
            compiling[id(case)] = case.label
            report_state()

        def on_verdict(case: "Case", verdict: "Verdict") -> None:
            nonlocal verdicts
            verdicts += 1
            compiling.pop(id(case), None)
            if len(cases) > 1:
                print_note(f"{case.label}: {verdict.outcome} ({verdict.compile_seconds:.0f} s)")
            report_state()

        report_state()
        return verify(cases, compiler, on_verdict, on_compile)


def show_verdict(config: CompilingConfig, plan: Plan, out: TextIO) -> "tuple[Case, Verdict]":
    """Compile `plan` for the `--verify` of another command, print the verdict, and return it with its case."""
    from shardplan.verify.select_cases import build_case

    case = build_case(config, plan)
    (verdict,) = compile_cases([case], config.compiler)
    show([(case, verdict)], out)
    return case, verdict


def best_plan(config: PlanCommand, out: TextIO) -> "tuple[Plan, Sequence[tuple[Case, Verdict]]]":
    """Print the compiler's ranking of the `config.verify` best plans by estimate; return the first one and the ranking.

    Raises:
        InfeasibleError: no plan fits.
        UndecidedError: no plan is known to fit, because the compiler reached a limit.
    """
    from shardplan.search.make_plan import model_from_config, rank_plans
    from shardplan.verify.select_cases import build_case

    plans = rank_plans(config, int(config.verify), model_from_config(config))
    cases = [build_case(config, plan, f"plan {number}") for number, plan in enumerate(plans, 1)]
    verdicts = compile_cases(cases, config.compiler)
    ranked = sorted(zip(cases, verdicts, strict=True), key=lambda pair: pair[1].rank(pair[0].plan.workload))
    show(ranked, out)
    case, verdict = ranked[0]
    check_fits(verdict)
    if verdict.time is not None:
        reason = (
            f"fastest of {len(plans)} compiled plans ({case.label} by estimate): {verdict.time.step_seconds:.3g} s a "
            "step by the TPU compiler"
        )
    else:
        reason = f"{case.label} by estimate, the first of {len(plans)} that fits by the TPU compiler"
    case.plan.search.reasons.insert(0, reason)
    return case.plan, ranked


def show(ranked: "Sequence[tuple[Case, Verdict]]", stream: TextIO) -> None:
    """Print the first verdict, and a ranking if there are several."""
    from shardplan.report.console import console
    from shardplan.report.plan.verdicts import print_ranking, print_verdict

    out = console(stream)
    case, verdict = ranked[0]
    print_verdict(case.label, case.plan, verdict, out)
    if len(ranked) > 1:
        print_ranking([(case.label, case.plan, verdict) for case, verdict in ranked], out)


def check_fits(verdict: "Verdict") -> None:
    """Check that a verdict says that the program fits.

    Raises:
        InfeasibleError: the program does not fit.
        UndecidedError: there is no verdict, because the compiler reached a limit first, or crashed.
    """
    if verdict.fits:
        return
    from shardplan.report.plan.verdicts import reason_text
    from shardplan.verify.verdict import Outcome

    kind = UndecidedError if verdict.outcome == Outcome.UNDECIDED else InfeasibleError
    raise kind(f"{verdict.slice}: {verdict.program} {verdict.outcome}: {reason_text(verdict.reason)}")
