"""`python -m shardplan.verify --config C`: have the TPU compiler judge the plan, on a machine without a TPU."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from shardplan.commands.output import check_targets
from shardplan.commands.run import run
from shardplan.config import Config
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.plan.plan import Plan

if TYPE_CHECKING:
    from shardplan.verify.run import Case
    from shardplan.verify.verdict import Verdict


def main(config: Config) -> None:
    """Verify the plan of the configuration, and what it is to be compared with."""
    check_targets(config)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardplan.verify.cases import cases_of
    from shardplan.verify.run import verify

    cases = cases_of(config)

    def progress(case: "Case", verdict: "Verdict") -> None:
        if len(cases) > 1:
            print(f"{case.label}: {verdict.outcome} ({verdict.compile_seconds:.0f} s)", file=sys.stderr)

    verdicts = verify(cases, config.compiler, progress)
    ranked = sorted(zip(cases, verdicts, strict=True), key=lambda pair: pair[1].rank(pair[0].plan.workload))
    values = {"verdicts": [{"label": case.label, **verdict.to_json()} for case, verdict in ranked]}
    if config.json == "-":
        json.dump(values, sys.stdout, indent=1)
        print()
    else:
        show(ranked, sys.stdout)
    if config.json not in (None, "-"):
        Path(str(config.json)).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    check_fits(ranked[0][1])


def verify_plan(config: Config, plan: Plan, out: TextIO) -> None:
    """Have `plan` judged, as `--verify` of the other commands does, and print the verdict.

    Raises:
        InfeasibleError: it does not fit, or is refused.
    """
    from shardplan.verify.cases import plan_case
    from shardplan.verify.run import verify

    _check_plain(config)
    if config.verify > 1:
        raise ConfigError(
            "verify with a number is for shardplan.plan; write its plan with --json, and use it with --plan"
        )
    case = plan_case(config, plan)
    (verdict,) = verify([case], config.compiler)
    show([(case, verdict)], out)
    check_fits(verdict)


def best_plan(config: Config, out: TextIO) -> Plan:
    """Of the `config.verify` best plans by estimate the one that the compiler finds fastest; prints the ranking.

    Raises:
        InfeasibleError: none fits.
    """
    from shardplan.search.make_plan import model_of, rank_plans
    from shardplan.verify.cases import plan_case
    from shardplan.verify.run import verify

    _check_plain(config)
    plans = rank_plans(config, int(config.verify), model_of(config))
    cases = [plan_case(config, plan, f"plan {number}") for number, plan in enumerate(plans, 1)]
    verdicts = verify(cases, config.compiler)
    ranked = sorted(zip(cases, verdicts, strict=True), key=lambda pair: pair[1].rank(pair[0].plan.workload))
    show(ranked, out)
    case, verdict = ranked[0]
    check_fits(verdict)
    assert verdict.time is not None
    case.plan.search.reasons.insert(
        0,
        f"of the {len(plans)} best by estimate, of which it is number {case.label.split()[-1]}, the fastest by the TPU "
        f"compiler: {verdict.time.step_seconds:.3g} s a step",
    )
    return case.plan


def _check_plain(config: Config) -> None:
    if config.options != "plan" or config.against:
        raise ConfigError("options and against are for shardplan verify; --verify checks the plan as it is")


def show(ranked: "Sequence[tuple[Case, Verdict]]", stream: TextIO) -> None:
    """Print the first verdict, and the ranking where there are several."""
    from shardplan.report.tables import console
    from shardplan.report.verdicts import print_ranking, print_verdict

    out = console(stream)
    case, verdict = ranked[0]
    print_verdict(case.label, case.plan, verdict, out)
    if len(ranked) > 1:
        print_ranking([(case.label, case.plan, verdict) for case, verdict in ranked], out)


def check_fits(verdict: "Verdict") -> None:
    """See that it fits; with several, that the best does.

    Raises:
        InfeasibleError: it does not.
    """
    if not verdict.fits:
        raise InfeasibleError(f"{verdict.slice}: {verdict.program} {verdict.outcome}: {verdict.reason}")


def run_command(argv: Sequence[str]) -> int:
    """`shardplan verify ARGV`; returns the exit code."""
    return run(main, "shardplan verify", argv)
