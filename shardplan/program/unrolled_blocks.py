"""Traces identical layers of an unrolled model only once."""

from typing import Any

import equinox as eqx
import jax
from haliax.nn.scan import BlockSeq


def trace_equal_blocks_once(module: Any) -> Any:
    """Make block sequences of `module` call all blocks of equal structure through one `jax.jit`.

    After the first call its cache has the jaxpr of the block, so that JAX traces one layer and not a hundred. The
    traced program has the same operations in the same order.
    """

    def with_cache(part: Any) -> Any:
        # a subclass may fold its blocks in ways of its own
        if type(part) is not BlockSeq:
            return part
        return _CachedBlocks(part.blocks, part.Block, part.gradient_checkpointing)

    return jax.tree.map(with_cache, module, is_leaf=lambda part: type(part) is BlockSeq)


class _CachedBlocks(BlockSeq):
    """A block sequence that calls its blocks through one `jax.jit`."""

    def fold(self, *args: Any, **kwargs: Any) -> Any:
        """Fold as `BlockSeq` does."""
        return self._with_jit().fold(*args, **kwargs)

    def scan(self, *args: Any, **kwargs: Any) -> Any:
        """Scan as `BlockSeq` does."""
        return self._with_jit().scan(*args, **kwargs)

    def _with_jit(self) -> BlockSeq:
        # a new cache for every call: a jaxpr depends on the axis mapping as well, which is no argument of the block
        call = eqx.filter_jit(lambda block, *args, **kwargs: block(*args, **kwargs))
        return BlockSeq([eqx.Partial(call, block) for block in self.blocks], self.Block, self.gradient_checkpointing)
