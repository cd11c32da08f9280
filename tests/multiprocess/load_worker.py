"""Run one of several processes that load a checkpoint together; see test_load_together.py.

python load_worker.py CHECKPOINT MAPPINGS [FAULT [OUTPUT]]: loads once for each mapping (JSON), compares every local
shard with what the official library reads, and prints the bytes that it read from local files. Checksums are compared
in the first load if the checkpoint is in a store. With OUTPUT, the model is written there in both formats, and by the
drop-in for Levanter's converter.

The environment variable REFERENCE names the folder whose values are compared with, default: the golden Llama; DTYPE
names the type of the loaded arrays, default: the stored one.

The environment variable ADAPTER names an adapter that is added to the weights.

The environment variable MODEL_CLASS names the class of the model; default: Levanter's. If it is empty, the model is the
decoder, which reads what it compares with by its own rules.

Faults: "killed" in its third read; "N processors", with little host memory; "other schedule"; "other mapping".
"""

# ruff: noqa: E402 - the first import makes those after it faster

import json
import os
import runpy
import signal
import sys
from pathlib import Path

from shardplan.runtime.deferred_packages import defer_unused_packages

defer_unused_packages()

import jax
import jax.numpy as jnp
import numpy as np
from haliax.state_dict import from_torch_compatible_state_dict
from jax.sharding import Mesh
from levanter.models.llama import LlamaConfig
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from shardplan.checkpoint.load import HFCheckpointConverter, stream_checkpoint
from shardplan.checkpoint.saving.save import save_levanter, save_pretrained
from shardplan.checkpoint.transfer import load_plan, schedule, stream
from shardplan.errors import ShardplanError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.runtime.devices import start_devices
from shardplan.storage import local, open_adapter, open_folder
from shardplan.storage.local import LocalFile

SMALL_BUDGET = 40_000
"""Bytes of host memory that are not enough for one transfer of most arrays."""
OTHER_MAPPING = {"embed": "data"}
GOLDEN = Path(os.environ.get("REFERENCE") or Path(__file__).parents[1] / "golden" / "data" / "llama")


def main(folder: str, mappings: list[dict[str, str]], fault: str = "", output: str = "") -> None:
    count = 2 * int(os.environ["JAX_NUM_PROCESSES"])
    start_devices(f"cpu-{count}", count, is_cpu=True)
    schedule.MAX_REREAD_BYTES = 0  # because the tensors are small
    if fault.endswith("processors"):
        os.cpu_count = lambda: int(fault.split()[0])
        # the module asked for their number when it was imported, which the server of processes has done
        LocalFile.tuning = runpy.run_path(local.__file__)["LOCAL"]
    model_class = os.environ.get("MODEL_CLASS", LEVANTER) or None
    template = build_model(read_config(str(GOLDEN / "config.json"), None, model_class), 64).template
    state = {name: value for file in GOLDEN.glob("*.safetensors") for name, value in load_file(file).items()}
    converted = from_torch_compatible_state_dict(template, {name: jnp.asarray(value) for name, value in state.items()})
    expected = {path: np.asarray(leaf.array) for path, leaf in named_leaves(converted)}
    budget = SMALL_BUDGET if fault.endswith("processors") else stream.DEFAULT_BUDGET
    if fault == "other schedule":
        make = load_plan.make_schedule
        load_plan.make_schedule = lambda *args: schedule.Schedule(args[2], make(*args).transfers[::-1])
    if fault == "other mapping":
        mappings = [OTHER_MAPPING for _ in mappings]
    mesh = Mesh(np.array(jax.devices()).reshape(1, 2, count // 2), ("replica", "data", "model"))
    read = count_reads(fault)
    for number, mapping in enumerate(mappings):
        read.clear()
        checksum = "://" in folder and number == 0
        dtype = os.environ.get("DTYPE")
        adapter = open_adapter(os.environ.get("ADAPTER"))
        module, _ = stream_checkpoint(
            template, open_folder(folder), mesh, mapping, dtype, budget, checksum, adapter=adapter
        )
        for path, leaf in named_leaves(module):
            for shard in leaf.array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), expected[path][shard.index], err_msg=path)
        print(f"read {sum(read)}", flush=True)
    if output:
        save_pretrained(module, f"{output}/hf", {})
        words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
        converter = HFCheckpointConverter(LlamaConfig, str(GOLDEN), tokenizer=words)
        for max_shard_size in (50_000, 10**9):  # the second replaces the first
            converter.save_pretrained(module, f"{output}/drop-in", max_shard_size=max_shard_size)
        save_levanter(module, f"{output}/levanter", {})


def count_reads(fault: str) -> list[int]:
    """Record the bytes of every read of tensors from now on; the fault "killed" ends the process in its third read."""
    read: list[int] = []
    original = LocalFile.read_into

    def read_into(self: LocalFile, offset: int, buffer: memoryview) -> None:
        original(self, offset, buffer)
        if offset > 8:  # skips the headers
            read.append(len(buffer))
        if fault == "killed" and len(read) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    LocalFile.read_into = read_into  # type: ignore[method-assign]
    return read


if __name__ == "__main__":
    try:
        main(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:])
    except ShardplanError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)
