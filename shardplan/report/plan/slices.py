"""Prints the slices that a plan can be made for, and converts them to JSON."""

import math
from typing import Any

from rich.console import Console

from shardplan.hardware import GENERATIONS, GIB, standard_slices
from shardplan.report.text import make_table, print_wrapped

OTHER_SLICES = (
    "Also: any torus of complete hosts by its chips (v4:4x4x12), several slices over the data-centre network "
    "(2xv6e-256), and virtual CPU devices (cpu-8)."
)


def slices_json() -> dict[str, Any]:
    """Return every slice that has a name on Cloud TPU as JSON values; memory in bytes per device."""
    return {
        "slices": [
            {
                "slice": each.name,
                "generation": generation.name,
                "torus": list(each.torus),
                "chips": math.prod(each.torus),
                "devices": each.devices,
                "hbm": int(generation.hbm_gib * GIB),
            }
            for generation in GENERATIONS.values()
            for each in standard_slices(generation)
        ]
    }


def print_slices(out: Console) -> None:
    """Print every slice that has a name on Cloud TPU, with its torus, its size and its memory."""
    table = make_table(
        "slices", ("name", "generation", "torus"), ("chips", "devices", "GiB per device"), is_narrow=True
    )
    for generation in GENERATIONS.values():
        for each in standard_slices(generation):
            torus, chips = "x".join(map(str, each.torus)), str(math.prod(each.torus))
            table.add_row(each.name, generation.name, torus, chips, str(each.devices), f"{generation.hbm_gib:.2f}")
        table.add_section()
    out.print(table)
    print_wrapped(OTHER_SLICES, out)
