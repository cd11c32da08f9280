"""python scripts/make_picture.py --config configs/405b.yaml > docs/plan-405b.svg

Draws the tables of a printed plan as SVG.
"""

import io
import os
import sys

from rich.console import Console

from shardplan import config

WIDTH = 190
"""Columns of the drawn terminal."""


def main() -> None:
    """Make the plan that the command line describes, and write its tables as SVG to stdout."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardplan.report.tables import print_plan
    from shardplan.search.make_plan import make_plan

    out = Console(file=io.StringIO(), record=True, width=WIDTH)
    print_plan(make_plan(config.parse_config(sys.argv[1:])), out)
    sys.stdout.write(out.export_svg(title="python -m shardplan.plan --config configs/405b.yaml"))


if __name__ == "__main__":
    main()
