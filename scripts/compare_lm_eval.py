"""python scripts/compare_lm_eval.py: shardplan in lm_eval against lm_eval's own `hf` model, on golden checkpoints.

Needs no torch: the results of `hf` are those that scripts/make_lm_eval_reference.py stored. Prints a table with the
largest differences, on 8 virtual CPU devices.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "golden" / "lm_eval"
TASKS = ("shardplan_choices", "shardplan_documents")
MAX_LENGTH = 63
"""Tokens that a model is given at most: long texts have several windows, and long contexts lose their beginnings."""


@dataclass(frozen=True)
class Family:
    """The special tokens of a family, and the mesh that it is compared on."""

    begin: str
    end: str
    adds_begin: bool
    """Whether its tokenizer begins every text with the BOS token."""
    mesh: tuple[int, int, int]
    """Devices along replica, data and model."""


FAMILIES = {
    "llama": Family("<s>", "</s>", True, (1, 4, 2)),
    "gpt2": Family("<|endoftext|>", "<|endoftext|>", False, (1, 4, 2)),
    "gemma2": Family("<bos>", "<eos>", True, (2, 2, 2)),
}


def make_checkpoint(family: str, folder: Path) -> Path:
    """Copy a golden checkpoint and the tokenizer of these tasks to a new folder, and return it."""
    shutil.copytree(ROOT / "tests" / "golden" / "data" / family, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / family / name, folder)
    return folder


def model_args(family: str, checkpoint: Path) -> dict[str, Any]:
    """Return the arguments of the model `shardplan` for a family."""
    sizes = dict(zip(("mesh.replica", "mesh.data", "mesh.model"), FAMILIES[family].mesh, strict=True))
    types = {"workload.param_dtype": "float32", "workload.compute_dtype": "float32"}
    return {"model.ref": str(checkpoint), "max_length": MAX_LENGTH, "hardware.slice": "cpu-8", **sizes, **types}


def evaluate(model: Any, arguments: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Run both tasks, and return their metrics and the result of every request; nothing in processes other than 0.

    The working folder must be `ROOT`.

    Args:
        model: the name of a model of lm_eval, or one.
        arguments: of the model.
        settings: further arguments of `lm_eval.simple_evaluate`.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    result = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        **settings,
    )
    if result is None:
        return {}
    metrics = {
        f"{task} {name.partition(',')[0]}": value
        for task in TASKS
        for name, value in result["results"][task].items()
        if name.endswith(",none") and "stderr" not in name
    }
    samples = {
        task: [sample["filtered_resps"] for sample in sorted(result["samples"][task], key=lambda each: each["doc_id"])]
        for task in TASKS
    }
    return {"metrics": metrics, "requests": samples}


def largest_differences(result: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return the largest differences of metrics (relative) and log-probabilities (nats), and of greediness (count)."""
    choices, documents = TASKS
    metrics = [
        abs(result["metrics"][name] / value - 1) if value else 0.0 for name, value in expected["metrics"].items()
    ]
    pairs = [
        pair
        for own, other in zip(result["requests"][choices], expected["requests"][choices], strict=True)
        for pair in zip(own, other, strict=True)
    ]
    rolling = zip(result["requests"][documents], expected["requests"][documents], strict=True)
    return {
        "metrics": max(metrics),
        "continuations": max(abs(own[0] - other[0]) for own, other in pairs),
        "greedy": sum(bool(own[1]) != bool(other[1]) for own, other in pairs),
        "documents": max(abs(float(own[0]) - float(other[0])) for own, other in rolling),
    }


def main() -> None:
    """Compare every family, and print the table."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.chdir(ROOT)
    import shardplan.eval.harness  # noqa: F401 - registers the model

    print("| checkpoint | mesh | metrics, relative | continuations, nats | greedy | documents, nats |")
    print("|---|---|---|---|---|---|")
    for name, family in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = make_checkpoint(name, Path(folder) / name)
            result = evaluate("shardplan", model_args(name, checkpoint))
        expected = json.loads((FOLDER / name / "hf.json").read_text())
        d = largest_differences(result, expected)
        print(
            f"| {name} | {' x '.join(map(str, family.mesh))} | {d['metrics']:.1e} | {d['continuations']:.1e} | "
            f"{d['greedy']:.0f} different | {d['documents']:.1e} |"
        )


if __name__ == "__main__":
    main()
