"""`python -m shardplan.verify --config C`: have the TPU compiler judge the plan, on a machine without a TPU."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from shardplan.config import Config
from shardplan.errors import InfeasibleError
from shardplan.plan.__main__ import check_targets
from shardplan.plan.plan import Plan
from shardplan.runtime.command import run

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

    show(config, cases, verify(cases, config.compiler, progress))


def verify_plan(config: Config, plan: Plan) -> None:
    """Have `plan` judged, as `--verify` of the other commands does.

    Raises:
        InfeasibleError: it does not fit, or is refused.
    """
    from shardplan.verify.cases import plan_case
    from shardplan.verify.run import verify

    case = plan_case(config, plan)
    # with `--json -` stdout is the Plan's
    show(
        replace(config, json=None), [case], verify([case], config.compiler), sys.stderr if config.json == "-" else None
    )


def show(config: Config, cases: "Sequence[Case]", verdicts: "Sequence[Verdict]", stream: TextIO | None = None) -> None:
    """Print the verdicts, the best first, and write them where `json` says.

    Raises:
        InfeasibleError: none of them fits.
    """
    from shardplan.report import console, print_ranking, print_verdict

    ranked = sorted(zip(cases, verdicts, strict=True), key=lambda pair: pair[1].rank)
    values = [{"label": case.label, **verdict.to_json()} for case, verdict in ranked]
    if config.json == "-":
        json.dump({"verdicts": values}, sys.stdout, indent=1)
        print()
    else:
        out = console(stream or sys.stdout)
        print_verdict(ranked[0][0].plan, ranked[0][1], out)
        if len(ranked) > 1:
            print_ranking([(case.label, case.plan, verdict) for case, verdict in ranked], out)
        if config.json is not None:
            with open(config.json, "w", encoding="utf-8") as file:
                json.dump({"verdicts": values}, file, indent=1)
    best = ranked[0][1]
    if not best.fits:
        raise InfeasibleError(f"{best.slice}: {best.program} {best.outcome}: {best.reason}")


if __name__ == "__main__":
    raise SystemExit(run(main, "shardplan.verify"))
