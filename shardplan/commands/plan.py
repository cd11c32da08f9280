"""`python -m shardplan.plan --config C`: print the plan that eval would run; needs no accelerator and no weights.

With `--lint levanter.yaml`: what is wrong with a hand-written layout.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardplan.commands.diff import diff
from shardplan.commands.output import beside, check_targets, show, write_json
from shardplan.commands.run import run
from shardplan.config import Config
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.plan.plan import Plan

if TYPE_CHECKING:
    from shardplan.model import Model


def main(config: Config) -> None:
    """Plan, and show the plan."""
    started = time.perf_counter()
    check_targets(config)
    # Planning runs nothing on a device; without this JAX would look for accelerators first.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if config.lint == "":
        raise ConfigError("lint needs the path of a Levanter configuration")
    if config.lint is not None:
        lint(config, config.lint)
        return
    from shardplan.commands.verify import best_plan, verify_plan
    from shardplan.model import inspect_model
    from shardplan.plan.pins import parse_pin
    from shardplan.search.make_plan import check_model, make_plan, model_of, with_plan

    asked = config
    config, given = with_plan(config)
    is_asked = not given or config.why or config.what_if or {"model.ref", "model.config"} & asked.given
    model = model_of(config) if is_asked else None
    if given and model:
        check_model(given, model)
    # a given plan's mesh holds for that plan, not for what else there could be
    others = dataclasses.replace(config, mesh=asked.mesh)
    if model:
        for choice in config.why:
            parse_pin(choice, inspect_model(model))
    try:
        plan = given or (best_plan(config, beside(config)) if config.verify > 1 else make_plan(config, model))
        show(plan, config.json)
        explain(others, plan, model)
    finally:  # other settings are of most interest where these have no plan
        if config.what_if and model:
            print_variants(others, model)
    print(
        f"dry run: {time.perf_counter() - started:.1f} s, of which planning {plan.search.seconds:.2f} s",
        file=sys.stderr,
    )
    if config.verify and (given or config.verify == 1):
        verify_plan(config, plan, beside(config))


def explain(config: Config, plan: Plan, model: "Model | None") -> None:
    """Print why the plan does not make the choices that `why` asks for; with `--json -` to stderr."""
    if model and config.why:
        from shardplan.explain.why_not import why_not
        from shardplan.report.explain import print_why
        from shardplan.report.tables import console

        print_why([why_not(choice, plan, config, model) for choice in config.why], plan, console(beside(config)))


def print_variants(config: Config, model: "Model") -> None:
    """Print what other settings would change; with `--json -` to stderr."""
    from shardplan.explain.what_if import what_if
    from shardplan.report.explain import print_what_if
    from shardplan.report.tables import console

    print_what_if(what_if(config, model), console(beside(config)))


def lint(config: Config, path: str) -> None:
    """Print what is wrong with the Levanter configuration `path`, its smallest repair, and the best plan beside it.

    Raises:
        InfeasibleError: it cannot run.
    """
    others = [f"--{name}" for name in ("plan", "verify", "why", "what_if", "pin", "forbid") if getattr(config, name)]
    if others:
        raise ConfigError(f"lint checks what is written, and plans by itself; leave out {' and '.join(others)}")
    from shardplan.lint.repair import review
    from shardplan.report.lint import print_review, review_json
    from shardplan.report.tables import console

    found = review(path, config)
    if config.json is not None:
        write_json(review_json(found), config.json)
    if config.json != "-":
        print_review(found, console(sys.stdout))
    errors = found.lint.errors
    if errors:
        kinds = ", ".join(dict.fromkeys(error.kind for error in errors))
        raise InfeasibleError(f"{path} cannot run as it is on {config.hardware.slice}: {kinds}")


def run_command(argv: Sequence[str]) -> int:
    """`shardplan plan ARGV`; returns the exit code."""
    return run(main, "shardplan plan", argv, {"diff": diff})
