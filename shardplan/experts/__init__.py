"""MLPs of routed experts, sharded over devices: every token passes through the few experts that its router chose.

`shardplan.experts.block.routed_mlp` is the block, from named arrays to named arrays. It runs in a `jax.shard_map`; its
specs follow from the axis mapping in force: how experts are sharded, their hidden states, and tokens. A strategy says
what travels between devices (`shardplan.experts.method`): tokens are gathered, or exchanged, or the weights of experts
are gathered. No token is dropped: rows that do not fit in the buffers take further rounds (`shardplan.experts.rounds`).
"""
