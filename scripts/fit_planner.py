"""python scripts/fit_planner.py

Fits the factors of the planner's cost model (shardplan/cost/calibration.json) to programs that the TPU compiler makes
of a few plans for every generation, and writes them, with the errors that are left, and a table of both. Needs no TPU.
The plans differ from those of scripts/bench_planner.py and bench_published.py, which judge the result. Compiling all
programs takes hours on 2 cores; docs/benchmarks/calibration.json keeps what the compiler made of them, so that a change
of the cost model is fitted again in minutes.
"""

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bench_planner import row
from factor_fits import ERRORS, Fit, Fitted, Observation, value_of
from fitted_programs import FITTED, make_cases
from planner_record import (
    BENCHMARKS,
    CALIBRATION,
    PLANNER,
    PUBLISHED,
    Errors,
    compile_cases,
    errors_by_family,
    read_records,
    record_key,
    write_records,
)

from shardplan.cost import calibration
from shardplan.cost.calibration import Calibration, load_calibration
from shardplan.verify.verdict import Outcome

FILE = Path(calibration.__file__).with_name(calibration.FILE)
TABLE = BENCHMARKS / "calibration.md"


def fits_table(fitted: Mapping[str, Fitted]) -> str:
    """A row for every generation, kind of tiles and group of factors."""
    columns = ("generation", "factors", "decide", "programs", "residual", "leave-one-out")
    lines = [row(*columns), row(*["---"] * len(columns))]
    for name, each in fitted.items():
        lines += _fit_rows(name, each.factors, each.fits)
        if each.tiled is not None:
            lines += _fit_rows(f"{name}, larger tiles", each.tiled, each.tiled_fits)
    return "\n".join(lines)


def _fit_rows(name: str, factors: Calibration, fits: Sequence[Fit]) -> Iterator[str]:
    for each in fits:
        text = ", ".join(f"{factor} {value_of(factors, factor)}" for factor in each.factors)
        numbers = (len(each.cases), f"{each.residual:.1%}", f"{each.leave_one_out:.1%}")
        yield row(name, text, QUANTITIES[each.quantity], *numbers)


def errors_table(errors: Mapping[str, Sequence[Errors]]) -> str:
    """Median and worst errors of the programs that the factors are fitted to, and of all others, by family."""
    columns = ("programs", "family", "number", "memory", "bytes", "step")
    lines = [row(*columns), row(*["---"] * len(columns))]
    for name, families in errors.items():
        for family, each in sorted(families.items()):
            cells = []
            for quantity in ("peak", "received", "step"):
                values = [abs(value) for e in each if (value := getattr(e, quantity)) is not None]
                cells.append(f"{statistics.median(values):.1%}, {max(values):.1%}" if values else "-")
            lines.append(row(name, family, len(each), *cells))
    return "\n".join(lines)


def plans_table(observations: Sequence[Observation], fitted: Mapping[str, Fitted]) -> str:
    """The errors of every program that the factors are fitted to."""
    lines = [row("plan", *ERRORS), row(*["---"] * (1 + len(ERRORS)))]
    for o in observations:
        factors = fitted[o.hardware.generation.name].of_program(o)
        lines.append(row(o.layout.label, *(f"{error(o, factors):+.1%}" for error in ERRORS.values())))
    return "\n".join(lines)


def gains_table(observations: Sequence[Observation]) -> str:
    """A row for every program with larger tiles: its times, and those with the compiler's own tiles."""
    columns = ("plan", "step s", "with larger tiles", "gain", "compute s", "with larger tiles", "gain")
    lines = [row(*columns), row(*["---"] * len(columns))]
    own = {o.layout.label: o.record.result.seconds for o in observations if not o.has_larger_tiles}
    for o in observations:
        if o.has_larger_tiles:
            label = o.layout.label.removesuffix(", larger tiles")
            cells: list[str] = []
            for before, after in zip(own[label][:2], o.record.result.seconds[:2], strict=True):
                cells += [f"{before:.3g}", f"{after:.3g}", f"{1 - after / before:.0%}"]
            lines.append(row(label, *cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=FILE, type=Path, help="JSON file to write; default: the planner's own")
    parser.add_argument("--table", default=TABLE, type=Path, help="Markdown file to write")
    parser.add_argument("--jobs", type=int, help="compiles at a time")
    parser.add_argument(
        "--takes_earlier", action="store_true", help="take results of the same layouts that earlier code compiled"
    )
    arguments = parser.parse_args()
    cases = make_cases()
    records = compile_cases(cases, CALIBRATION, arguments.jobs, arguments.takes_earlier)
    if any(record.result.outcome not in (Outcome.FITS, Outcome.DOES_NOT_FIT) for record in records):
        raise SystemExit("some plans could not be compiled")
    write_records(records, CALIBRATION)
    observations = [Observation(record) for record in records if record.result.fits]
    fitted = {name: Fitted.of(name, observations) for name in FITTED}
    entries = {name: each.entry for name, each in fitted.items()}
    arguments.output.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    load_calibration.cache_clear()
    # read again, because estimates that the fit has made are of the factors of before
    held_out = [*read_records(PLANNER).values(), *read_records(PUBLISHED).values()]
    errors = {
        "fitted": errors_by_family(read_records(CALIBRATION).values()),
        "held out": errors_by_family(held_out),
    }
    earlier = sum(record.key != record_key(case) for case, record in zip(cases, records, strict=True))
    text = TEMPLATE.format(
        fits=fits_table(fitted), gains=gains_table(observations), errors=errors_table(errors),
        plans=plans_table(observations, fitted), earlier=earlier, programs=len(records),
    )  # fmt: skip
    arguments.table.write_text(text, encoding="utf-8")


QUANTITIES = {"compute": "compute time", "step": "step time", "peak": "peak memory", "bytes": "bytes by kind"}

TEMPLATE = """# The factors of the cost model

Made by `python scripts/fit_planner.py`, which compiles a few plans for every generation and writes
`shardplan/cost/calibration.json`. Factors multiply rooflines: `products` of matmuls, `elementwise` of elementwise work,
`copying` of gathered parameters which are copied, `vectors` of matrix-vector products, `slicing` of copies of a layer's
expert weights out of the stack. Dense steps with gradients have the factors named `training`, fitted to trainings
alone; `weight_passes` is how often elementwise work reads or writes a matmul's weight there. `overlap` is the part of a
matmul that gathers run behind, `kernel_wait` the part of the transfers of experts' tokens, in two parts, that nothing
overlaps. The others say what the compiler does (`CompilerQuirks` in `shardplan/cost/sharding.py`). v3 has the factors
of v4, because libtpu compiles no attention kernel in bfloat16 for it.

Where it pays, plans of models without routed experts ask the compiler for larger tiles (`vmem_kib`); such programs have
factors of their own. {earlier} of the {programs} programs were compiled by earlier code
(`fit_planner.py --takes_earlier`).

## Fits

Errors are root mean squares over the programs that a group of factors is fitted to, relative to the compiler's value;
leave-one-out, of each program by a fit of the group without it. Groups before it keep their values.

{fits}

Not fitted: lookups, scatters and grouped matmuls, for which the compiler has no cycles, take their rooflines, and so
does work that only moves elements; attention takes its unmasked FLOPs at peak, with the 7/4 of the matmuls that kernels
compute in the backward pass (`KERNEL_PRODUCTS_OF_GRADIENTS`); 8 % of the memory are kept free (`MEMORY_ERROR`), more
than any program of these pages that fits needs above its estimate.

## What larger tiles gain

{gains}

## Errors by family

Median and worst. Held out are all programs of [planner.md](planner.md) and [published.md](published.md).

{errors}

## Programs

{plans}
"""

if __name__ == "__main__":
    main()
