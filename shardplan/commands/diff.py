"""`python -m shardplan.plan diff A.json B.json`: what differs between two plans."""

import sys
from collections.abc import Sequence

from shardplan.commands.output import write_json
from shardplan.errors import ConfigError
from shardplan.plan.plan import Plan
from shardplan.runtime.writable import check_writable


def diff(argv: Sequence[str]) -> None:
    """`diff A.json B.json [--json PATH]`: print what differs between two Plan files.

    Raises:
        ConfigError: other arguments, or a file that is not a Plan.
    """
    from shardplan.plan.diff import difference
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
