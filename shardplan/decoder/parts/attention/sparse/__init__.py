"""Native Sparse Attention (NSA): every query attends to compressed blocks, to a few selected blocks, and to a window.

Source: https://arxiv.org/abs/2502.11089, section 3. One set of queries has three branches, each with keys and values
of its own; sigmoid gates weigh their outputs. A query selects the blocks of tokens that it attends to most in the
compressed branch, so that scores of single tokens are computed for few blocks only.

Each part is a module of functions of arrays, so that it can be sharded or replaced by a kernel without the others. They
share one notation for the axes of arrays, below.

Batch, positions and groups can be sharded over devices. `sharding.mesh_sharding` runs `device_branches` on every
device; t is then the positions of the device, and s those of the whole sequence where keys are gathered.

Keys and values are multiplied in the dtype of queries. They may be float32 while queries are bfloat16, so that
gradients of many queries are added in float32.

| letter | axis | size |
|---|---|---|
| b | batch | |
| t | position of queries | S |
| s | position of keys | S |
| g | kv_head: heads of keys and values, the groups of the paper | G |
| r | q_heads_per_group: heads of queries that share a head of keys | R |
| d | head_size: channels of keys, or of values | |
| c | compressed_block: `block` tokens each, one starts every `stride` tokens | C = max(0, (S - block) // stride + 1) |
| j | selection_block: `selection_block` tokens each, side by side | J = ceil(S / selection_block) |
| n | selected: the blocks that a query selects | `selected` |
"""
