"""A program that also returns the experts to which its tokens were routed."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from haliax import NamedArray

from shardplan.execution.aot_program import Program
from shardplan.execution.layout_forward import planned_forward
from shardplan.experts.statistics.layer_record import LayerRecord
from shardplan.experts.statistics.recording import record_routing
from shardplan.plan.plan import Plan


class RecordedResults(NamedTuple):
    """The results of a step, and the records of how its tokens were routed to experts."""

    results: Any
    """The results of the program without records."""
    records: list[tuple[LayerRecord, ...]]
    """The records of routing, in the form of `RoutingRecording.segments`."""


def with_expert_records(program: Program, plan: Plan) -> Program:
    """Make the program of a step return `RecordedResults`.

    The program gets one more argument, bool[batch, position], sharded like the tokens: which tokens count.

    Args:
        program: program whose second argument is the tokens.
        plan: the plan that the program was made for.
    """
    forward, tokens = planned_forward(plan), program.arguments[1]
    struct = jax.ShapeDtypeStruct(tokens.array.shape, jnp.bool_, sharding=tokens.array.sharding)

    def recorded(module: Any, *inputs: NamedArray) -> RecordedResults:
        *inputs_of_step, is_token = inputs
        with record_routing(forward.in_layer_order(is_token)) as recording:
            results = program.function(module, *inputs_of_step)
        return RecordedResults(results, recording.segments)

    return replace(program, function=recorded, arguments=(*program.arguments, NamedArray(struct, tokens.axes)))
