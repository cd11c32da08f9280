"""Runs a loop over layers; while a recording is active, the layers' records become outputs of the loop.

What is computed within a loop can leave it only as one of its outputs. Each repetition of a block of layers is recorded
by itself, and the loop stacks the records, also if it computes the block again for gradients.
"""

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from haliax import NamedArray
from haliax.nn.scan import Stacked

from shardplan.decoder.parts.attention.selection_recording import SelectionRecording, selection_recording
from shardplan.experts.statistics.recording import RoutingRecording, routing_recording
from shardplan.model.gradient_checkpointing.kept_selection import groups_keep_selection


@groups_keep_selection()
def fold_layers(layers: Stacked, x: NamedArray, *arguments: Any) -> NamedArray:
    """Run a loop over layers as `layers.fold(x, *arguments)` does, and add their records to the active recordings."""
    recordings: list[RoutingRecording | SelectionRecording] = [
        each for each in (routing_recording(), selection_recording()) if each is not None
    ]
    if not recordings:  # the program has no further outputs then
        folded: NamedArray = layers.fold(x, *arguments)
        return folded

    def apply(block: Any, x: NamedArray, *arguments: Any) -> tuple[NamedArray, list[tuple[Any, ...]]]:
        with ExitStack() as stack:
            of_block: list[RoutingRecording | SelectionRecording] = []
            for each in recordings:
                context: AbstractContextManager[RoutingRecording | SelectionRecording] = each.of_repetition()
                of_block.append(stack.enter_context(context))
            x = block(x, *arguments)
        return x, [each.layers() for each in of_block]

    x, records = layers.scan_via(apply)(x, *arguments)
    for recording, of_segment in zip(recordings, records, strict=True):
        recording.segments.append(of_segment)
    return x
