# %% [markdown]
# # Stream a checkpoint into a sharding, and look at every shard
#
# `load_pretrained` reads a Hugging Face checkpoint into the sharding of a Plan. Every device gets its own bytes, and
# no device or host holds an unsharded array. Here a very small Llama, in three safetensors files, is loaded onto eight
# virtual devices of the CPU, which JAX has to know of before it starts:

# %%
import os

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

# %% [markdown]
# ## Plan and load
#
# The mesh is set here so that there is something to see: the fastest plan for so small a model would shard little.

# %%
from shardplan import load_config, load_pretrained, make_plan

checkpoint = "../tests/golden/data/llama"
config = load_config(
    model={"ref": checkpoint},
    hardware={"slice": "cpu-8"},
    mesh={"data": 2, "model": 4},
    workload={"batch": 8, "position": 64, "param_dtype": "float32", "compute_dtype": "float32"},
)
plan = make_plan(config)
model = load_pretrained(checkpoint, plan=plan)
type(model)

# %% [markdown]
# shardplan's own decoder evaluates every type of model. It is a Levanter `LmHeadModel`, and its arrays are Haliax's
# named arrays. `audit` compares every array with the Plan, and raises if one has another type or sharding; JAX would go
# on in silence with an array that is replicated where it should be sharded.

# %%
from shardplan import audit

audit(model, plan)

# %% [markdown]
# ## Every shard of a weight
#
# The plan says which device holds which tile:

# %%
plan.tiles_of("mlp.gate_proj.weight")

# %% [markdown]
# And so it is. Layers are stacked: each device has both layers, a fourth of `mlp` and all of `embed`.

# %%
weight = model.segments[0].stacked.layers[0].mlp.gate_proj.weight
print(weight.axes, weight.array.sharding.spec)
for shard in weight.array.addressable_shards:
    _, mlp, _ = shard.index
    print(f"device {shard.device.id}: mlp {mlp.start} to {mlp.stop}")

# %% [markdown]
# JAX draws the sharding of matrices, such as the one of the first layer:

# %%
import jax

jax.debug.visualize_array_sharding(weight["layers", 0].array)

# %% [markdown]
# ## Against the safetensors library
#
# The same weight, read by the safetensors library and stacked on the host, has the same slices on every device:

# %%
import json
from pathlib import Path

import numpy as np
from safetensors import safe_open

files = json.loads(Path(checkpoint, "model.safetensors.index.json").read_text())["weight_map"]


def read(name):
    with safe_open(Path(checkpoint, files[name]), framework="np") as file:
        return file.get_tensor(name)


stacked = np.stack([read(f"model.layers.{layer}.mlp.gate_proj.weight") for layer in range(2)])
for shard in weight.array.addressable_shards:
    np.testing.assert_array_equal(shard.data, stacked[shard.index])
print("all", len(weight.array.addressable_shards), "shards are equal")

# %% [markdown]
# ## Without a plan
#
# Without a plan, the model is of Levanter's class for its type, as in Levanter's scripts. Inside `hax.axis_mapping` the
# current mapping is used. Where there is neither a plan nor a mapping, every array is sharded over as many devices as
# its shape allows:

# %%
import haliax as hax

from shardplan import make_mesh

mesh = make_mesh(plan)
with hax.partitioning.set_mesh(mesh):
    spread = load_pretrained(checkpoint)
print(spread.transformer.layers.stacked.mlp.gate_proj.weight.array.sharding.spec)
print(spread.transformer.norm.weight.array.sharding.spec)

# %% [markdown]
# `best_effort_sharding` does the same for an array of your own:

# %%
from shardplan import best_effort_sharding

for shape in [(4096, 1024), (6, 1024), (3, 5)]:
    print(shape, best_effort_sharding(shape, mesh).spec)

# %% [markdown]
# ## Host memory
#
# A larger model, to measure with. Under `named_jit` every device initialises its own shards, and `save_pretrained`
# writes a sharded model as it is, every process its own files:

# %%
import dataclasses
import shutil

from levanter.models.llama import LlamaLMHeadModel

from shardplan import save_pretrained

larger = dataclasses.replace(spread.config, hidden_dim=768, intermediate_dim=3072, num_layers=4)
mapping = {"mlp": "model", "embed": "data"}
folder = "../build/notebooks/larger"
shutil.rmtree(folder, ignore_errors=True)

with hax.partitioning.set_mesh(mesh):
    initialise = hax.named_jit(LlamaLMHeadModel.init, out_axis_resources=mapping)
    made = initialise(model.Vocab, larger, key=jax.random.PRNGKey(0))
    save_pretrained(made, folder, larger.to_hf_config(model.Vocab.size).to_dict())
size = sum(array.nbytes for array in jax.tree.leaves(made))
del made
print(f"{size / 1e9:.1f} GB")

# %% [markdown]
# While it is loaded, the process grows by the arrays themselves, which are in the memory of the host here, and by
# little more: at most `budget` bytes for what is read and exchanged.

# %%
import threading

import psutil


def growth_while(work):
    process, done, sizes = psutil.Process(), threading.Event(), []

    def sample():
        while not done.wait(0.005):
            sizes.append(process.memory_info().rss)

    before, sampler = process.memory_info().rss, threading.Thread(target=sample)
    sampler.start()
    work()
    done.set()
    sampler.join()
    return max(sizes) - before


def load():
    with hax.partitioning.set_mesh(mesh), hax.axis_mapping(mapping):
        load_pretrained(folder, budget=16 * 2**20)


print("less than 1.5 times the model:", growth_while(load) < 1.5 * size)

# %% [markdown]
# On a pod each process reads only what its own devices need. `shardplan checkpoint --schedule --plan plan.json` says
# which process reads what, without reading anything. [Measured against Levanter, Orbax and
# MaxText](../docs/benchmarks/loader.md).
