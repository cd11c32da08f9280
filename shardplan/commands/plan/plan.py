"""`shardplan plan --config C`: print the plan that eval would run; needs no accelerator and no weights.

With `--lint levanter.yaml`: print what is wrong with a hand-written layout.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardplan.commands.inputs import input_paths
from shardplan.commands.output import check_outputs, show_plan, side_stream, write_json, write_report
from shardplan.commands.plan.rank_slices import plan_slices
from shardplan.commands.verify import best_plan, check_fits, show_verdict
from shardplan.config import PlanConfig, parse_config
from shardplan.config.command_flags import PlanCommand
from shardplan.config.given_plan import load_given_plan
from shardplan.config.model_config import check_model_config
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.plan.plan import Plan
from shardplan.runtime.environment import compute_on_cpu

if TYPE_CHECKING:
    from shardplan.explain.what_if import WhatIf
    from shardplan.lint.repair import Review
    from shardplan.model.registry import Model
    from shardplan.report.page.judgement import Judgement
    from shardplan.verify.case import Case
    from shardplan.verify.verdict import Verdict


def main(argv: Sequence[str]) -> None:
    """Run `shardplan plan` with the arguments `argv`."""
    config = parse_config(argv, PlanCommand)
    if config.list_slices:
        list_slices(config.json)
        return
    plan_and_print(config)


def list_slices(json_target: str | None) -> None:
    """Print the slices that a plan can be made for, as a table, as JSON, or both."""
    from shardplan.report.console import console
    from shardplan.report.plan.slices import print_slices, slices_json

    check_outputs((), json=json_target)
    if json_target is not None:
        write_json(slices_json(), json_target)
    if json_target != "-":
        print_slices(console(sys.stdout))


def dry_run(config: PlanConfig) -> Plan | None:
    """Run `shardplan plan --parameters` with the planning keys of another command's configuration."""
    names = [item.name for item in dataclasses.fields(PlanCommand) if hasattr(config, item.name)]
    return plan_and_print(PlanCommand(**{name: getattr(config, name) for name in names}, parameters=True))


def plan_and_print(config: PlanCommand) -> Plan | None:
    """Plan, print the plan, and answer the configuration's questions about it (`--why`, `--what_if`).

    Returns:
        The plan; None if the configuration asks for something else.
    """
    started = time.perf_counter()
    check_outputs(input_paths(config), json=config.json, report=config.report)
    compute_on_cpu()
    judgements = _read_verdicts(config.verdicts) if config.verdicts is not None else []
    if config.lint is not None:
        lint(config, config.lint, judgements)
        return None
    if config.rank_slices:
        plan_slices(config)
        return None
    requested = config
    config, given = load_given_plan(config)
    needs_model = not given or config.why or config.what_if or {"model.ref", "model.config"} & requested.given
    model = _build_model(config, given) if needs_model else None
    # the mesh of a given plan must not constrain its alternatives
    others = dataclasses.replace(config, mesh=requested.mesh)
    answer: WhatIf | None = None
    verdicts: Sequence[tuple[Case, Verdict]]
    try:
        plan, verdicts = (given, ()) if given else _search(config, model)
        others = dataclasses.replace(others, workload=dataclasses.replace(others.workload, batch=plan.workload.batch))
        if given is None or not (config.why or config.what_if):  # of a plan that is given only the answer is new
            show_plan(plan, config.json, config.parameters)
        explain(others, plan, model)
    finally:  # also without a plan: then other settings are of most interest
        if config.what_if and model:
            answer = find_variants(others, model)
    if answer is not None:
        from shardplan.explain.what_if import with_settings

        plan = with_settings(plan, answer)
    if config.json is not None:
        write_json(plan.to_json(), config.json)
    if given is None:
        from shardplan.runtime.progress import print_note

        print_note(
            f"done in {time.perf_counter() - started:.1f} s, of which the search took {plan.search.seconds:.2f} s"
        )
    if config.verify and not verdicts:
        verdicts = [show_verdict(config, plan, side_stream(config.json))]
    if config.report is not None:
        write_report(config.report, plan, verdicts, judgements)
    if verdicts:
        check_fits(verdicts[0][1])
    return plan


def _read_verdicts(path: str) -> "list[Judgement]":
    from shardplan.report.page.judgement import load_judgements

    return load_judgements(path)


def _build_model(config: PlanCommand, given: Plan | None) -> "Model":
    """Build the model, and check a given plan and the axes that `--why` names against it.

    Raises:
        ConfigError: the plan is for another model, or the model has no such axis.
    """
    check_model_config(config)
    from shardplan.model.inspect import inspect_model
    from shardplan.plan.pins import parse_pin
    from shardplan.search.given_plan import check_model
    from shardplan.search.make_plan import model_from_config

    model = model_from_config(config)
    if given:
        check_model(given, model)
    for choice in config.why:
        parse_pin(choice, inspect_model(model), "why")
    return model


def _search(config: PlanCommand, model: "Model | None") -> "tuple[Plan, Sequence[tuple[Case, Verdict]]]":
    """Search for the best plan by estimate, or by the compiler if `--verify` has a number; return plan and verdicts."""
    if config.verify > 1:
        return best_plan(config, side_stream(config.json))
    from shardplan.search.make_plan import make_plan

    return make_plan(config, model), ()


def explain(config: PlanCommand, plan: Plan, model: "Model | None") -> None:
    """Print why the plan does not make the choices of `--why`; nothing without `--why` or without a model.

    With `--json -` the text goes to stderr.
    """
    if model and config.why:
        from shardplan.explain.why_not import why_not
        from shardplan.report.console import console
        from shardplan.report.plan.explain import print_why

        answers = [why_not(choice, plan, config, model) for choice in config.why]
        print_why(answers, console(side_stream(config.json)))


def find_variants(config: PlanCommand, model: "Model") -> "WhatIf":
    """Plan with other settings, and print the differences; to stderr with `--json -`."""
    from shardplan.explain.what_if import what_if
    from shardplan.report.console import console
    from shardplan.report.plan.explain import print_what_if
    from shardplan.runtime.progress import show_steps

    with show_steps("planning variants") as report:
        answer = what_if(config, model, report)
    print_what_if(answer.variants, console(side_stream(config.json)))
    return answer


def lint(config: PlanCommand, path: str, judgements: "Sequence[Judgement]" = ()) -> None:
    """Print what is wrong with the Levanter configuration `path`, its smallest repair, and the best plan beside it.

    Args:
        judgements: verdicts to show in the report.

    Raises:
        InfeasibleError: the configuration cannot run.
    """
    others = ("plan", "verify", "why", "what_if", "pin", "forbid", "rank_slices")
    conflicts = [f"--{name}" for name in others if getattr(config, name)]
    if conflicts:
        raise ConfigError(f"lint checks the file as it is, and plans by itself; leave out {' and '.join(conflicts)}")
    if config.model.ref or config.model.config:
        check_model_config(config)
    from shardplan.lint.parser.run_worker import shared_parser

    shared_parser()  # it imports Levanter while this process imports JAX
    from shardplan.lint.repair import review
    from shardplan.report.console import console
    from shardplan.report.plan.lint import print_review, review_json
    from shardplan.runtime.progress import show_steps

    with show_steps("lint") as report:
        reviewed = review(path, config, report)
    if config.json is not None:
        write_json(review_json(reviewed), config.json)
    if config.json != "-":
        print_review(reviewed, console(sys.stdout))
    if config.report is not None:
        _report_review(config.report, reviewed, judgements)
    errors = reviewed.lint.errors
    if errors:
        kinds = ", ".join(dict.fromkeys(error.kind for error in errors))
        raise InfeasibleError(f"{path} cannot run as it is on {reviewed.lint.subject.hardware.name}: {kinds}")


def _report_review(target: str, reviewed: "Review", judgements: "Sequence[Judgement]") -> None:
    """Write the page of a reviewed layout, or print a note if it has no plan to show."""
    from shardplan.report.page.panels.repair import repair_panel
    from shardplan.runtime.progress import print_note

    shown = repair_panel(reviewed)
    if shown is None:
        print_note(f"no report: {reviewed.why_no_best}")
        return
    plan, repair = shown
    write_report(target, plan, (), judgements, repair)
