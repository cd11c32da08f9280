"""Starts trainings of the bundled model with Native Sparse Attention, and reads what they leave behind."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_runs import free_port

from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.statistics import closed_form
from shardplan.model.bundled_configs import BUNDLED

ROOT = Path(__file__).parents[1]
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / "build" / "nsa-run" / "programs"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
}
"""Variables with which runs use programs that others have compiled already."""


@dataclass(frozen=True)
class Run:
    """A training on virtual CPU devices, and what happens to it."""

    devices: int
    batch: int
    position: int
    steps: int
    arguments: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    """Keys of the bundled config.json with other values."""
    processes: int = 1
    restarts_after: int = 0
    """The run is stopped by SIGTERM after this step, and started again."""
    stalls_after: int = 0
    """After this step, process 1 is stopped by SIGSTOP."""


def describe_run(run: Run) -> dict[str, Any]:
    """The settings of a run as they are in the records."""
    described: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(run)))
    return described


def make_run(run: Run, folder: Path) -> dict[str, Any]:
    """Train, and return the record of what the run left behind.

    Raises:
        SystemExit: the run was stopped by a signal before its last step; it goes on from there the next time.
    """
    output, codes, seconds_to_end, line = folder / "run", [], None, ""
    is_restarted = run.restarts_after > len(_by_step(output, "train/loss"))
    for attempt in range(2 if is_restarted else 1):
        processes = _start(_arguments(run, folder), run.processes)
        if attempt == 0 and is_restarted:
            _wait_for_step(processes[0], output, run.restarts_after)
            processes[0].terminate()
        if run.stalls_after:
            seconds_to_end, line = _stall(processes, output, run.stalls_after)
        else:
            errors = [process.communicate()[1] for process in processes]
            line = _line(errors[0])
        codes.append([process.wait() for process in processes])
    record = {
        "run": describe_run(run), "codes": codes, "line": line.replace(str(folder), "..."),
        "seconds_to_end": seconds_to_end, **_read_output(run, output),
    }  # fmt: skip
    if not any(codes[-1]) and len(record["losses"]) < run.steps:
        raise SystemExit(f"stopped after step {len(record['losses'])} of {run.steps}; the same command goes on")
    return record


def try_refusals(refused: Mapping[str, Sequence[str]], folder: Path) -> dict[str, Any]:
    """Return, for each launch that cannot work, its exit code, its line, and whether it got as far as loading."""
    results = {}
    for name, arguments in refused.items():
        output = folder / name.replace(" ", "-")
        run = Run(8, 8, 128, 1, tuple(arguments))
        [process] = _start([*_arguments(run, folder), f"--output={output}"], 1)
        line = _line(process.communicate()[1]).replace(str(folder), "...")
        results[name] = {"code": process.returncode, "line": line, "is_loaded": (output / "audit.txt").exists()}
    return results


def _arguments(run: Run, folder: Path) -> list[str]:
    """The arguments of `shardplan train`."""
    config = "nsa-125m"
    if run.changes:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(BUNDLED["nsa-125m"].read_text()), **run.changes}))
        config = str(path)
    return [
        "--config", "configs/nsa-125m.yaml", f"--model.config={config}", f"--hardware.slice=cpu-{run.devices}",
        f"--workload.batch={run.batch}", f"--workload.position={run.position}", "--workload.compute_dtype=float32",
        f"--trainer.num_train_steps={run.steps}", "--trainer.steps_per_eval=1000", "--trainer.max_eval_batches=1",
        # a run of few steps has the learning rates of a longer one
        "--optimizer.learning_rate=0.001", "--optimizer.warmup=0", "--optimizer.lr_schedule=constant",
        "--trainer.watch.watch_targets=[]",
        # other work may slow the machine
        "--deadline.loading=3600", "--deadline.compiling=3600",
        f"--output={folder / 'run'}", *run.arguments,
    ]  # fmt: skip


def _start(arguments: list[str], count: int) -> list["subprocess.Popen[str]"]:
    """Start the processes of a run."""
    processes, address = [], f"127.0.0.1:{free_port()}"
    for number in range(count):
        together = {}
        if count > 1:
            together = {
                "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(number)
            }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "shardplan", "train", *arguments], cwd=ROOT, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **CACHE, **together},
        )  # fmt: skip
        processes.append(process)
    return processes


def _wait_for_step(process: "subprocess.Popen[str]", output: Path, step: int) -> None:
    """Wait until a run has computed some steps, or has ended."""
    while process.poll() is None and len(_by_step(output, "train/loss")) < step:
        time.sleep(0.5)


def _stall(processes: list["subprocess.Popen[str]"], output: Path, step: int) -> tuple[float, str]:
    """Stop process 1 after a step; returns the seconds until process 0 has ended, and what it says."""
    first, second = processes
    _wait_for_step(first, output, step)
    second.send_signal(signal.SIGSTOP)
    stopped = time.perf_counter()
    line = _line(first.communicate()[1])
    seconds = time.perf_counter() - stopped
    second.kill()
    second.communicate()
    return seconds, line


def _line(error: str) -> str:
    """The line on stderr that says why a run ended; empty if there is none."""
    lines = [line for line in error.splitlines() if re.match(r"shardplan( train)?: ", line)]
    return lines[-1] if lines else ""


def _by_step(output: Path, name: str) -> list[float]:
    """The values of a metric, by step; the last one, where a step was computed twice."""
    path, values = output / "metrics.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:  # it is being written
            continue
        if event["event"] == "log" and name in event["metrics"]:
            values[event["step"]] = event["metrics"][name]
    return [value for _, value in sorted(values.items())]


def _read_output(run: Run, output: Path) -> dict[str, Any]:
    """What a run says of itself in its files; nothing if it ended before it wrote them."""
    if not (output / "audit.txt").exists():
        return {}
    plan, determinants, memory, environment = (
        _read(output / f"{name}.json") for name in ("plan", "run", "memory", "env")
    )
    audit = (output / "audit.txt").read_text()
    beats = [json.loads(line) for path in sorted(output.glob("heartbeat-*.jsonl")) for line in path.open()]
    return {
        "plan": {
            **{name: plan[name] for name in ("mesh", "param_mapping", "compute_mapping", "memory", "cost")},
            "checkpointing": plan["workload"]["gradient_checkpointing"], "method": plan["attention"]["kernel"],
        },
        "losses": _by_step(output, "train/loss"),
        "step_seconds": _by_step(output, "throughput/duration")[1:],
        "selected_methods": determinants.get("selected_methods"),
        "figures": determinants.get("selection", {}).get("figures"),
        "closed_form": _closed_form(_read(output / "model" / "config.json"), run.position),
        "memory": memory["measured"],
        "audit": {
            "arrays": audit.count("as planned"), "types": sorted(set(re.findall(r"  (b?float\d+)  ", audit))),
            "methods": [line for line in audit.splitlines() if line.startswith("selected blocks")],
        },
        "heartbeats": {"lines": len(beats), "with_statistics": sum("statistics" in beat for beat in beats)},
        "stacks": [path.name for path in sorted(output.glob("stacks-*.txt")) if path.stat().st_size],
        "processes": [{"cpus": each["cpus"], "devices": len(each["devices"])} for each in environment["processes"]],
    }  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    """A JSON file; empty if a run ended before it wrote that."""
    values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return values


def _closed_form(hf_config: dict[str, Any], positions: int) -> dict[str, float]:
    """k_mean, k_max and pct_at_max of a model's sequences, which follow from its settings."""
    groups, head = hf_config["num_key_value_heads"], hf_config["head_dim"]
    sizes = (hf_config["hidden_size"], groups, hf_config["num_attention_heads"] // groups, head, head)
    return closed_form(NativeSparseConfig(*sizes, **hf_config["native_sparse_attention"]), positions)
