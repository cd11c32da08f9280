"""Collectives of Native Sparse Attention in compiled programs: what a device receives, against the formulas."""

from dataclasses import replace

import haliax as hax
import jax
import numpy as np
import pytest
from sparse_attention_cases import CASES, DENSE, LONG, MIXED, call, make

from shardplan.decoder import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts
from shardplan.decoder.parts.attention.sparse.sharding.traffic import backward_traffic, forward_traffic
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.verify.hlo.collectives import base_opcode, is_collective
from shardplan.verify.hlo.parser import parse
from shardplan.verify.hlo.replica_groups import parse_replica_groups, parse_source_target_pairs


def program(case, is_training):
    """The text of the compiled forward pass, or of forward and backward pass."""

    def compile_program():
        layer, x, cotangent = make(case)

        def forward(layer, x):
            return call(case, layer, x)

        def loss(layer, x):
            output = forward(layer, x)
            return hax.sum(output * cotangent).scalar(), output

        function = jax.grad(loss, (0, 1), has_aux=True) if is_training else forward
        return jax.jit(function).lower(layer, x).compile().as_text()

    return case.run(compile_program)


def received_bytes(text, devices):
    """(kind of collective, rows of its result) -> float[devices] bytes received; rows are the second dimension."""
    received = {}
    for (kind, dims), size in received_by_shape(text, devices).items():
        key = kind, dims[1] if len(dims) > 1 else 0
        received[key] = received.get(key, 0) + size
    return received


def received_by_shape(text, devices, kinds=None):
    """(kind of collective, dimensions of its result) -> float[devices] bytes received; of some kinds, or of all."""
    received = {}
    for computation in parse(text).computations.values():
        for instruction in computation.instructions.values():
            for array in instruction.arrays if is_collective(instruction) else ():
                key = base_opcode(instruction), tuple(array.dims)
                if kinds is not None and key[0] not in kinds:
                    continue
                size = bytes_by_device(key[0], instruction, array.bytes, devices)
                received[key] = received.get(key, 0) + size
    return received


def bytes_by_device(kind, instruction, size, devices):
    """Bytes that each device receives for a result of `size` bytes."""
    if kind == "collective-permute":
        pairs = parse_source_target_pairs(instruction.attributes["source_target_pairs"])
        assert all(source != target for source, target in pairs)
        return np.bincount([target for _, target in pairs], minlength=devices) * size
    count = len(parse_replica_groups(instruction.attributes["replica_groups"], devices)[0])
    factors = {"all-gather": (count - 1) / count, "reduce-scatter": count - 1, "all-reduce": 2 * (count - 1) / count}
    return np.full(devices, factors[kind] * size)


TRAFFIC_CASES = {
    "positions 3": CASES["positions 3"],
    "positions 8": CASES["positions 8"],
    "zigzag 2": replace(CASES["zigzag 2"], changes={"window": 30}),
    "zigzag 8": replace(CASES["zigzag 8"], changes={"window": 40}),
    "mixed": replace(MIXED, params={"kv_head": "model"}, method=DENSE, queries_per_chunk=LONG),
}


@pytest.mark.parametrize("is_training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in TRAFFIC_CASES.items()])
def test_received_bytes(case, is_training):
    """The program has the collectives of the formulas, with their bytes, and no other ones of tokens."""
    config, parts = case.config, PositionParts(case.positions, case.devices, SequenceOrder(case.layout))
    received = received_bytes(program(case, is_training), int(np.prod([*case.mesh.values()])))
    by_kind = {kind: {rows for each, rows in received if each == kind} for kind, _ in received}
    groups = config.groups // case.mesh.get("model", 1)
    forward, backward = forward_traffic(config, parts, groups, 4), backward_traffic(config, parts, groups, 4)
    halo = config.block - config.stride
    gathered = {case.positions // config.stride: "compressed", case.positions: "selected"}
    assert by_kind["all-gather"] == gathered.keys()
    for rows, name in gathered.items():
        assert received["all-gather", rows].max() == pytest.approx(getattr(forward, name), rel=0.01)
        if is_training:
            scattered = received["reduce-scatter", rows // case.devices].max()
            assert scattered == pytest.approx(getattr(backward, name), rel=0.01)
    windows = by_kind["collective-permute"] - {halo}
    by_device = {
        "compression_halo": received.get(("collective-permute", halo), np.zeros(1)),
        "window_halo": sum(received["collective-permute", rows] for rows in windows),
    }
    for name, found in by_device.items():
        expected = getattr(forward, name) + (getattr(backward, name) if is_training else 0)
        assert found.max() == pytest.approx(expected, rel=0.01), name
    others = by_kind.keys() - {"all-gather", "collective-permute", "reduce-scatter"}
    # of the output over groups, and of gradients of parameters
    assert others == ({"all-reduce"} if is_training or "model" in case.mesh else set())


def test_parameters_are_gathered_and_nothing_else():
    """The batch over 8 devices, and parameters as well."""
    case = CASES["fsdp 8"]
    received = received_bytes(program(case, is_training=False), 8)
    assert {kind for kind, _ in received} == {"all-gather"}
    layer, _, _ = make(case.alone())
    sharded = [each.array.nbytes for each in layer.parameters.values() if case.config.Embed in each.axes]
    assert sum(received.values()).max() == pytest.approx(7 / 8 * sum(sharded), rel=0.01)


def test_traffic_of_the_paper():
    """64K tokens on 8 devices, in either order: zigzag has the same gathers, and twice the halos."""
    paper = NativeSparseConfig(2560, 4, 16, 128, 128, block=32, stride=16, selection_block=64, selected=16, window=512)
    contiguous, zigzag = (
        forward_traffic(paper, PositionParts(65536, 8, order), 4, 2)
        for order in (SequenceOrder.CONTIGUOUS, SequenceOrder.ZIGZAG)
    )
    row = 2 * 4 * 256
    assert contiguous == (16 * row, 7 / 8 * 4096 * row, 511 * row, 7 / 8 * 65536 * row)
    assert (zigzag.gathered, zigzag.permuted) == (contiguous.gathered, 2 * contiguous.permuted)
    alone = forward_traffic(paper, PositionParts(1000), 4, 2)
    assert alone.gathered == alone.permuted == 0
