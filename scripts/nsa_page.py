"""The page of `bench_nsa_run.py`: gates, runs and step times, computed from its records."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_gates import make_gates
from nsa_judges import step_ratio, storage, tokens_per_second, trainings

from shardplan.hardware import GIB

REPORTS = (
    "https://github.com/seconds-0/nsa-vibe/blob/5ddf5febe0cab7be279f565050098bfd0258a8e7/Documentation/Reports/archive"
)
INTRODUCTION = f"""Two public reports are of a model of 125M parameters with this attention on two A100 GPUs: under FSDP
([A]({REPORTS}/NSA_M7C_FSDP_TEST_RESULTS_REPORT.md)) a step took minutes, and under DDP
([B]({REPORTS}/NSA_DDP_HANG_ANALYSIS_UPDATE.md), and
[C]({REPORTS}/NSA_M7C_2xA100_PRODUCTION_TEST_REPORT.md) before it) the backward pass of step 1 crashed or hung.

Here the same model, `configs/nsa-125m.yaml`, runs through `shardplan train` on virtual CPU devices, which share
a few cores with other work. Types are float32, data are synthetic, and the learning rate is constant. A step of 8
sequences of 2,048 tokens takes minutes on these cores. So most runs have shorter sequences, in which queries
select all blocks, and all else is as in the configuration; `2048-one` has one sequence as in the reports. Runs whose
names begin with narrow are of a smaller model, for what does not depend on its size. Nothing ran on a GPU or a TPU.
"""
WHY_NO_COUNTERPART = """## Why DDP with gradient checkpointing has no counterpart

PyTorch's DDP registers a hook at every parameter, which starts the all-reduce of its gradient while the backward pass
runs. Reentrant gradient checkpointing runs a backward pass within the backward pass, so that the hook of one parameter
can fire twice ("mark a variable ready only once"), and a static graph promises that each step fires the same hooks in
the same order.

In JAX there are no hooks, and no graph is recorded while it runs: gradients are a function, whose program is compiled
before the first step. `jax.checkpoint` adds operations to that program, and the partitioner adds one reduction for each
gradient, wherever its parts were computed. Whether parameters are replicated (DDP) or sharded (FSDP) changes only the
kind of this collective, and all processes run the same program. What could differ between the first and the recomputed
forward pass is the selection: both are in one program, and choose by an exact top-k of float32 scores; a policy that
keeps `selected_blocks` chooses once.
"""


def make_page(records: Mapping[str, Any], names: Sequence[str], command: str) -> str:
    """Return the page as Markdown.

    Args:
        names: all records that there should be; the page says which are missing.
    """
    runs = trainings(records)
    missing = [name for name in names if name not in records]
    rows = []
    for gate in make_gates(records):
        rows.append((gate.name, gate.theirs, gate.ours, verdict(gate.passes)))
    parts = [
        "# Native Sparse Attention: the runs of two reports\n",
        f"Made by `{command}` from what each run left behind; the records are in `nsa_run.json`, beside this page.\n",
        INTRODUCTION,
        *([f"Not made yet, so that their gates are not tried: {', '.join(missing)}.\n"] if missing else []),
        "## Gates\n",
        table(("gate", "in the reports", "here", ""), rows),
    ]
    if runs:
        cpus = max(process["cpus"] for each in runs.values() for process in each["processes"])
        parts += [
            "## Runs\n",
            f"The machine has {cpus} cores. The time of a step is the median without the first, and other work on the "
            "machine slows it. Arrays are those of the device with most after the first step.\n",
            _runs_table(runs),
        ]
    compared = {name: each for name, each in records.items() if "programs" in each}
    if compared:
        parts += ["## Step time\n", *_steps_part(compared)]
    return "\n".join([*parts, WHY_NO_COUNTERPART])


def _runs_table(runs: Mapping[str, Any]) -> str:
    rows = []
    for name, each in runs.items():
        run, losses = each["run"], each["losses"]
        processes = f" in {run['processes']} processes" if run["processes"] > 1 else ""
        step = tokens = "-"
        if each["step_seconds"]:
            step, tokens = f"{statistics.median(each['step_seconds']):.1f} s", f"{tokens_per_second(each):.0f}"
        rows.append((
            f"`{name}`", f"{run['devices']}{processes}", storage(each), each["plan"]["checkpointing"],
            f"{run['batch']} x {run['position']}", f"{losses[0]:.4f} to {losses[-1]:.4f} ({len(losses)})",
            step, tokens, f"{each['memory']['first step']['arrays'] / GIB:.3f} GiB",
        ))  # fmt: skip
    head = ("run", "devices", "plan", "checkpointing", "batch", "loss, first to last (steps)", "step", "tokens/s",
            "arrays")  # fmt: skip
    return table(head, rows)


def _steps_part(compared: Mapping[str, Any]) -> list[str]:
    """The tables of step times."""
    parts = [
        "Programs of a training step took turns in one process. Processor time counts all threads and not what else "
        "the machine does; it is the median, and the first round is left out. Dense is the same model with attention "
        "to all tokens. With FSDP all weights are copied to every virtual device, and each reads them for its own "
        "tokens. This work does not grow with the tokens, so that the ratio to one device is large where a step is "
        "short. With sequences of 2048 tokens other differences are larger; what they are was not measured.\n"
    ]
    for steps in compared.values():
        rows = []
        for name, each in steps["programs"].items():
            attention = name.split("-")[0]
            alike = f"dense{name.removeprefix(attention)}"
            rows.append((
                f"`{name}`", f"{statistics.median(each['processor']):.1f} s", f"{min(each['wall']):.1f} s",
                f"{step_ratio(steps, name, f'{attention}-1'):.2f}",
                f"{step_ratio(steps, name, alike):.2f}" if alike in steps["programs"] else "-",
            ))  # fmt: skip
        head = ("program", "processor time", "fastest step", "/ one device", "/ dense")
        rounds = len(next(iter(steps["programs"].values()))["processor"])
        parts += [f"{steps['batch']} x {steps['position']} tokens, {rounds} rounds:\n", table(head, rows)]
    return parts


def verdict(passes: bool | None) -> str:
    """The last column of a gate."""
    return {True: "pass", False: "**fail**", None: "not tried"}[passes]


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
