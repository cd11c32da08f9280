"""python scripts/bench_eval.py [--output docs/benchmarks/eval.md] [--batches 40]

Measures evaluation on 8 virtual CPU devices: the throughput of `loss` beside levanter.main.eval_lm (of marin-levanter,
where that is installed) and beside transformers with torch (where that is installed); how long devices wait for
windows; and the host memory of a run over a small and a large text. All runs are separate processes, one after the
other.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import yaml
from bench_page import page_parser, write_page

ROOT = Path(__file__).parents[1]
POSITION, BATCH, SEED = 256, 16, 0
SHAPE = {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "intermediate": 512, "vocab": 2048}
ENVIRONMENT = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
PLANNING = (
    "--hardware.slice", "cpu-8", "--workload.batch", str(BATCH), "--workload.position", str(POSITION),
    "--workload.param_dtype", "float32", "--workload.compute_dtype", "float32", "--mesh.data", "8",
)  # fmt: skip
TORCH = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
folder, tokens, batch, position, batches = sys.argv[1], *map(int, sys.argv[2:])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ids = torch.randint(3, tokens, (batches + 1, batch, position), generator=torch.Generator().manual_seed(0))
with torch.inference_mode():
    for index in range(batches + 1):
        if index == 1:
            started = time.perf_counter()
        logits = model(ids[index]).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[index, :, 1:].flatten()).item()
print(json.dumps(batches * batch * (position - 1) / (time.perf_counter() - started)))
"""


def make_text(path: Path, words: int) -> None:
    """Write one text of random words, each of which is a token."""
    rng = np.random.default_rng(SEED)
    with open(path, "w", encoding="utf-8") as file:
        for start in range(0, words, 2**20):
            ids = rng.integers(3, SHAPE["vocab"], min(2**20, words - start))
            file.write(" ".join(f"t{i}" for i in ids) + " ")


def run(*command: object) -> str:
    """Run a command, and return what it prints."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{command[:4]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def evaluate(model: Path, text: Path, output: Path, *arguments: object) -> dict[str, Any]:
    """Run `shardplan eval`, and return its summary."""
    run(
        sys.executable, "-m", "shardplan.eval", "--model.ref", model, "--data.path", text, "--output", output,
        *PLANNING, *arguments,
    )  # fmt: skip
    return json.loads((output / "summary.json").read_text())


def levanter_rate(model: Path, text: Path, folder: Path, batches: int) -> float:
    """Tokens per second of Levanter's eval_lm: from two runs, so that start-up and compiling do not count."""
    (folder / "validation.jsonl").write_text(json.dumps({"text": text.read_text()}) + "\n")
    config = model / "config.json"
    printed = run(sys.executable, "-m", "shardplan.plan", "--model.config", config, *PLANNING)
    section = yaml.safe_load(printed[printed.index("\ntrainer:") :].split("\n\n")[0])["trainer"]
    sizes = json.loads(config.read_text())
    content = {
        "model": {
            "type": "llama", "max_seq_len": POSITION, "hidden_dim": sizes["hidden_size"],
            "intermediate_dim": sizes["intermediate_size"], "num_layers": sizes["num_hidden_layers"],
            "num_heads": sizes["num_attention_heads"], "num_kv_heads": sizes["num_key_value_heads"],
            "layer_norm_epsilon": sizes["rms_norm_eps"], "reference_checkpoint": str(model), "tokenizer": str(model),
        },
        "data": {
            "tokenizer": str(model), "cache_dir": str(folder / "cache"),
            "components": {"text": {"source": {"type": "url", "validation_urls": [str(folder / "validation.jsonl")]}}},
        },
        "trainer": {
            **section, "require_accelerator": False, "tracker": {"type": "json_logger"},
            "log_dir": str(folder / "logs"),
        },
    }  # fmt: skip
    (folder / "levanter.yaml").write_text(yaml.safe_dump(content, sort_keys=False))

    def seconds(count: int) -> float:
        started = time.perf_counter()
        run(
            sys.executable, "-m", "levanter.main.eval_lm", "--config_path", folder / "levanter.yaml", "--hf_checkpoint",
            model, "--max_eval_length", POSITION, "--trainer.max_eval_batches", count,
        )  # fmt: skip
        return time.perf_counter() - started

    seconds(1)  # makes the cache of tokens
    few = seconds(batches // 4)
    return (batches - batches // 4) * BATCH * (POSITION - 1) / (seconds(batches) - few)


def resident_bytes(process: int) -> int:
    """Resident memory of a process and its children; pages that they share count in each."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except FileNotFoundError:  # it has ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident_bytes(int(child)) for child in children)


def peak_memory(model: Path, text: Path, output: Path) -> float:
    """Peak of the resident memory, GiB, of all processes of a run that is stopped after its first results."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "shardplan.eval", "--model.ref", str(model), "--data.path", str(text), "--output",
            str(output), *PLANNING, "--task.shard", "64",
        ],
        env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    peak = 0
    while process.poll() is None and len(list((output / "parts").glob("*.parquet"))) < 16:
        peak = max(peak, resident_bytes(process.pid))
        time.sleep(0.2)
    process.terminate()
    errors = process.communicate()[1]
    if process.returncode:
        sys.exit(errors[-4000:])
    return peak / 2**30


def main() -> None:
    parser = page_parser(__doc__)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--torch", default=sys.executable, help="a Python with torch and transformers")
    parser.add_argument("--large_mb", type=int, default=1000, help="size of the large text; 0 leaves memory out")
    arguments = parser.parse_args()
    batches = arguments.batches
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, text = folder / "model", folder / "text.txt"
        sizes = [f"--{key}={value}" for key, value in SHAPE.items()]
        run(sys.executable, "scripts/make_llama_checkpoint.py", "--output", model, *sizes)
        make_text(text, (batches + 1) * BATCH * (POSITION - 1) + 1)
        own = evaluate(model, text, folder / "loss")["run"]
        print("shardplan", own["tokens_per_second"], flush=True)
        windows = evaluate(
            model, text, folder / "extraction", "--task.kind", "extraction", "--workload.position", POSITION,
            "--task.stride", 25,
        )["run"]  # fmt: skip
        rates = {"shardplan": own["tokens_per_second"]}
        rates["levanter.main.eval_lm, the plan's mapping"] = levanter_rate(model, text, folder, batches)
        has_torch = subprocess.run([arguments.torch, "-c", "import torch"], capture_output=True).returncode == 0
        if has_torch:
            printed = run(arguments.torch, "-c", TORCH, model, SHAPE["vocab"], BATCH, POSITION, batches)
            rates["transformers with torch, one process"] = json.loads(printed.splitlines()[-1])
        memory = {}
        for megabytes in (arguments.large_mb // 20, arguments.large_mb) if arguments.large_mb else ():
            large = folder / "large.txt"
            make_text(large, megabytes * 10**6 * 10 // 54)  # a word and its space are nearly 5.5 bytes
            memory[large.stat().st_size / 1e6] = peak_memory(model, large, folder / f"memory-{megabytes}")
    lines = [
        "# Evaluation",
        "",
        "```\npython scripts/bench_eval.py --output docs/benchmarks/eval.md\n```",
        "",
        f"A Llama of {SHAPE['layers']} layers and {SHAPE['hidden']} dimensions in float32, {batches} batches of "
        f"{BATCH} x {POSITION} tokens after the first one, on 8 virtual CPU\ndevices of {os.cpu_count()} cores.",
        "",
        "| loss of one text | tokens/s | |",
        "|---|---:|---:|",
        *(f"| {name} | {rate:,.0f} | {rates['shardplan'] / rate:.2f}x |" for name, rate in rates.items()),
        "",
        "| devices waited for windows | part of the time of all steps but the first |",
        "|---|---:|",
        *(
            f"| {name} | {each['waiting_seconds'] / each['seconds']:.2%} |"
            for name, each in {
                f"loss, windows of {POSITION} tokens": own,
                "extraction, windows of 100 tokens, two to a sequence": windows,
            }.items()
        ),
    ]
    if memory:
        lines += ["", "| text | peak memory of all processes |", "|---|---:|"]
        lines += [f"| {size:,.0f} MB | {peak:.2f} GiB |" for size, peak in memory.items()]
    write_page("\n".join(lines) + "\n", arguments.output)


if __name__ == "__main__":
    main()
