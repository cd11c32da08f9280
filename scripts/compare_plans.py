"""python scripts/compare_plans.py BEFORE AFTER

Compares the plans that two checkouts of this repository make for the same settings: every configuration in configs/,
and the cases of the table of estimates (docs/benchmarks/planner.md). Prints each difference, and exits with 1 if there
is one. It compares mesh, mappings, PartitionSpecs, attention, compiler options, workload, memory and cost to the last
digit.

BEFORE and AFTER are folders of checkouts, or JSON files that `--dump FILE` has written in a checkout.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

COMPARED = (
    "mesh", "compute_mapping", "param_mapping", "parameters", "memory", "cost", "attention", "compiler_options",
    "workload",
)  # fmt: skip


def dump(target: str) -> None:
    """Write the plans of the checkout in the working directory to `target`; PYTHONPATH must begin with the checkout."""
    import bench_planner

    from shardplan.__main__ import main

    plans = {}
    for path in sorted(Path("configs").glob("*.yaml")):
        with tempfile.TemporaryDirectory() as folder:
            sys.argv = ["shardplan", "plan", "--config", str(path), "--json", f"{folder}/plan.json"]
            code = main()
            written = Path(folder, "plan.json")
            plans[str(path)] = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {"exit": code}
    for label, config in cases(bench_planner):
        plans[label] = bench_planner.planned_case(label, config).plan.to_json()
    Path(target).write_text(json.dumps(plans), encoding="utf-8")


def cases(bench: Any) -> Iterator[tuple[str, Any]]:
    """Yield label and configuration of every case of the table of estimates."""
    for kind in ("eval", "train"):
        for model, slices in bench.ESTIMATES.items():
            for name in slices.split():
                yield f"{model} {name} {kind}", bench.load(model, name, kind, bench.usual_batch(name, kind))
    for text in bench.MICROBATCHED:
        model, name, batch, parts = text.split()
        config = bench.load(model, name, "train", int(batch))
        workload = replace(config.workload, microbatches=int(parts))
        yield f"{model} {name} train, {parts} microbatches", replace(config, workload=workload)


def plans_of(checkout: str) -> dict[str, Any]:
    """Return label -> Plan JSON, made by the code in `checkout`."""
    root = Path(checkout).resolve()
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/plans.json"
        environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'scripts'}", "JAX_PLATFORMS": "cpu"}
        subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--dump", target],
            cwd=root, env=environment, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        plans: dict[str, Any] = json.loads(Path(target).read_text(encoding="utf-8"))
        return plans


def differences(before: Any, after: Any, where: str) -> Iterator[str]:
    """Yield a line for every path at which two JSON values differ; `cause` and `load_transient` are not compared."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before:
            if key not in ("cause", "load_transient"):
                yield from differences(before[key], after.get(key), f"{where}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{i}]")
    elif before != after:
        yield f"{where}: {before} -> {after}"


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1] == "--dump":
        dump(sys.argv[2])
        return 0
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    before, after = (
        json.loads(Path(each).read_text(encoding="utf-8")) if each.endswith(".json") else plans_of(each)
        for each in sys.argv[1:]
    )
    count = 0
    for label, plan in before.items():
        of_plan = {key: plan[key] for key in (*COMPARED, "exit") if key in plan}
        for line in differences(of_plan, after.get(label, {}), label):
            print(line)
            count += 1
    print(f"{len(before)} plans, {count} differences")
    return int(count > 0)


if __name__ == "__main__":
    raise SystemExit(main())
