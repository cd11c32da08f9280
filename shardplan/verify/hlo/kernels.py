"""The time of work for which the compiler estimates no cycles: kernels, gathers, scatters and copies."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardplan.experts.tiles import GroupedMatmul, TileShape
from shardplan.hardware.generations import Generation
from shardplan.verify.hlo.module import ArrayShape, Computation, Instruction, Module
from shardplan.verify.verdict import OmissionKind

FLOATS = ("bf16", "f16", "f32")
KERNEL_PRODUCTS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}
"""Kernel of splash attention -> numbers of its matmuls of size position x position x head size: (with the head size of
queries and keys: q k^T, and the gradients of q and k; with the head size of values: p v, and the gradients of p and
v)."""
LANES = 128
"""Multiple to which the matrix unit pads head sizes."""
GROUPED_MATMUL = re.compile(r"^ragged-dot-|(^|_)t?gmm(_|\.|$)")
"""Names of the kernels of grouped matmuls: XLA's, and `gmm` and `tgmm` of megablox."""
TILES = re.compile(r'ragged_dot_tiling="([\d,]+)"')
"""Pattern for the tiles in the attributes of an XLA grouped matmul."""
PRODUCTS = ("convolution", "dot")
"""Opcodes of matmuls."""


@dataclass(frozen=True)
class KernelWork:
    """The work of kernels, which cannot be read from a compiled module."""

    attended_fraction: float = 1.0
    """Fraction of the blocks of position x position that attention kernels compute."""
    routed_rows: float | None = None
    """Mean number of rows of a device's grouped matmul that hold a token; None if all do."""


ALL_WORK = KernelWork()
"""The work of kernels that compute all blocks and all rows."""


@dataclass(frozen=True)
class MemoryTraffic:
    """The assumed HBM traffic of an operation without known cycles or FLOPs."""

    subject: str
    """Name of the work: an opcode, with the target of a custom call."""
    arrays: tuple[ArrayShape, ...]
    passes: int
    """Number of reads and writes of each of `arrays`."""
    assumption: OmissionKind = OmissionKind.NO_CYCLES

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.passes * sum(array.bytes for array in self.arrays)


def kernels(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """Yield the custom calls without cycles that `instruction` runs, each with its computation.

    >>> call = Instruction("flash", "custom-call", (), (), {})
    >>> fusion = Instruction("fusion", "fusion", (), (), {"calls": "%inside"})
    >>> inside, main = Computation("inside", {"flash": call}, call), Computation("main", {"fusion": fusion}, fusion)
    >>> module = Module({"inside": inside, "main": main}, entry=main)
    >>> [(computation.name, each.name) for computation, each in kernels(module, main, fusion)]
    [('inside', 'flash')]
    """
    for inner, each in _executed(module, computation, instruction):
        if each.opcode == "custom-call" and each.cycles is None:
            yield inner, each


def kernel_seconds(
    instruction: Instruction, computation: Computation, generation: Generation, work: KernelWork
) -> float:
    """Return max(FLOPs / peak, bytes of arrays / HBM bandwidth) of a kernel, in seconds; 0 if its FLOPs are unknown.

    For a grouped matmul with known tiles, the FLOPs of complete tiles count, and each array as often as it is read.

    >>> from shardplan.hardware.generations import GENERATIONS
    >>> array, v5e = ArrayShape("bf16", (1, 1024, 128)), GENERATIONS["v5e"]
    >>> inputs = {name: Instruction(name, "parameter", (array,), (), {}) for name in "qkv"}
    >>> kernel = Instruction("splash_mha_fwd", "custom-call", (array,), ("q", "k", "v"), {})
    >>> kernel_seconds(kernel, Computation("main", inputs, kernel), v5e, ALL_WORK) == 4 * 1024 * 1024 * 128 / v5e.flops
    True
    """
    tiles = TILES.search(instruction.attributes.get("frontend_attributes", ""))
    if tiles:
        return _grouped_matmul(instruction, computation, work).seconds(TileShape.parse(tiles[1]), generation)
    flops = _kernel_flops(instruction, computation, work)
    if not flops:
        return 0.0
    in_hbm = sum(array.bytes for array in (*_operands(instruction, computation), *instruction.arrays) if array.in_hbm)
    return max(flops / generation.flops, in_hbm / generation.hbm_bandwidth)


def memory_traffic(module: Module, computation: Computation, instruction: Instruction) -> MemoryTraffic:
    """Return the assumed HBM traffic of `instruction`, which has neither cycles nor known FLOPs.

    >>> rows = Instruction("rows", "gather", (ArrayShape("f32", (1024, 128)),), (), {})
    >>> main = Computation("main", {"rows": rows}, rows)
    >>> traffic = memory_traffic(Module({"main": main}, main), main, rows)
    >>> traffic.subject, traffic.passes, traffic.bytes
    ('gather', 2, 1048576)
    """
    for inner, each in _executed(module, computation, instruction):
        operands = [inner.instructions[name].arrays for name in each.operands if name in inner.instructions]
        if each.opcode == "scatter":  # operands, indices, as many updates as operands: rows are changed in place
            updates = tuple(array for arrays in operands[len(operands) // 2 + 1 :] for array in arrays)
            return MemoryTraffic("scatter", updates, 3, OmissionKind.SCATTER)
        if each.opcode == "gather":
            return MemoryTraffic("gather", instruction.arrays, 2)
        if each is instruction and each.opcode == "dynamic-update-slice":  # in place: only the update is written
            return MemoryTraffic(each.opcode, operands[1], 2)
    return MemoryTraffic(f"{instruction.opcode} {instruction.custom_call_target}".strip(), instruction.arrays, 2)


def is_masked_dense(module: Module, computation: Computation, instruction: Instruction) -> bool:
    """Return whether `instruction` is a grouped matmul that the compiler computes as a dense one over all groups.

    The compiler has no kernel for the gradient of the matrices. For each group, it multiplies all rows, with zeros in
    place of the rows of other groups.

    >>> array = ArrayShape("bf16", (8, 64, 64))
    >>> factors = {name: Instruction(name, "select", (array,), (), {}) for name in ("a", "b")}
    >>> product = Instruction("product", "convolution", (array,), ("a", "b"), {})
    >>> main = Computation("main", {**factors, "product": product}, product)
    >>> is_masked_dense(Module({"main": main}, main), main, product)
    True
    """
    for inner, each in _executed(module, computation, instruction):
        if each.opcode in PRODUCTS and len(each.arrays[0].dims) == 3:
            factors = [_root(module, inner.instructions[name]) for name in each.operands]
            if all(factor.opcode == "select" and len(factor.arrays[0].dims) == 3 for factor in factors):
                return True
    return False


def _executed(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """Yield an instruction, and the instructions inside of a fusion, each with its computation."""
    yield computation, instruction
    if instruction.opcode == "fusion":
        for inner in (module.computations[name] for name in instruction.called):
            for each in inner.instructions.values():
                yield from _executed(module, inner, each)


def _root(module: Module, instruction: Instruction) -> Instruction:
    """Return the instruction that computes a fusion's result; for any other instruction, return itself."""
    while instruction.opcode == "fusion":
        instruction = module.computations[instruction.called[0]].root
    return instruction


def _operands(instruction: Instruction, computation: Computation) -> list[ArrayShape]:
    return [array for name in instruction.operands for array in computation.instructions[name].arrays]


def _grouped_matmul(instruction: Instruction, computation: Computation, work: KernelWork) -> GroupedMatmul:
    """Return the grouped matmul that an XLA kernel computes."""
    left, right = [array for array in _operands(instruction, computation) if array.dtype in FLOATS][-2:]
    result = instruction.arrays[0]
    is_matrix_gradient = len(result.dims) == 3
    groups = (result if is_matrix_gradient else right).dims[0]
    rows = float(left.dims[0])
    if work.routed_rows is not None:
        rows = min(rows, work.routed_rows)
    return GroupedMatmul(
        rows, groups, left.dims[1], result.dims[-1], left.bytes // math.prod(left.dims), is_matrix_gradient
    )


def _kernel_flops(instruction: Instruction, computation: Computation, work: KernelWork) -> float:
    """Return the FLOPs of a kernel (for splash attention, of its unmasked blocks); 0 for an unknown kernel."""
    operands = _operands(instruction, computation)
    matrices = [array.dims for array in operands if array.dtype in FLOATS and len(array.dims) >= 2]
    kernel = next((kernel for kernel in KERNEL_PRODUCTS if f"splash_mha_{kernel}" in instruction.name), None)
    if kernel is not None:
        # q[..., heads, position, head_size] is first, then k and v of the same rank with their own heads and positions
        q, k, v = [dims for dims in matrices if len(dims) >= 3][:3]
        scores = math.prod(q[:-1]) * k[-2]
        padded = [math.ceil(dims[-1] / LANES) * LANES for dims in (q, v)]
        sizes = sum(count * size for count, size in zip(KERNEL_PRODUCTS[kernel], padded, strict=True))
        return 2 * scores * sizes * work.attended_fraction
    if GROUPED_MATMUL.search(instruction.name) and len(matrices) >= 2:
        # [m, k] x [groups, k, n] -> [m, n] and its transposes: a row meets one group; m k, k n, m n are the sizes
        arrays = (*matrices[-2:], instruction.arrays[0].dims)
        flops = 2 * math.sqrt(math.prod(math.prod(dims[-2:]) for dims in arrays))
        flops_of_row = 2 * math.prod(max(arrays, key=len)[-2:])
        return flops if work.routed_rows is None else min(flops, work.routed_rows * flops_of_row)
    return 0.0
