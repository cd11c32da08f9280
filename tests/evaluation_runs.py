"""Arguments of evaluations of the golden checkpoint, and their results."""

import json
from pathlib import Path

PLANNING = ("--workload.batch=4", "--workload.position=64", "--workload.param_dtype=float32",
            "--workload.compute_dtype=float32")  # fmt: skip


def arguments(checkpoint: Path, tmp_path: Path) -> list[str]:
    """Those of an evaluation of the checkpoint's own text."""
    own = (f"--data.path={checkpoint / 'text.jsonl'}", f"--output={tmp_path / 'results'}")
    return [f"--model.ref={checkpoint}", *PLANNING, *own]


def summary(tmp_path: Path) -> dict:
    """The results of that evaluation."""
    return json.loads((tmp_path / "results" / "summary.json").read_text())


EXTRACTION = ("--task.kind=extraction", "--task.prefix=10", "--task.suffix=6", "--task.stride=4")
