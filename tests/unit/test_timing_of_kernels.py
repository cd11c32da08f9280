"""Kernels, which have no cycles, take the time of their FLOPs or bytes: attention, grouped matmuls, lookups."""

import pytest
from hlo_modules import read_text
from hlo_steps import CLOCK, FLOPS, HBM, timing

from shardplan.hardware import parse_slice
from shardplan.verify.hlo.kernels import ALL_WORK, KernelWork
from shardplan.verify.hlo.timing import Timing
from shardplan.verify.verdict import Omission, OmissionKind


def kernel_seconds(sequences: int, causal: float) -> float:
    """Seconds for 2 heads, 256 x 256 positions, head size 128: 2 products forward, 3 for dq, 4 for dk and dv."""
    return sequences * 2 * 2 * 256 * 256 * 128 * (2 + 3 + 4) * causal / FLOPS


@pytest.mark.parametrize("causal", [1, 0.75])
def test_attention_kernels_of_a_real_module(causal):
    result = timing(read_text("splash"), "v4-8", (1, 4, 1), KernelWork(attended_fraction=causal), hbm_bandwidth=1e18)
    assert result.kernel_seconds == pytest.approx(kernel_seconds(1, causal))
    cycles = 754 + 1400 + 1082 + 622 + 754 + 1082 + 1396 + 620 + 620 + 608
    assert result.seconds == pytest.approx(kernel_seconds(1, causal) + cycles / CLOCK)
    assert not result.not_understood


def test_attention_kernels_of_several_sequences():
    """With more than one sequence per device q, k and v have a batch dimension."""
    result = timing(read_text("splash_batch"), "v4-8", (1, 4, 1), hbm_bandwidth=1e18)
    assert result.kernel_seconds == pytest.approx(kernel_seconds(2, 1))


@pytest.mark.parametrize(("of_keys", "of_values"), [(128, 128), (64, 64), (192, 128), (256, 256)])
def test_head_sizes_are_padded_in_attention_kernels(of_keys, of_values):
    """Of 4 heads and 512 positions; the matrix unit holds 128 elements of a head at a time."""
    text = f"""ENTRY %main (q: bf16[4,512,64], k: bf16[4,512,64], v: bf16[4,512,64]) -> bf16[4] {{
  %q = bf16[4,512,{of_keys}] parameter(0)
  %k = bf16[4,512,{of_keys}] parameter(1)
  %v = bf16[4,512,{of_values}] parameter(2)
  ROOT %splash_mha_fwd = bf16[4,512,{of_values}] custom-call(%q, %k, %v), custom_call_target="tpu_custom_call"
}}"""
    padded = {64: 128, 128: 128, 192: 256, 256: 256}
    flops = 2 * 4 * 512 * 512 * (padded[of_keys] + padded[of_values])
    assert timing(text, "v4-8", (1, 4, 1), hbm_bandwidth=1e18).kernel_seconds == pytest.approx(flops / FLOPS)


def grouped_matmul(
    name: str, rows: int, inside_of_a_fusion: bool = False, kernel_work: KernelWork = ALL_WORK
) -> Timing:
    """Of a kernel `name` for [rows, 1024] x [4, 1024, 2048], whose result stays in the memory of the core."""
    kernel = f"""%a = bf16[{rows},1024] parameter(0)
  %b = bf16[4,1024,2048] parameter(1)
  ROOT %{name} = bf16[{rows},2048]{{1,0:S(1)}} custom-call(%a, %b), custom_call_target="tpu_custom_call"
"""
    header = f"(a: bf16[{rows},1024], b: bf16[4,1024,2048]) -> bf16[{rows},2048] {{"
    if not inside_of_a_fusion:
        return timing(f"ENTRY %main {header}\n  {kernel}}}", "v4-8", (1, 4, 1), kernel_work)
    call = (
        kernel[: kernel.index("  ROOT")] + f"  ROOT %f = bf16[{rows},2048] fusion(%a, %b), kind=kCustom, calls=%inner"
    )
    return timing(f"%inner {header}\n  {kernel}}}\n\nENTRY %main {header}\n  {call}\n}}", "v4-8", (1, 4, 1))


@pytest.mark.parametrize("name", ["ragged-dot-none", "jvp_jit_gmm__.15", "transpose_jvp_jit_tgmm___.2", "gmm"])
@pytest.mark.parametrize("inside_of_a_fusion", [False, True])
def test_grouped_matmuls_take_their_flops_or_their_weights(name, inside_of_a_fusion):
    """Each row meets one of the matrices; with few rows it takes longer to read these."""
    many, few = grouped_matmul(name, 8192, inside_of_a_fusion), grouped_matmul(name, 64, inside_of_a_fusion)
    assert many.kernel_seconds == many.seconds == pytest.approx(2 * 8192 * 1024 * 2048 / FLOPS)
    assert few.kernel_seconds == few.seconds == pytest.approx(2 * (64 * 1024 + 4 * 1024 * 2048) / HBM)
    assert not many.not_understood and not few.not_understood


def test_gradients_of_a_real_grouped_matmul():
    """The matmul and the gradient of its rows are kernels. That of its weights has cycles: it is masked and dense.

    Tiles of 128 rows and of 1280 or 640 columns are computed whole, and one more row of them for all groups but one.
    """
    result = timing(read_text("ragged_dot"), "v5p-8", (1, 4, 1))
    hardware = parse_slice("v5p-8").generation
    rows = (4096 / 128 + 4 - 1) * 128
    assert result.kernel_seconds == pytest.approx(2 * 2 * rows * 1024 * (2 * 1280) / hardware.flops)
    dense = 4 * 2 * 4096 * 1024 * 2048 / hardware.flops
    assert result.seconds - result.kernel_seconds > result.masked_dense_seconds > dense
    assert not result.not_understood


def test_gradients_of_a_real_grouped_matmul_of_megablox():
    """All three matmuls are kernels; what finds their tiles has two scatters on the sparse cores, which are named."""
    result = timing(read_text("megablox"), "v5p-8", (1, 4, 1))
    flops = 3 * 2 * 4096 * 1024 * 2048
    assert result.kernel_seconds == pytest.approx(flops / parse_slice("v5p-8").generation.flops)
    assert result.seconds > result.kernel_seconds and not result.masked_dense_seconds
    assert result.not_understood == {Omission(OmissionKind.ASYNC_CALL): 2}


@pytest.mark.parametrize(("held", "counted"), [(None, 8192), (3000, 3000), (8192, 8192), (9000, 8192)])
def test_rows_that_hold_no_token_are_not_work(held, counted):
    """A static buffer has room for more rows than are routed to it."""
    result = grouped_matmul("gmm", 8192, kernel_work=KernelWork(routed_rows=held))
    assert result.kernel_seconds == pytest.approx(2 * counted * 1024 * 2048 / FLOPS)
    assert not result.masked_dense_seconds


def test_a_dense_matmul_is_not_masked():
    """A product of two selected arrays is a masked grouped matmul only with a dimension of groups."""
    text = read_text("ragged_dot")
    assert timing(text, "v5p-8", (1, 4, 1)).masked_dense_seconds
    assert not timing(text.replace("4,4096,", "4096,"), "v5p-8", (1, 4, 1)).masked_dense_seconds


LOOKED_UP = """
%inner (table: f32[50000,1024], rows: s32[8192], updates: f32[8192,1024]) -> f32[SHAPE] {
  %table = f32[50000,1024] parameter(0)
  %rows = s32[8192] parameter(1)
  %updates = f32[8192,1024] parameter(2)
  ROOT %result = f32[SHAPE] OPERATION
}

ENTRY %main (t: f32[50000,1024], r: s32[8192], u: f32[8192,1024]) -> f32[SHAPE] {
  %t = f32[50000,1024] parameter(0)
  %r = s32[8192] parameter(1)
  %u = f32[8192,1024] parameter(2)
  ROOT %f = f32[SHAPE] fusion(%t, %r, %u), kind=kCustom, calls=%inner
}
"""


@pytest.mark.parametrize(
    ("shape", "operation", "passes", "omission"),
    [
        ("8192,1024", "gather(%table, %rows)", 2, Omission(OmissionKind.NO_CYCLES, "gather")),
        ("50000,1024", "scatter(%table, %rows, %updates)", 3, Omission(OmissionKind.SCATTER, "scatter")),
    ],
)
def test_gathers_and_scatters_without_cycles(shape, operation, passes, omission):
    """Rows are read and written; a scatter reads the updates, and reads and writes as many rows of the table."""
    result = timing(LOOKED_UP.replace("SHAPE", shape).replace("OPERATION", operation), "v4-8", (1, 4, 1))
    assert result.seconds == pytest.approx(passes * 8192 * 1024 * 4 / HBM)
    assert dict(result.not_understood) == {omission: 1}


@pytest.mark.parametrize(("sent", "buffer"), [(1024, 1280), (1280, 1024)])
def test_room_for_more_rows_is_not_exchanged(sent, buffer):
    """A buffer receives rows on the way there, and sends them on the way back."""
    text = f"""ENTRY %main (a: bf16[{sent},1024], b: bf16[{buffer},1024], i: s32[4]) -> bf16[{buffer},1024] {{
  %a = bf16[{sent},1024] parameter(0)
  %b = bf16[{buffer},1024] parameter(1)
  %i = s32[4] parameter(2)
  ROOT %r = bf16[{buffer},1024] ragged-all-to-all(%a, %b, %i, %i, %i, %i), replica_groups={{{{0,1,2,3}}}}
}}"""
    [use] = timing(text, "v5p-8", (1, 4, 1)).uses
    assert use.transfer.bytes == 3 / 4 * 1024 * 1024 * 2
