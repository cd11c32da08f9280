"""python scripts/bench_nsa_run.py [--only fsdp,resumed] [--records RECORDS.json] [--output PAGE.md]

Trains `configs/nsa-125m.yaml` through `shardplan train` on virtual CPU devices, one run after the other, and writes the
gates of two public reports beside what these runs recorded. Every figure comes from the files that a run leaves behind.
A run whose settings are unchanged in the records is not made again, unless `--only` names it, and one that was stopped
by SIGTERM goes on from its checkpoint; with `--only ""` the page alone is written.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from nsa_launch import ROOT, Run, describe_run, make_run, try_refusals
from nsa_page import make_page

FOLDERS = ROOT / "build" / "nsa-run"
"""What runs write, until they are in the records."""
COMMAND = "python scripts/bench_nsa_run.py"
STATISTICS = ("--selection_statistics=true",)
FSDP = ("--pin", "params.embed=data", "batch=data", *STATISTICS)
UNSHARDED = ("block_position", "embed", "head_size", "kv_head", "mlp", "phi_k_hidden", "phi_k_out", "phi_v_hidden",
             "phi_v_out", "q_heads_per_group", "vocab")  # fmt: skip
DDP = ("--pin", *(f"params.{axis}=" for axis in UNSHARDED), "batch=data", *STATISTICS)
KEEPS_ALL = ("--workload.gradient_checkpointing", "save_all")
SMOKE_TEST = {
    "num_key_value_heads": 12,
    "native_sparse_attention": {"block": 16, "stride": 16, "selection_block": 64, "selected": 16, "window": 512},
}
"""Changes that make the model that of the reports' smoke test: 12 groups, and blocks of 16 tokens."""
NARROW = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 1024, "head_dim": 32,
    "native_sparse_attention": {"block": 32, "stride": 16, "selection_block": 64, "selected": 4, "window": 128},
}  # fmt: skip
"""Changes that make the model narrow."""
LENGTH = 64
"""Tokens of a sequence, where it may be short."""
RUNS = {
    "fsdp": Run(8, 8, LENGTH, 50, FSDP),
    "resumed": Run(8, 8, LENGTH, 4, FSDP, restarts_after=2),
    "one": Run(1, 8, LENGTH, 3, STATISTICS),
    "ddp": Run(2, 8, LENGTH, 3, DDP),
    "ddp-keeps-all": Run(2, 8, LENGTH, 3, (*DDP, *KEEPS_ALL)),
    "fsdp-keeps-all": Run(8, 8, LENGTH, 3, (*FSDP, *KEEPS_ALL)),
    "fsdp-processes": Run(2, 8, LENGTH, 3, FSDP, processes=2),
    "smoke-test": Run(2, 2, 256, 2, FSDP, SMOKE_TEST),
    "2048-one": Run(1, 1, 2048, 2, STATISTICS),
    "narrow-ddp-processes": Run(2, 8, 256, 3, DDP, NARROW, processes=2),
    "narrow-stalled": Run(2, 8, 256, 1000, FSDP, NARROW, processes=2, stalls_after=2),
    "narrow-too-slow": Run(8, 8, 256, 50, (*FSDP, "--gate.factor=1000", "--gate.stop=true"), NARROW),
}
"""Name -> run."""
REFUSED = {
    "heads of a group on two devices": ("--mesh.model=2", "--pin", "q_heads_per_group=model"),
    "a batch that the devices cannot share": ("--workload.batch=7", "--pin", "batch=data"),
    "texts packed as documents": ("--data.tokenizer=gpt2", "--data.components.text.source.type=url"),
    "a misspelt key of Levanter": ("--trainer.num_train_step=5",),
    "statistics that the model does not have": ("--model.config=llama-3.2-1b", *STATISTICS),
}
"""What cannot work -> the arguments of a launch that must be refused."""
STEPS = {
    "steps-64": "sparse-fsdp-8 sparse-1 --batch=8 --position=64 --rounds=3",
    "steps": "sparse-fsdp-8 sparse-1 dense-fsdp-8 dense-1 --batch=8 --position=256 --rounds=3",
    "steps-8x2048": "sparse-fsdp-8 sparse-1 --batch=8 --position=2048 --rounds=1",
    "steps-2048": "sparse-positions-4 sparse-1 dense-1 --batch=1 --position=2048 --rounds=1",
}
"""Name -> the arguments of a comparison by `nsa_steps.py`."""


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a record; one that has others is made again."""
    if name in RUNS:
        return {"run": describe_run(RUNS[name])}
    return {"arguments": json.loads(json.dumps(STEPS.get(name, REFUSED)))}


def make_record(name: str) -> dict[str, Any]:
    """Make a run, a comparison of steps, or launches that are refused."""
    if name in STEPS:
        command = [sys.executable, "scripts/nsa_steps.py", *STEPS[name].split()]
        result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
        return {**settings_of(name), **json.loads(result.stdout)}
    folder = FOLDERS / name
    folder.mkdir(parents=True, exist_ok=True)
    if name in RUNS:
        record = make_run(RUNS[name], folder)
    else:
        record = {**settings_of(name), "launches": try_refusals(REFUSED, folder)}
    shutil.rmtree(folder)
    return record


def main() -> None:
    """Make the runs, and write the records and the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of records, with commas")
    parser.add_argument("--records", type=Path, default=ROOT / "docs" / "benchmarks" / "nsa_run.json")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "nsa_run.md")
    arguments = parser.parse_args()
    path: Path = arguments.records
    records: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    names = (*RUNS, *STEPS, "refused")
    changed = [name for name in names if not settings_of(name).items() <= records.get(name, {}).items()]
    for name in changed if arguments.only is None else filter(None, arguments.only.split(",")):
        records[name] = make_record(name)
        records = {each: records[each] for each in names if each in records}
        path.write_text(json.dumps(records, indent=1) + "\n")
        arguments.output.write_text(make_page(records, names, COMMAND))
        print(f"{name} is done", file=sys.stderr)
    arguments.output.write_text(make_page(records, names, COMMAND))


if __name__ == "__main__":
    main()
