"""`python -m shardplan.plan --config C`: print the plan that eval would run; needs no accelerator and no weights.

With `--lint levanter.yaml`: what is wrong with a hand-written layout. `python -m shardplan.plan diff A.json B.json`:
what differs between two plans.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardplan.config import Config
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.plan.plan import Plan
from shardplan.runtime.command import check_writable, run

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
    from shardplan.model import inspect_model
    from shardplan.plan.planner import check_model, make_plan, model_of, with_plan
    from shardplan.plan.rules import parse_pin
    from shardplan.verify.__main__ import best_plan, verify_plan

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
        from shardplan.plan.explain import why_not
        from shardplan.report.explain import print_why
        from shardplan.report.tables import console

        print_why([why_not(choice, plan, config, model) for choice in config.why], plan, console(beside(config)))


def print_variants(config: Config, model: "Model") -> None:
    """Print what other settings would change; with `--json -` to stderr."""
    from shardplan.plan.what_if import what_if
    from shardplan.report.explain import print_what_if
    from shardplan.report.tables import console

    print_what_if(what_if(config, model), console(beside(config)))


def beside(config: Config) -> TextIO:
    """Where tables go that are no part of the Plan: with `--json -` stdout is the Plan's."""
    return sys.stderr if config.json == "-" else sys.stdout


def lint(config: Config, path: str) -> None:
    """Print what is wrong with the Levanter configuration `path`, its smallest repair, and the best plan beside it.

    Raises:
        InfeasibleError: it cannot run.
    """
    others = [f"--{name}" for name in ("plan", "verify", "why", "what_if", "pin", "forbid") if getattr(config, name)]
    if others:
        raise ConfigError(f"lint checks what is written, and plans by itself; leave out {' and '.join(others)}")
    from shardplan.plan.repair import review
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


def diff(argv: Sequence[str]) -> None:
    """`diff A.json B.json [--json PATH]`: print what differs between two Plan files.

    Raises:
        ConfigError: other arguments, or a file that is not a Plan.
    """
    from shardplan.plan.difference import difference
    from shardplan.report.difference import print_difference
    from shardplan.report.tables import console

    (before, after), target = _diff_arguments(argv)
    found = difference(Plan.load(before), Plan.load(after))
    if target is not None:
        write_json(found.to_json(), target)
    if target != "-":
        print_difference(before, after, found, console(sys.stdout))


def _diff_arguments(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """The two paths, and where the JSON goes."""
    rest = [part for token in argv for part in (token.split("=", 1) if token.startswith("--json=") else [token])]
    target = None
    if "--json" in rest[:-1]:
        at = rest.index("--json")
        target = rest[at + 1]
        del rest[at : at + 2]
    if len(rest) != 2 or any(path.startswith("--") for path in rest):
        raise ConfigError(f"diff takes two Plan files and --json PATH, not {' '.join(argv) or 'nothing'!r}")
    if target not in (None, "-"):
        check_writable("json", str(target))
    return rest, target


def write_json(values: Any, target: str) -> None:
    """Write JSON to the path `target`, or with `-` to stdout."""
    text = json.dumps(values, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def check_targets(config: Config) -> None:
    """Complain about a place the Plan cannot be written to before planning rather than after."""
    if config.json not in (None, "-"):
        check_writable("json", str(config.json))


def show(plan: Plan, json_target: str | None) -> None:
    """Print the plan's tables, or with `-` its JSON; any other `json_target` is a file that gets the JSON as well."""
    if json_target == "-":
        write_json(plan.to_json(), json_target)
        return
    from shardplan.report.tables import console, print_plan

    print_plan(plan, console(sys.stdout))
    if json_target is not None:
        plan.save(json_target)


SUBCOMMANDS = {"diff": diff}

if __name__ == "__main__":
    raise SystemExit(run(main, "shardplan.plan", subcommands=SUBCOMMANDS))
