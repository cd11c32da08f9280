"""`python -m shardplan.plan --config C`: print the plan that eval would run; needs no accelerator and no weights."""

import json
import os
import sys
import time

from shardplan.config import Config
from shardplan.plan.plan import Plan
from shardplan.runtime.command import check_writable, run


def main(config: Config) -> None:
    """Plan, and show the plan."""
    started = time.perf_counter()
    check_targets(config)
    # Planning runs nothing on a device; without this JAX would look for accelerators first.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardplan.plan.planner import make_plan, with_plan

    config, given = with_plan(config)
    plan = given or make_plan(config)
    show(plan, config.json)
    print(
        f"dry run: {time.perf_counter() - started:.1f} s, of which planning {plan.search.seconds:.2f} s",
        file=sys.stderr,
    )
    if config.verify:
        from shardplan.verify.__main__ import verify_plan

        # with `--json -` stdout is the Plan's
        verify_plan(config, plan, sys.stderr if config.json == "-" else sys.stdout)


def check_targets(config: Config) -> None:
    """Complain about a place the Plan cannot be written to before planning rather than after."""
    if config.json not in (None, "-"):
        check_writable("json", str(config.json))


def show(plan: Plan, json_target: str | None) -> None:
    """Print the plan's tables, or with `-` its JSON; any other `json_target` is a file that gets the JSON as well."""
    if json_target == "-":
        json.dump(plan.to_json(), sys.stdout, indent=1)
        print()
        return
    from shardplan.report import console, print_plan

    print_plan(plan, console(sys.stdout))
    if json_target is not None:
        plan.save(json_target)


if __name__ == "__main__":
    raise SystemExit(run(main, "shardplan.plan"))
