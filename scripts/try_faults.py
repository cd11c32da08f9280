"""Runs of two processes that something happens to: when a clear line is there, how they end, and what is left.

    python scripts/try_faults.py --runs 10 --output docs/benchmarks/faults.md
    python scripts/try_faults.py --random 200 --seed 1

The first runs every fault several times. The second injects one random fault after the other into one evaluation,
which is started again until it is finished; its results must be equal, to the bit, to those of a run without faults.
Both need the demo's checkpoint (`python3 scripts/run.py demo`), and fail if a process hangs or ends without a word; the
first also if something is left behind. Two faults need root's rights, to mount a disk and to make network namespaces.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from fault_runs import HUNG_S, MESH, ORPHAN_S, ROOT, WAITING, Outcome, Run, two_hosts
from faulty_eval import PHASES

DEMO = ROOT / "build" / "demo"

Fault = Callable[[Run], Outcome]


def killed(number: int, index: int, phase: str) -> Fault:
    """A signal to a process in a phase; the time is that of the other's line, or of process 0's if both stop."""

    def act(run: Run) -> Outcome:
        run.start(("pause", "pause"))
        for each in run.processes:
            each.wait_for(f"phase: {phase}")
        time.sleep(0.5)
        at = time.monotonic()
        run.processes[index].process.send_signal(number)
        return run.end(
            at, [index] if number == signal.SIGSTOP else [], heard=0 if number == signal.SIGTERM else 1 - index
        )

    return act


def stuck(fault: str, index: int) -> Fault:
    """A main thread that is stuck when results are written; the time counts from there, with a deadline of 5 s."""

    def act(run: Run) -> Outcome:
        run.start(tuple(fault if i == index else "none" for i in range(2)))
        run.processes[index].wait_for("phase: evaluating")
        return run.end(time.monotonic())

    return act


def stuck_in_training(run: Run) -> Outcome:
    """A gradient whose collective process 1 does not enter; the time counts from the start, the deadline is 30 s."""
    at = time.monotonic()
    run.start_training("backward", 30, 4)
    return run.end(at)


def different(faults: Sequence[str] = ("none", "none"), more: Sequence[Sequence[str]] = ((), ())) -> Fault:
    """Two processes that differ; the time counts from their start."""

    def act(run: Run) -> Outcome:
        at = time.monotonic()
        run.start(faults, more)
        return run.end(at)

    return act


def never_started(run: Run) -> Outcome:
    """Process 0 alone, until the wait is ended by Ctrl-C."""
    at = time.monotonic()
    run.start(("none",), ((),), (0,))
    run.processes[0].wait_for(f"{WAITING} 1")
    run.processes[0].process.send_signal(signal.SIGINT)
    return run.end(at)


def started_twice(run: Run) -> Outcome:
    """Process 0 twice; the one that came first waits for process 1, until it is ended by Ctrl-C."""
    at = time.monotonic()
    run.start(ids=(0, 0))
    while all(each.process.poll() is None for each in run.processes) and time.monotonic() < at + HUNG_S:
        time.sleep(0.02)
    for each in run.processes:
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGINT)
    return run.end(at)


def one_too_many(run: Run) -> Outcome:
    """Process 1 twice beside process 0: the run of the two that came first goes on."""
    at = time.monotonic()
    run.start(("none",) * 3, ((),) * 3, (0, 1, 1))
    return run.end(at)


def unreachable(run: Run) -> Outcome:
    """Process 1 has an address at which nothing answers; its wait is ended by Ctrl-C."""
    at = time.monotonic()
    run.start(("none",), ((),), (1,))
    run.processes[0].wait_for(f"{WAITING} 0 at")
    run.processes[0].process.send_signal(signal.SIGINT)
    return run.end(at)


def network_cut(run: Run) -> Outcome:
    """The network between two hosts carries nothing any more; needs the right to make network namespaces."""
    with two_hosts() as (hosts, address, cut):
        run.start(hosts=hosts, address=address)
        for each in run.processes:
            each.wait_for("phase: evaluating")
        at = time.monotonic()
        cut()
        return run.end(at)


def disk_full(run: Run) -> Outcome:
    """The results folder is on a disk of 64 KiB; needs the right to mount one."""
    run.folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(run.folder)], check=True)
    try:
        at = time.monotonic()
        run.start()
        return run.end(at)
    finally:
        subprocess.run(["umount", str(run.folder)], check=True)


def make_faults(folder: Path) -> dict[str, tuple[Fault, set[int]]]:
    """Return name of a fault -> what it does, and the exit codes that its processes may have."""
    other = folder / "checkpoint"
    if not other.exists():
        shutil.copytree(DEMO, other)
        for weights in other.glob("*.safetensors"):  # all of them differ a little, as after another step of training
            data = np.fromfile(weights, np.uint8)
            data[8 + int.from_bytes(data[:8].tobytes(), "little") :: 2] ^= 1
            data.tofile(weights)
    text = folder / "other.jsonl"
    text.write_text(json.dumps({"id": "other", "text": "other text " * 200}) + "\n")
    plans = [folder / "plan.json", folder / "stale.json"]
    for path, pins in zip(plans, ([], ["--pin", "mlp="]), strict=True):
        if not path.exists():
            arguments = ["--config", "configs/tiny.yaml", *MESH, *pins, "--json", str(path)]
            subprocess.run(
                [sys.executable, "-m", "shardplan.plan", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
            )
    faults: dict[str, tuple[Fault, set[int]]] = {
        "process 1 is never started": (never_started, {130}),
        "process 0 is started twice": (started_twice, {2, 130}),
        "process 1 is started twice": (one_too_many, {0, 2}),
        "nothing answers at the coordinator's address": (unreachable, {130}),
        "another version of a package": (different(("none", "version")), {2}),
        "another batch": (different(more=((), ("--workload.batch", "32"))), {2}),
        "another Plan file": (different(more=[("--plan", str(plan)) for plan in plans]), {2}),
        "another checkpoint": (different(more=((), ("--model.ref", str(other)))), {2, 4}),
        "other texts": (different(more=((), ("--data.path", str(text)))), {2}),
        "8 times as many processors": (different(("none", "cpus")), {0}),
        "the disk of the results is full": (disk_full, {2, 5}),
        "the network is cut": (network_cut, {5}),
        "process 1 of 4 is stuck in a backward pass": (stuck_in_training, {5}),
    }
    for index in (0, 1):
        for phase in PHASES:
            faults[f"SIGKILL of process {index} while {phase}"] = (killed(signal.SIGKILL, index, phase), {-9, 5})
        faults[f"SIGSTOP of process {index} while evaluating"] = (killed(signal.SIGSTOP, index, "evaluating"), {-9, 5})
        faults[f"SIGINT to process {index} while evaluating"] = (killed(signal.SIGINT, index, "evaluating"), {130, 5})
        faults[f"SIGTERM to process {index} while evaluating"] = (killed(signal.SIGTERM, index, "evaluating"), {0})
        faults[f"SIGKILL of process {index} while JAX connects"] = (
            different(tuple("connect" if i == index else "none" for i in range(2))), {-9, 5},
        )  # fmt: skip
        for place in ("io", "lock", "collective"):
            faults[f"process {index} is stuck in {place}"] = (stuck(place, index), {5})
        faults[f"process {index} cannot read the tokenizer"] = (
            different(
                tuple("tokenizer" if i == index else "none" for i in range(2)), [("--deadline.loading", "5")] * 2
            ),
            {5},
        )
    return faults


def write_text(path: Path, copies: int) -> None:
    """Write a text for which an evaluation takes a few seconds."""
    rows = [json.loads(line) for line in (DEMO / "heldout.jsonl").read_text().splitlines()]
    lines = [json.dumps({"id": f"{row['id']} {i}", "text": row["text"]}) for i in range(copies) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def try_all(folder: Path, runs: int, pattern: str) -> tuple[list[tuple[str, ...]], int]:
    """Run every fault whose name has a pattern; returns rows of a table, and the number of failures."""
    text = folder / "text.jsonl"
    write_text(text, 20)
    rows, failures = [], 0
    for name, (act, allowed) in make_faults(folder).items():
        if not re.search(pattern, name):
            continue
        outcomes = []
        for number in range(runs):
            outcome = act(Run(folder / f"results-{number}", text))
            shutil.rmtree(folder / f"results-{number}", ignore_errors=True)
            is_silent = outcome.seconds is None and {*outcome.codes} != {0}
            is_wrong = not {*outcome.codes} <= allowed or is_silent or bool(outcome.left)
            failures += is_wrong
            print(f"{'WRONG ' if is_wrong else ''}{name}: {outcome}", file=sys.stderr, flush=True)
            outcomes.append(outcome)
        seconds = [each.seconds for each in outcomes if each.seconds is not None]
        times = f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else "-"
        codes = " or ".join(sorted({", ".join(map(str, each.codes)) for each in outcomes}))
        left = "; ".join(sorted({path for each in outcomes for path in each.left})) or "nothing"
        line = re.sub(r"/\S+/", "", outcomes[0].line.partition("; what this")[0])[:150].replace("|", "\\|")
        rows.append((name, str(runs), times, codes, left, line))
    return rows, failures


def try_random(folder: Path, count: int, seed: int) -> int:
    """Inject random faults into one evaluation until it is finished, over and over; returns the number of failures."""
    text = folder / "text.jsonl"
    write_text(text, 20)
    reference = Run(folder / "reference", text)
    started = time.monotonic()
    reference.start()
    assert reference.end(started).codes == [0, 0], reference.processes[0].lines
    duration = time.monotonic() - started
    expected = pq.read_table(folder / "reference" / "windows.parquet")
    chance, failures, finished = random.Random(seed), 0, 0
    results = folder / "results"
    for number in range(count):
        kind = chance.choice(["SIGKILL", "SIGINT", "SIGTERM", "SIGSTOP", "io", "lock"])
        index, delay = chance.randrange(2), chance.uniform(0, 1.2 * duration)
        run = Run(results, text)
        is_signal = kind.startswith("SIG")
        run.start(tuple(kind if i == index and not is_signal else "none" for i in range(2)))
        at = time.monotonic()
        if is_signal:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.processes[index].process.wait(delay)
            at = time.monotonic()
            run.processes[index].process.send_signal(getattr(signal, kind))
        stopped = [index] if kind == "SIGSTOP" else []
        run.interrupt_waits(at, stopped)
        outcome = run.end(at, stopped)
        survivors = [code for i, code in enumerate(outcome.codes) if i != index or not is_signal]
        own = {"SIGINT": {130, -2}, "SIGTERM": {-15}}.get(kind, {-9})  # -2 and -15: before Python runs the command
        is_silent = outcome.line == "" and any(code not in (0, None, -9, -2, -15) for code in survivors)
        is_wrong = None in outcome.codes or is_silent or not {*survivors} <= {0, 5, 130}
        is_wrong |= is_signal and outcome.codes[index] not in {0, *own}
        if (results / "summary.json").exists():
            finished += 1
            is_wrong |= not pq.read_table(results / "windows.parquet").equals(expected)
            shutil.rmtree(results)
        failures += is_wrong
        told = outcome.seconds if outcome.seconds is None else round(outcome.seconds, 1)
        verdict = f"WRONG {outcome.line}" if is_wrong else "right"
        print(f"{number}: {kind} of process {index} at {delay:.1f} s: {outcome.codes}, line after {told} s: {verdict}")
        for i, process in enumerate(run.processes if is_wrong else ()):
            print(*(f"  process {i}: {line}" for _, line in process.lines[-20:]), sep="\n")
        sys.stdout.flush()
    print(f"seed {seed}: {count} faults, {finished} finished runs with equal results, {failures} failures")
    return failures


def main() -> None:
    """Run the faults that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1, help="runs of every fault")
    parser.add_argument("--only", default="", help="a pattern in the names of faults")
    parser.add_argument("--output", help="write the table to this file")
    parser.add_argument("--random", type=int, default=0, help="inject so many random faults instead")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardplan-faults-") as folder:
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        if given.random:
            raise SystemExit(1 if try_random(Path(folder), given.random, given.seed) else 0)
        rows, failures = try_all(Path(folder), given.runs, given.only)
    head = ("fault", "runs", "s to the first clear line", "exit codes by process", "left behind", "the line")
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]
    text = f"""# Faults of runs of two processes

`python scripts/try_faults.py --runs {given.runs} --output docs/benchmarks/faults.md`: the demo's evaluation in two
processes of four virtual devices each. Times count from the signal to the other process's line (of SIGTERM, which stops
both, to that of process 0); for processes that differ or are missing, from their start, of which the imports of JAX and
Levanter take most; for a process that is stuck, from the beginning of the phase, with `deadline.step` 5, and
`deadline.loading` 5 while it reads the tokenizer, there from the start. Process 1 that is stuck in a backward pass is
one of four that train, with a deadline of 30 s, also from the start. Left behind would be files of incomplete results,
and processes that outlive the run by {ORPHAN_S:.0f} s.

"""
    text += "\n".join(lines) + "\n"
    print(text)
    if given.output:
        Path(given.output).write_text(text, encoding="utf-8")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
