"""`shardplan models [NAME]`: list the supported models, or show the facts of one; needs no accelerator."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardplan.commands.output import check_outputs, side_stream, write_json
from shardplan.config.help import WITHOUT_CONFIGURATION, make_parser
from shardplan.runtime.environment import compute_on_cpu

if TYPE_CHECKING:
    from shardplan.catalogue.model_types import TypeFacts


def main(argv: Sequence[str]) -> None:
    """Run `shardplan models` with the arguments `argv`.

    Raises:
        ConfigError: arguments are wrong, or no model or model type has the name.
    """
    parser = make_parser("models", description=WITHOUT_CONFIGURATION["models"])
    parser.add_argument("name", nargs="?", help="a released model, its repository on the hub, or a model type")
    parser.add_argument("--json", metavar="TEXT", help="write what is printed to this path, or to stdout with `-`")
    arguments = parser.parse_args(argv)
    check_outputs((), json=arguments.json)
    if arguments.name is None:
        _show_overview(arguments.json)
    else:
        _show_model(arguments.name, arguments.json)


def _show_overview(json_target: str | None) -> None:
    """Print and write all model types."""
    from shardplan.catalogue.names import refused_types, released_by_type

    compute_on_cpu()
    from shardplan.catalogue.model_types import describe_type
    from shardplan.report.catalogue import overview_json, print_overview
    from shardplan.report.console import console
    from shardplan.runtime.progress import Progress, show_progress

    by_type, refused = released_by_type(), refused_types()
    types: list[TypeFacts] = []
    with show_progress(Progress("building", "model types", len(by_type))) as progress:
        for model_type, released in by_type.items():
            types.append(describe_type(model_type, released))
            progress.done += 1
    if json_target is not None:
        write_json(overview_json(types, refused), json_target)
    if json_target != "-":
        print_overview(types, refused, console(side_stream(json_target)))


def _show_model(name: str, json_target: str | None) -> None:
    """Print and write the facts of one model or type."""
    from shardplan.catalogue.names import find_model, refused_types, released_by_type

    found = find_model(name)
    compute_on_cpu()
    from shardplan.catalogue.model_types import describe_type
    from shardplan.catalogue.released import describe_model
    from shardplan.report.catalogue import model_json, print_model, print_refusal, print_type
    from shardplan.report.console import console
    from shardplan.runtime.progress import print_note

    refused = next((each for each in refused_types() if found.type in each.types), None)
    supported = None if refused else describe_type(found.type, released_by_type()[found.type])
    model = describe_model(found.released) if found.released else None
    if found.wrapper is not None:
        print_note(f"{found.wrapper} is a model of images and text; its text model alone is read, a {found.type}")
    if json_target is not None:
        write_json(model_json(model, supported, refused), json_target)
    if json_target == "-":
        return
    out = console(side_stream(json_target))
    if model is not None:
        print_model(model, out)
    if supported is not None:
        print_type(supported, out)
    if refused is not None:
        print_refusal(refused, found.type, out)
