"""Gradient checkpointing that does not repeat the selection of blocks.

Rounding may select other blocks when a layer is computed again, and its gradients are those of another forward pass
then. The numbers of blocks are small: 4 bytes for each block of a query and a group. Under `nested`, Haliax computes a
whole group of layers again and keeps nothing of it by name, so that blocks are selected twice.
"""

from dataclasses import replace
from typing import Any

import jax
from haliax.nn.scan import ScanCheckpointPolicy, Stacked

from shardplan.model.gradient_checkpointing.activation_names import ActivationName


def keep_selected_blocks(policy: bool | str | ScanCheckpointPolicy) -> ScanCheckpointPolicy:
    """Return a Haliax policy that also keeps the indices of the blocks that queries attend to.

    A policy that keeps everything, or that copies them to the host, is returned as it is.

    >>> keep_selected_blocks("offload").save_block_internals
    ['selected_blocks']
    >>> keep_selected_blocks(False).save_block_internals
    True
    """
    if not isinstance(policy, ScanCheckpointPolicy):
        policy = ScanCheckpointPolicy.from_bool_or_str(policy)
    name, kept = ActivationName.SELECTED_BLOCKS.value, policy.save_block_internals
    if policy.disable or kept is True or name in policy.offload_block_internals:
        return policy
    names = kept or []
    # a simple policy would keep nothing by name
    return policy if name in names else replace(policy, simple=False, save_block_internals=[*names, name])


def without_kept_selection(module: Any) -> Any:
    """Return a module whose layers, under the default policy, repeat the selection of blocks for gradients.

    Such a program is traced once, and rewritten for every policy (`shardplan.program.variants.checkpointed`).
    """

    def change(node: Any) -> Any:
        if isinstance(node, Stacked) and node.gradient_checkpointing == keep_selected_blocks(True):
            return replace(node, gradient_checkpointing=ScanCheckpointPolicy.from_bool_or_str(True))
        return node

    return jax.tree.map(change, module, is_leaf=lambda node: isinstance(node, Stacked))
