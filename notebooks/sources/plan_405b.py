# %% [markdown]
# # Plan Llama-3.1-405B for a v4-256, and ask why
#
# shardplan chooses how a Haliax/Levanter model is sharded over a TPU slice. Here it plans an evaluation of 405B
# parameters, says why it did not do something else, and has the TPU compiler check a plan. No TPU, network or weights
# are needed: of the model only its `config.json` is read, which is part of the package.

# %% [markdown]
# ## The plan
#
# A configuration names a model, a slice and a workload, in YAML or as keyword arguments. A batch of 16 sequences of
# 4096 tokens, everything in bfloat16:

# %%
from shardplan import load_config, make_plan

config = load_config(
    model={"config": "llama-3.1-405b"},
    hardware={"slice": "v4-256"},
    workload={"batch": 16, "position": 4096, "param_dtype": "bfloat16", "compute_dtype": "bfloat16"},
)
plan = make_plan(config)
plan

# %% [markdown]
# A Plan is a mesh with Levanter's three axes and two mappings from logical axes to mesh axes. The compute mapping
# shards activations, and parameters while they are used; the parameter mapping shards stored parameters. An axis that a
# mapping leaves out is replicated.

# %%
print("mesh             ", plan.mesh)
print("compute mapping  ", plan.compute_mapping)
print("parameter mapping", plan.param_mapping)

# %% [markdown]
# `position` is sharded: each of two devices computes half of every sequence. The parameter mapping gives
# every parameter its `PartitionSpec`. Layers are stacked, as in Levanter. Which chip holds which part of a query
# projection:

# %%
plan.tiles_of("q_proj.weight")

# %% [markdown]
# ## Why this one
#
# The plan keeps the reasons of the search. `print(plan)` shows all of it, as `shardplan plan` does.

# %%
for reason in plan.search.reasons:
    print("-", reason)

# %% [markdown]
# ## Why not something else
#
# Tensor parallelism over more chips, for example? A choice is written like a pin: `mlp=data` is the compute sharding of
# an axis, `params.mlp=data` its storage, `mesh.model=16` the size of a mesh axis. The answer is the best plan that
# makes this choice, and what it costs.

# %%
from shardplan import why_not

why_not("mesh.model=16", plan, config)

# %% [markdown]
# Levanter's own attention does not shard positions. What would a plan without that cost?

# %%
why_not("position=", plan, config)

# %% [markdown]
# To force a choice, pin it. This plan keeps positions unsharded, and is for Levanter's class of Llama instead of
# shardplan's decoder, so that Levanter's scripts run it as it is:

# %%
pinned = make_plan(load_config("../configs/405b.yaml", model={"levanter_class": "levanter"}, pin=["position="]))
pinned

# %% [markdown]
# ## What if
#
# `what_if` plans again with one other setting at a time: batches, slices, types.

# %%
from shardplan import what_if

what_if(config)

# %% [markdown]
# ## Into Levanter
#
# The plan as a `trainer:` section, to paste:

# %%
from shardplan import trainer_yaml

print(trainer_yaml(pinned))

# %% [markdown]
# `plan.save("plan.json")` writes a file that every command reads with `--plan plan.json`.

# %% [markdown]
# ## The compiler's verdict
#
# So far everything was an estimate. The TPU compiler, libtpu, compiles for any slice on a machine without a TPU, and
# says how much memory the program takes and how long its parts run. It compiles the pinned plan in less than a minute,
# and keeps the result.

# %%
from shardplan import verify_plan

verdict = verify_plan(pinned)
verdict

# %% [markdown]
# Estimate and verdict side by side:

# %%
GIB = 2**30
print(f"peak memory  planned {pinned.memory.peak / GIB:.2f} GiB, compiled {verdict.memory.peak / GIB:.2f} GiB")
print(f"a step       planned {pinned.cost.step_seconds:.2f} s, compiled {verdict.time.step_seconds:.2f} s")
