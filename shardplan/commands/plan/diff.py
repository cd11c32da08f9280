"""`shardplan plan diff A.json B.json`: print what differs between two Plan files."""

import sys
from collections.abc import Sequence

from shardplan.commands.output import check_outputs, write_json
from shardplan.config.help import WITHOUT_CONFIGURATION, make_parser
from shardplan.plan.plan import Plan


def main(argv: Sequence[str]) -> None:
    """Run `shardplan plan diff` with the arguments `argv`.

    Raises:
        ConfigError: arguments are wrong, or a file is not a Plan.
    """
    from shardplan.plan.diff import diff_plans
    from shardplan.report.console import console
    from shardplan.report.plan.diff import print_difference

    parser = make_parser("plan diff", description=WITHOUT_CONFIGURATION["plan diff"])
    parser.add_argument("before", help="a Plan file")
    parser.add_argument("after", help="a Plan file")
    parser.add_argument("--json", metavar="TEXT", help="write the differences to this path, or to stdout with `-`")
    arguments = parser.parse_args(argv)
    before, after, target = arguments.before, arguments.after, arguments.json
    check_outputs((before, after), json=target)
    differences = diff_plans(Plan.load(before), Plan.load(after))
    if target is not None:
        write_json(differences.to_json(), target)
    if target != "-":
        print_difference(before, after, differences, console(sys.stdout))
