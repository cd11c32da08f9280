"""Gradient checkpointing that does not repeat the selection of blocks.

Rounding may select other blocks when a layer is computed again, and its gradients are those of another forward pass
then. The numbers of blocks are small: 4 bytes for each block of a query and a group. Under `nested`, Haliax computes
whole groups of layers again and keeps nothing of them by name; `groups_keep_selection` makes it keep the blocks. It
replaces a function of Haliax's module, which has no policy for groups.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
from haliax._src import scan as haliax_scan
from haliax.nn.scan import ScanCheckpointPolicy, Stacked

from shardplan.errors import ConfigError
from shardplan.hardware import divisors
from shardplan.model.gradient_checkpointing.activation_names import ActivationName
from shardplan.model.replaceable import Replaceable

# in place of Haliax's function from the start, so that a thread that replaces it changes no other thread
multilevel_scan = haliax_scan.multilevel_scan = Replaceable(haliax_scan.multilevel_scan)


def keep_selected_blocks(policy: bool | str | ScanCheckpointPolicy) -> ScanCheckpointPolicy:
    """Return a Haliax policy that also keeps the indices of the blocks that queries attend to.

    A policy that keeps everything, or that copies these indices to the host, is returned unchanged.

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


@contextmanager
def groups_keep_selection() -> Iterator[None]:
    """Make Haliax's `nested` policy keep selected blocks within the context."""
    with multilevel_scan.replaced_by(_scan_groups):
        yield


def _scan_groups(
    compute_layer: Callable[..., Any],
    carry: Any,
    layers: Any,
    outer_size: int,
    length: int,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """Scan layers in groups, as Haliax's `multilevel_scan` does; the backward pass recomputes one group at a time.

    Args:
        layers: arrays [layer, ...].
        outer_size: number of groups.
        length: number of layers.

    Raises:
        ConfigError: the number of groups does not divide the number of layers.
    """
    if length % outer_size:
        raise ConfigError(
            f"gradient checkpointing is nested:{outer_size}, and {length} layers do not divide into {outer_size} "
            f"blocks; use one of {', '.join(map(str, divisors(length)))}"
        )

    def compute_group(carry: Any, group: Any) -> tuple[Any, Any]:
        return jax.lax.scan(compute_layer, carry, group, reverse=reverse, unroll=unroll)

    compute_group = jax.checkpoint(
        compute_group, policy=jax.checkpoint_policies.save_only_these_names(ActivationName.SELECTED_BLOCKS.value)
    )
    groups = jax.tree.map(lambda leaf: leaf.reshape(outer_size, length // outer_size, *leaf.shape[1:]), layers)
    carry, outputs = jax.lax.scan(compute_group, carry, groups, reverse=reverse, unroll=True)
    return carry, jax.tree.map(lambda leaf: leaf.reshape(length, *leaf.shape[2:]), outputs)


def without_kept_selection(module: Any) -> Any:
    """Return a module whose layers recompute the selection of blocks for gradients under the default policy.

    The planner traces such a program once, and rewrites it for every policy
    (`shardplan.program.variants.checkpointed`).
    """

    def change(node: Any) -> Any:
        if isinstance(node, Stacked) and node.gradient_checkpointing == keep_selected_blocks(True):
            return replace(node, gradient_checkpointing=ScanCheckpointPolicy.from_bool_or_str(True))
        return node

    return jax.tree.map(change, module, is_leaf=lambda node: isinstance(node, Stacked))
