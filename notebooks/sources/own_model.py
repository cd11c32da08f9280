# %% [markdown]
# # A model of your own
#
# shardplan plans Haliax models by tracing them: no logical axis has a special name, and no table lists architectures.
# So a model that neither shardplan nor Levanter knows is planned, loaded, evaluated and verified like a Llama.

# %%
import os

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

# %% [markdown]
# ## The model
#
# [parallel_model.py](parallel_model.py) has a model whose attention and MLP run side by side, with axes called `width`,
# `group`, `query`, `head` and `ffn`. It is plain Haliax:

# %%
import inspect

from parallel_model import Block, ParallelConfig, ParallelModel

print(inspect.getsource(Block.__call__))

# %% [markdown]
# Its configuration is a Levanter `LmConfig` that can be made of a `config.json`:

# %%
print(inspect.getsource(ParallelConfig.from_hf_config))

# %% [markdown]
# ## Plan it for a TPU
#
# A `config.json` with sizes, and the name of the class, are all that the planner needs. With these sizes it has 45
# billion parameters:

# %%
import json
from pathlib import Path

from shardplan import load_config, make_plan

folder = Path("../build/notebooks/own-model")
folder.mkdir(parents=True, exist_ok=True)


def write_config(name, **sizes):
    path = folder / name
    path.write_text(json.dumps({"model_type": "parallel", "positions": 4096, **sizes}))
    return str(path)


large = write_config(
    "large.json", vocab_size=32768, width=8192, depth=64, groups=8, queries=8, head_width=128, ffn=32768
)
plan = make_plan(
    load_config(
        model={"config": large, "levanter_class": "parallel_model:ParallelConfig"},
        hardware={"slice": "v5e-32"},
        workload={"batch": 16, "position": 4096, "param_dtype": "bfloat16", "compute_dtype": "bfloat16"},
    )
)
plan

# %%
print("compute mapping  ", plan.compute_mapping)
print("parameter mapping", plan.param_mapping)

# %% [markdown]
# ## Verify it
#
# The TPU compiler judges the same program, without a TPU:

# %%
from shardplan import verify_plan

verify_plan(plan)

# %% [markdown]
# ## Initialise it in its sharding
#
# On the eight virtual devices, a small one. Under `named_jit` every device makes only its own shards:

# %%
import haliax as hax
import jax

from shardplan import audit, make_mesh

small = write_config("config.json", vocab_size=256, width=64, depth=2, groups=4, queries=2, head_width=16, ffn=192)
settings = {
    "model": {"config": small, "levanter_class": "parallel_model:ParallelConfig"},
    "hardware": {"slice": "cpu-8"},
    "mesh": {"data": 2, "model": 4},
    "workload": {"batch": 8, "position": 64, "param_dtype": "float32", "compute_dtype": "float32"},
}
plan = make_plan(load_config(**settings))
mesh = make_mesh(plan)
Vocab, config = hax.Axis("vocab", 256), ParallelConfig(max_seq_len=4096)

with hax.partitioning.set_mesh(mesh):
    initialise = hax.named_jit(ParallelModel.init, out_axis_resources=plan.param_mapping)
    model = initialise(Vocab, config, key=jax.random.PRNGKey(0))
audit(model, plan)

# %%
plan.tiles_of("query.weight")

# %% [markdown]
# ## Evaluate it
#
# The loss of random tokens, computed with the compute mapping of the plan, and once more on a single device:

# %%
import numpy as np
from levanter.models.loss import next_token_loss

tokens = np.random.default_rng(0).integers(0, 256, (8, 64))


def mean_loss(model, tokens):
    logits = hax.dot(model.activations(tokens), model.get_lm_head(), axis=model.Embed)
    return next_token_loss("position", model.Vocab, logits, tokens).scalar()


with hax.partitioning.set_mesh(mesh):
    sharded = hax.named_jit(mean_loss, axis_resources=plan.compute_mapping)(
        model, hax.named(tokens, ("batch", "position"))
    )
alone = mean_loss(jax.device_put(model, jax.devices()[0]), hax.named(tokens, ("batch", "position")))
print(f"sharded {sharded:.3f}, on one device {alone:.3f}, of equally probable tokens {np.log(256):.3f}")

# %% [markdown]
# ## Save it, and stream it back
#
# The state dict of Haliax gives the names of the tensors. The checkpoint can be evaluated with `shardplan eval
# --model.levanter_class parallel_model:ParallelConfig`, and loaded in any other sharding.

# %%
import shutil

from shardplan import load_pretrained, save_pretrained

shutil.rmtree(folder / "checkpoint", ignore_errors=True)
save_pretrained(model, str(folder / "checkpoint"), json.loads(Path(small).read_text()))
loaded = load_pretrained(str(folder / "checkpoint"), plan=plan, config=config)
jax.tree.map(np.testing.assert_array_equal, loaded, model)
print(sorted(path.name for path in (folder / "checkpoint").iterdir()))
