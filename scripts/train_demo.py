"""python scripts/train_demo.py

Train the demo of `configs/tiny-train.yaml` on 8 virtual CPU devices, stop it by SIGTERM halfway, as a cloud that takes
a host away does, and go on with the same command on 4 devices. An earlier run in its output folder is removed.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMAND = (sys.executable, "-m", "shardplan.train", "--config", "configs/tiny-train.yaml", "--quiet")
OUTPUT = Path("results/tiny-train")
STEPS, STOP_AFTER = 50, 25


def main() -> None:
    """Train, stop, and go on."""
    started = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    print(f"+ {' '.join(COMMAND[1:])}, until step {STOP_AFTER}", flush=True)
    with subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and len(losses()) < STOP_AFTER:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
    check(process.returncode)
    stopped = len(losses())
    print(f"stopped after {stopped} steps, loss {losses()[stopped - 1]:.3f}", flush=True)
    command = (*COMMAND, "--hardware.slice", "cpu-4")
    print(f"+ {' '.join(command[1:])}", flush=True)
    check(subprocess.run(command, stdout=subprocess.DEVNULL).returncode)
    every = losses()
    assert sorted(every) == list(range(STEPS))
    seconds = time.monotonic() - started
    print(
        f"went on to {len(every)} steps on 4 devices: loss {every[0]:.3f} -> {every[STEPS - 1]:.3f}, in {seconds:.0f} s"
    )


def losses() -> dict[int, float]:
    """Return step -> its loss, of all steps so far."""
    path = OUTPUT / "metrics.jsonl"
    found = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        record = json.loads(line) if line.endswith("\n") else {}
        if "train/loss" in record.get("metrics", {}):
            found[record["step"]] = record["metrics"]["train/loss"]
    return found


def check(code: int) -> None:
    """End with an exit code that is not 0."""
    if code != 0:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
