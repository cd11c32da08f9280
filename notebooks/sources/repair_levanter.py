# %% [markdown]
# # Repair a Levanter configuration
#
# A `trainer:` section that was written by hand fails in one of three ways, all of them after the slice has started: JAX
# refuses it, memory runs out, or a parameter is replicated in silence. `review` finds that out before, and looks for
# the smallest edit with which it runs. Here is one for Llama-3.1-405B on v4-256.

# %%
from pathlib import Path

folder = Path("../build/notebooks")
folder.mkdir(parents=True, exist_ok=True)
path = folder / "levanter.yaml"
_ = path.write_text("""\
trainer:
  train_batch_size: 16
  mp: p=f32,c=bf16
  mesh:
    axes: {model: 16}
    shared_mapping: {kv_heads: model}
    param_mapping: {embed: data, mlp: [model, data]}
""")
# %% [markdown]
# ## What JAX would say
#
# `param_mapping` stores the rows of a weight of the MLP over `model` and `data`, and its columns over `data`. A mesh
# axis on two dimensions of one array is an error in JAX, whatever its size:

# %%
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

mesh = AbstractMesh((1, 8, 16), ("replica", "data", "model"))
try:
    NamedSharding(mesh, PartitionSpec(None, ("model", "data"), "data"))
except Exception as error:
    print(type(error).__name__)

# %% [markdown]
# ## What the review says
#
# It knows the axes of the model from tracing it, and needs only its `config.json`, the slice and the workload:

# %%
from shardplan import load_config, review

config = load_config(
    model={"config": "llama-3.1-405b"}, hardware={"slice": "v4-256"}, workload={"batch": 16, "position": 4096}
)
reviewed = review(str(path), config)
for finding in reviewed.lint.findings:
    print(f"{finding.severity}: {finding.text}\n  {finding.remedy}")

# %% [markdown]
# Besides the duplicate, `kv_heads` is a misspelt `kv_head`. Haliax ignores names that an array does not have.

# %% [markdown]
# ## One mistake less
#
# Suppose that only the duplicate is removed. JAX accepts the section now:

# %%
_ = path.write_text(path.read_text().replace(", mlp: [model, data]", ""))
reviewed = review(str(path), config)
reviewed

# %% [markdown]
# It would run out of memory: without `kv_head`, `model` shards no query projection, and 15.75 GiB of it are on every
# chip. To map `kv_head` is not enough either, because 16 does not divide its 8 heads. The smallest edit changes both
# keys.

# %% [markdown]
# ## The section to paste

# %%
print(reviewed.repair.trainer_yaml)

# %% [markdown]
# What it predicts is a Plan, like any other. A query projection is sharded over all chips now:

# %%
repaired = reviewed.repair.lint.plan
repaired.tiles_of("q_proj.weight")

# %% [markdown]
# ## The compiler's verdict
#
# The TPU compiler, which needs no TPU, agrees:

# %%
from shardplan import verify_plan

verify_plan(repaired)

# %% [markdown]
# ## Without mistakes, and faster
#
# `reviewed.best` is the best plan for the same batch. Here it is hardly faster than the repaired section; where it is,
# paste its section, which the review shows.

# %%
print(f"{repaired.cost.step_seconds:.2f} s a step, the best plan {reviewed.best.cost.step_seconds:.2f} s")

# %% [markdown]
# `shardplan plan --lint levanter.yaml` prints all of this, and exits with code 3 while there are errors: [a job in your
# CI](../docs/howto/ci.md) can keep a configuration right.
