"""Step times and memory that are read from compiled modules agree with calculations by hand.

A v4 core runs 1.05e9 cycles per second, a link transfers 4.5e10 bytes per second in each direction with a latency of a
microsecond, and the network between slices transfers 6.25e9 bytes per second. The 4 devices of v4-8 are a square
without wraparound: each device has two links, as in a ring, and opposite corners are two hops apart.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from shardplan.hardware import parse_slice
from shardplan.verify.hlo.collectives import Network
from shardplan.verify.hlo.kernels import ALL_WORK, KernelWork
from shardplan.verify.hlo.parser import parse
from shardplan.verify.hlo.peak_buffers import MAX_POINTS, hbm_buffers, hbm_bytes, live_bytes, parse_live_at_peak
from shardplan.verify.hlo.timing import Timing, model_step
from shardplan.verify.verdict import Buffer, Omission, OmissionKind

FIXTURES = Path(__file__).parent / "hlo"
CLOCK, RING, LINK, NETWORK, HBM, FLOPS = 1.05e9, 9e10, 4.5e10, 6.25e9, 1.2e12, 2.75e14
MS, HOP = 1e-3, 1e-6
GATHER = 1 * MS + 2 * HOP
"""Seconds of `gather` among four devices."""
MIB = 2**20

COMPUTATIONS = """
%work (a: f32[]) -> f32[] {
  ROOT %a = f32[] parameter(0)
}

%begin (b: f32[7500000]) -> f32[30000000] {
  %b = f32[7500000] parameter(0)
  ROOT %ag.1 = f32[30000000] all-gather(%b), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}
}

%on (c: f32[7500000]) -> f32[30000000] {
  %c = f32[7500000] parameter(0)
  ROOT %ag.2 = f32[30000000] all-gather(%c), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}
}

%end (d: f32[7500000]) -> f32[30000000] {
  %d = f32[7500000] parameter(0)
  ROOT %ag.3 = f32[30000000] all-gather(%d), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}
}

%begin_other (e: f32[7500000]) -> f32[30000000] {
  %e = f32[7500000] parameter(0)
  ROOT %ag.4 = f32[30000000] all-gather(%e), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}, CHAIN
}

%end_other (f: f32[7500000]) -> f32[30000000] {
  %f = f32[7500000] parameter(0)
  ROOT %ag.5 = f32[30000000] all-gather(%f), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}, CHAIN
}

%body (p: (s32[], s32[], f32[7500000])) -> (s32[], s32[], f32[7500000]) {
  %p = (s32[], s32[], f32[7500000]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %y = f32[7500000] get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  IN_BODY
  ROOT %t = (s32[], s32[], f32[7500000]) tuple(%next, %n, %y)
}

%condition (q: (s32[], s32[], f32[7500000])) -> pred[] {
  %q = (s32[], s32[], f32[7500000]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  ROOT %less = pred[] compare(%j, %m), direction=LT
}
""".replace("CHAIN", 'frontend_attributes={chain_id="3"}')


def work(name: str, milliseconds: float, calls: str = "work") -> str:
    """A fusion that occupies the core for `milliseconds`."""
    cycles = round(milliseconds * MS * CLOCK)
    config = f'{{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    return f"%{name} = f32[] fusion(%x), kind=kLoop, calls=%{calls}, backend_config={config}"


def gather(name: str, suffix: str = "", groups: str = "{{0,1,2,3}}") -> str:
    """An all-gather of 30 MB per device: among four 90 MB at 90 GB/s take 1 ms; pairs with one link take 2/3 ms."""
    return f"%{name} = f32[30000000] all-gather{suffix}(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}"


LOOP = """%zero = s32[] constant(0)
  %limit = s32[] constant(5)
  %tuple = (s32[], s32[], f32[7500000]) tuple(%zero, %limit, %x)
  %loop = (s32[], s32[], f32[7500000]) while(%tuple), condition=%condition, body=%body"""


def step(*lines: str, body: str = "", sizes: tuple[int, ...] = (1, 4, 1), slice_name: str = "v4-8") -> Timing:
    """Timing of an entry computation with `lines`, which may use %x: f32[7500000], on a v4 slice."""
    entry = "\n  ".join(lines)
    text = COMPUTATIONS.replace("IN_BODY", body) + (
        "\nENTRY %main (x: f32[7500000]) -> f32[] {\n  %x = f32[7500000] parameter(0)\n  "
        f"{entry}\n  ROOT %result = f32[] constant(0)\n}}\n"
    )
    return timing(text, slice_name, sizes)


def timing(
    text: str,
    slice_name: str,
    sizes: tuple[int, ...],
    kernel_work: KernelWork = ALL_WORK,
    hbm_bandwidth: float | None = None,
) -> Timing:
    hardware = parse_slice(slice_name)
    if hbm_bandwidth is not None:
        hardware = replace(hardware, generation=replace(hardware.generation, hbm_bandwidth=hbm_bandwidth))
    mesh = dict(zip(("replica", "data", "model"), sizes, strict=True))
    slices = [i // (hardware.devices // hardware.slices) for i in range(hardware.devices)]
    return model_step(parse(text), Network(mesh, hardware, slices), hardware, kernel_work)


def read(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text(encoding="utf-8")


def uses_of(timing: Timing) -> list[tuple]:
    """Kind, mesh axes, bytes, form and executions of every collective."""
    return [(u.transfer.kind, u.transfer.mesh_axes, u.transfer.bytes, u.form, u.count) for u in timing.uses]


def test_a_synchronous_collective_blocks_the_core():
    result = step(work("w", 0.5), gather("g"), work("v", 0.25))
    assert result.seconds == pytest.approx(0.75 * MS + GATHER)
    assert result.compute_seconds == pytest.approx(0.75 * MS)
    assert uses_of(result) == [("all-gather", ("data",), 90e6, "sync", 1)]


@pytest.mark.parametrize("busy", [0.25, 1, 2])
def test_an_asynchronous_collective_overlaps_work(busy):
    """The core waits only for the part of the transfer that outlasts the work."""
    result = step(gather("g", "-start"), work("w", busy), "%d = f32[30000000] all-gather-done(%g)", work("v", 0.5))
    assert result.seconds == pytest.approx(max(busy * MS, GATHER) + 0.5 * MS)
    assert result.compute_seconds == pytest.approx((busy + 0.5) * MS)


def test_an_asynchronous_call_with_a_collective_inside():
    """A collective may be inside of a computation that runs asynchronously, as on sparse cores."""
    result = step(
        "%g = ((f32[7500000]), f32[30000000]) async-start(%x), calls=%begin",
        work("w", 0.25),
        "%d = f32[30000000] async-done(%g)",
    )
    assert result.seconds == pytest.approx(GATHER)
    assert uses_of(result) == [("all-gather", ("data",), 90e6, "async", 1)]


@pytest.mark.parametrize("busy", [0.25, 2])
def test_a_call_without_operands_transfers_nothing_before_an_update_hands_them_over(busy):
    """Sparse cores are started before the array is computed that they send; only work behind it overlaps."""
    result = step(
        '%g = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%begin',
        work("w", 3),
        "%u = ((f32[7500000]), f32[30000000]) call-update(%g, %x)",
        work("v", busy),
        "%d = f32[30000000] call-done(%u)",
    )
    assert result.seconds == pytest.approx(3 * MS + max(busy * MS, GATHER))
    assert uses_of(result) == [("all-gather", ("data",), 90e6, "async", 1)]


def test_transfers_on_one_link_wait_for_each_other():
    """Two gathers along `data` take twice as long as one."""
    result = step(
        gather("g", "-start"),
        gather("h", "-start"),
        "%d = f32[30000000] all-gather-done(%g)",
        work("w", 0.5),
        "%e = f32[30000000] all-gather-done(%h)",
    )
    assert result.seconds == pytest.approx(2 * GATHER)


def test_transfers_on_different_links_do_not():
    """Pairs along `data` and pairs along `model` use different sides of the square at the same time, for 2/3 ms."""
    result = step(
        gather("g", "-start", "{{0,2},{1,3}}"),
        gather("h", "-start", "{{0,1},{2,3}}"),
        "%d = f32[30000000] all-gather-done(%g)",
        "%e = f32[30000000] all-gather-done(%h)",
        sizes=(1, 2, 2),
    )
    assert result.seconds == pytest.approx(2 / 3 * MS + HOP)
    assert [use.transfer.mesh_axes for use in result.uses] == [("data",), ("model",)]


TO_HOST = (
    "%{0} = ((f32[4,7500000]{{1,0:S(5)}}, f32[1,7500000], s32[]), f32[4,7500000]{{1,0:S(5)}}, u32[]) "
    "dynamic-update-slice-start(%x)"
)
FROM_HOST = (
    "%{0} = ((f32[4,7500000]{{1,0:S(5)}}, s32[]), f32[1,7500000], u32[]) dynamic-slice-start(%x)"
)  # fmt: skip


@pytest.mark.parametrize("busy", [0.25, 3])
def test_copies_between_device_and_host_overlap_work(busy):
    """Of a slice as large as %x, with 16 GB/s in each direction; two in one direction wait for each other."""
    copied = 30e6 / 16e9
    for starts, seconds in (
        ([TO_HOST.format("a")], copied),
        ([FROM_HOST.format("a")], copied),
        (["%a = (f32[7500000]{0:S(5)}, f32[7500000], u32[]) copy-start(%x)"], copied),
        ([TO_HOST.format("a"), FROM_HOST.format("b")], copied),
        ([TO_HOST.format("b"), TO_HOST.format("a")], 2 * copied),
    ):
        result = step(*starts, work("w", busy), "%d = f32[7500000] dynamic-slice-done(%a)", work("v", 0.5))
        assert result.seconds == pytest.approx(max(busy * MS, seconds) + 0.5 * MS)
        assert result.compute_seconds == pytest.approx((busy + 0.5) * MS)


@pytest.mark.parametrize(
    ("opcode", "result", "seconds"),
    [
        ("copy", "f32[7500000], f32[7500000]{0:S(1)}, u32[]", 30e6 / HBM),
        ("slice", "(f32[7500000]), f32[3000000]{0:S(1)}, s32[]", 12e6 / HBM),
    ],
)
def test_copies_into_the_core_take_the_bytes_that_are_copied(opcode, result, seconds):
    start = f"%c = ({result}) {opcode}-start(%x), slice={{[0:3000000]}}"
    assert step(start, f"%d = f32[3000000] {opcode}-done(%c)").seconds == pytest.approx(seconds)


@pytest.mark.parametrize("busy", [0.25, 2])
def test_a_collective_in_three_fusions_is_one(busy):
    """The collective starts in the first, advances beside the matmul of the second, and blocks in the third."""
    begin = "%s = f32[30000000] fusion(%x), kind=kCustom, calls=%begin"
    end = "%e = f32[30000000] fusion(%x), kind=kCustom, calls=%end"
    result = step(begin, work("w", busy, "on"), end, work("v", 0.5))
    assert uses_of(result) == [("all-gather", ("data",), 90e6, "async", 1)]
    assert result.seconds == pytest.approx(max(busy * MS, GATHER) + 0.5 * MS)
    assert not result.not_understood


def test_chains_of_fusions_on_one_channel_are_several_collectives():
    """All collectives of a shard_map share a channel: attention's gathers of keys and of values, for example."""
    fusion = "%{} = f32[30000000] fusion(%x), kind=kCustom, calls=%{}"
    names = ("begin", "begin_other", "end", "end_other")
    result = step(*(fusion.format(f"s.{i}", name) for i, name in enumerate(names)))
    assert [(use.form, use.count) for use in result.uses] == [("async", 1), ("async", 1)]
    assert result.seconds == pytest.approx(2 * GATHER)


def test_a_collective_in_one_fusion_blocks_the_core():
    result = step("%s = f32[30000000] fusion(%x), kind=kCustom, calls=%begin", work("v", 0.5))
    assert uses_of(result) == [("all-gather", ("data",), 90e6, "sync", 1)]
    assert result.seconds == pytest.approx(GATHER + 0.5 * MS)


def test_a_collective_that_advances_in_a_loop_is_one():
    """Five iterations of 0.1 ms overlap half of the collective, and none of them sends it again."""
    begin = "%s = f32[30000000] fusion(%x), kind=kCustom, calls=%begin"
    end = "%e = f32[30000000] fusion(%x), kind=kCustom, calls=%end"
    result = step(begin, LOOP, end, body=work("w", 0.1, "on").replace("%x", "%y"))
    assert uses_of(result) == [("all-gather", ("data",), 90e6, "async", 1)]
    assert result.seconds == pytest.approx(GATHER)
    assert result.compute_seconds == pytest.approx(0.5 * MS)


def test_a_loop_repeats_its_body():
    result = step(LOOP, body=gather("g").replace("%x", "%y") + "\n  " + work("w", 0.1).replace("%x", "%y"))
    assert uses_of(result) == [("all-gather", ("data",), 90e6, "sync", 5)]
    assert result.seconds == pytest.approx(5 * GATHER + 0.5 * MS)
    assert result.compute_seconds == pytest.approx(0.5 * MS)


def test_a_loop_that_does_not_run():
    result = step(LOOP.replace("constant(5)", "constant(0)"), body=gather("g").replace("%x", "%y"))
    assert (result.seconds, result.uses) == (0, [])


def test_a_loop_of_unknown_length_is_reported():
    result = step(LOOP.replace("constant(5)", "partition-id()"), body=gather("g").replace("%x", "%y"))
    assert result.seconds == pytest.approx(GATHER)
    assert list(result.not_understood) == [Omission(OmissionKind.TRIP_COUNT)]


def test_the_longest_branch_is_timed_and_the_conditional_reported():
    branches = "branch_computations={%work, %short, %long}"
    more = f"""
%short (x: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  ROOT {work("s", 0.25)}
}}

%long (x: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  ROOT {work("l", 0.75)}
}}

ENTRY %main (i: s32[], z: f32[]) -> f32[] {{
  %i = s32[] parameter(0)
  %z = f32[] parameter(1)
  ROOT %r = f32[] conditional(%i, %z, %z, %z), {branches}
}}
"""
    result = timing(COMPUTATIONS + more, "v4-8", (1, 4, 1))
    assert result.seconds == pytest.approx(0.75 * MS)
    assert dict(result.not_understood) == {Omission(OmissionKind.CONDITIONAL): 1}


def test_omissions_are_reported():
    """A kernel without cycles and a result of 30 MB takes as long as reading and writing it; a small one no time."""
    result = step(
        '%k = f32[7500000] custom-call(%x), custom_call_target="mystery"',
        '%small = f32[1000] custom-call(%x), custom_call_target="small"',
        '%free = f32[7500000] custom-call(), custom_call_target="AllocateBuffer"',
        gather("g", groups="@named"),
    )
    assert dict(result.not_understood) == {
        Omission(OmissionKind.NO_CYCLES, "custom-call mystery"): 1,
        Omission(OmissionKind.REPLICA_GROUPS, "all-gather", "@named"): 1,
    }
    assert result.seconds == pytest.approx(2 * 30e6 / HBM)


@pytest.mark.parametrize(
    ("opcode", "received", "seconds"),
    [
        ("all-gather", 90e6, 90e6 / RING + 2 * HOP),
        ("all-reduce", 45e6, 45e6 / RING + 4 * HOP),
        ("reduce-scatter", 22.5e6, 22.5e6 / RING + 2 * HOP),
        # half of the bytes cross the square horizontally, and at the same time half vertically
        ("all-to-all", 22.5e6, 15e6 / LINK + 2 * HOP),
    ],
)
def test_bytes_received_by_each_of_four(opcode, received, seconds):
    """Of an operand of 30 MB per device: three times as much, twice three quarters, three quarters."""
    result = step(f"%g = f32[30000000] {opcode}(%x), channel_id=1, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}")
    assert uses_of(result) == [(opcode, ("data",), received, "sync", 1)]
    assert result.seconds == pytest.approx(seconds)


def test_a_collective_within_slices_takes_no_network():
    """The groups are the parts of `data` within a slice, while `data` crosses two slices."""
    result = step(gather("g", groups="{{0,1,2,3},{4,5,6,7}}"), slice_name="2xv4-8", sizes=(1, 8, 1))
    assert uses_of(result) == [("all-gather", ("data",), 90e6, "sync", 1)]
    assert result.seconds == pytest.approx(GATHER)


def shift(name: str, by: int, size: int, devices: int) -> str:
    """A permute of 30 MB from every device to the one `by` indices further, cyclically in rows of `size` devices."""
    pairs = [f"{{{i},{i // size * size + (i + by) % size}}}" for i in range(devices)]
    attributes = f"channel_id=1, source_target_pairs={{{','.join(pairs)}}}"
    return f"%{name} = f32[7500000] collective-permute-start(%x), {attributes}"


@pytest.mark.parametrize(
    ("slice_name", "sizes", "both", "hops"),
    [
        # a ring of four: each permute uses one direction, and one hop
        ("v4:4x4x4", (1, 16, 4), 1, 1),
        # a square: from the end of a row to its beginning there are two hops, one of them back along the row
        ("v4-8", (1, 1, 4), 2, 2),
    ],
)
def test_permutes_in_opposite_directions(slice_name, sizes, both, hops):
    """They overlap on a ring, but not on a square; permutes in the same direction never overlap."""
    devices, done = sizes[1] * sizes[2], ["collective-permute-done(%f)", "collective-permute-done(%b)"]
    once = 30e6 / LINK + hops * HOP

    def seconds(*by: int) -> float:
        starts = [shift(name, step, sizes[2], devices) for name, step in zip("fb", by, strict=True)]
        ends = [f"%e{i} = f32[7500000] {text}" for i, text in enumerate(done)]
        return step(*starts, *ends, sizes=sizes, slice_name=slice_name).seconds

    assert seconds(1, -1) == pytest.approx(both * once)
    assert seconds(1, 1) == pytest.approx(2 * once)


def test_asynchronous_gather_of_a_real_module():
    """Each of five layers gathers w and waits, gathers v beside the matmul with w, and sums over `model`."""
    result = timing(read("async_gather"), "v4:4x4x4", (1, 16, 4))
    gathered = 15 * 2048 * 128 * 2
    summed = 2 * 3 / 4 * 4096 * 2048 * 2
    assert uses_of(result) == [
        ("all-gather", ("data",), gathered, "sync", 5),
        ("all-gather", ("data",), gathered, "async", 5),
        ("all-reduce", ("model",), summed, "sync", 5),
    ]
    cycles = 3224 + 3224 + 147594 + 147594
    assert result.compute_seconds == pytest.approx(5 * cycles / CLOCK)
    # x is copied to the memory near the core before the loop, and back after it; both copies block;
    # the 48 microseconds of the second gather overlap the 141 of the matmul
    copies = 2 * 4096 * 2048 * 2 / HBM
    # `data` has two rings of four, with two hops to the far side; `model` has one, and an all-reduce goes around twice
    sent = gathered / (2 * RING) + 4 * HOP + summed / RING + 4 * HOP
    assert result.seconds == pytest.approx(copies + 5 * (cycles / CLOCK + sent))
    assert not result.not_understood


def test_windowed_matmul_of_a_real_module():
    """Per layer one shard arrives from one side without overlap, then twice two shards from each side, overlapped."""
    result = timing(read("windowed"), "v4:2x2x4", (1, 8, 2))
    part = 64 * 1024 * 2
    permutes = [("collective-permute", ("data",), part, "windowed", 14)] * 4
    assert uses_of(result) == [("collective-permute", ("data",), part, "async", 7), *permutes]
    layer = 1255 + 2 * (611 + 16404 + 17696) + 20662
    # `data` is 2 x 4 without wraparound: the ends of a line of 4 are 4 hops apart for a shift by one
    assert result.seconds == pytest.approx((9060 + 7 * layer) / CLOCK + 7 * (part / LINK + 4 * HOP))
    assert not result.not_understood


def test_reduce_scatter_of_a_real_module():
    """In a fusion of an all-reduce and a slice of its result each device receives 15 of 16 shards, not twice that."""
    result = timing(read("reduce_scatter"), "v4:4x4x4", (1, 16, 4))
    received = 15 / 16 * 512 * 1024 * 2
    assert uses_of(result) == [("reduce-scatter", ("data",), received, "sync", 1)]
    copied = 512 * 1024 * 2 / HBM
    assert result.seconds == pytest.approx(13411 / CLOCK + copied + received / (2 * RING) + 4 * HOP)


def test_two_slices_of_a_real_module():
    """A sum goes over links within each slice, then each device exchanges its shard with the other slice by network."""
    result = timing(read("two_slices"), "2xv4:2x2x2", (2, 4, 2))
    within, across = 3 * 128 * 1024 * 2, 128 * 1024 * 2
    assert uses_of(result) == [
        ("all-gather", ("data",), within, "sync", 1),
        ("reduce-scatter", ("data",), within, "sync", 1),
        ("all-reduce", ("replica",), across, "async", 1),
    ]
    sent = 2 * (within / RING + 2 * HOP) + across / NETWORK
    assert result.seconds == pytest.approx((9815 + 1911) / CLOCK + sent)


def kernel_seconds(sequences: int, causal: float) -> float:
    """Seconds for 2 heads, 256 x 256 positions, head size 128: 2 products forward, 3 for dq, 4 for dk and dv."""
    return sequences * 2 * 2 * 256 * 256 * 128 * (2 + 3 + 4) * causal / FLOPS


@pytest.mark.parametrize("causal", [1, 0.75])
def test_attention_kernels_of_a_real_module(causal):
    result = timing(read("splash"), "v4-8", (1, 4, 1), KernelWork(attended_fraction=causal), hbm_bandwidth=1e18)
    assert result.kernel_seconds == pytest.approx(kernel_seconds(1, causal))
    cycles = 754 + 1400 + 1082 + 622 + 754 + 1082 + 1396 + 620 + 620 + 608
    assert result.seconds == pytest.approx(kernel_seconds(1, causal) + cycles / CLOCK)
    assert not result.not_understood


def test_attention_kernels_of_several_sequences():
    """With more than one sequence per device q, k and v have a batch dimension."""
    result = timing(read("splash_batch"), "v4-8", (1, 4, 1), hbm_bandwidth=1e18)
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
    result = timing(read("ragged_dot"), "v5p-8", (1, 4, 1))
    hardware = parse_slice("v5p-8").generation
    rows = (4096 / 128 + 4 - 1) * 128
    assert result.kernel_seconds == pytest.approx(2 * 2 * rows * 1024 * (2 * 1280) / hardware.flops)
    dense = 4 * 2 * 4096 * 1024 * 2048 / hardware.flops
    assert result.seconds - result.kernel_seconds > result.masked_dense_seconds > dense
    assert not result.not_understood


def test_gradients_of_a_real_grouped_matmul_of_megablox():
    """All three matmuls are kernels; what finds their tiles has two scatters on the sparse cores, which are named."""
    result = timing(read("megablox"), "v5p-8", (1, 4, 1))
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
    text = read("ragged_dot")
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


def test_a_real_exchange_of_ragged_rows():
    """Each of 4 devices receives three quarters of its 1024 rows of 1024 bfloat16 numbers."""
    [use] = timing(read("ragged_all_to_all"), "v5p-8", (1, 4, 1)).uses
    assert (use.transfer.kind, use.transfer.mesh_axes) == ("ragged-all-to-all", ("data",))
    assert use.transfer.bytes == 3 / 4 * 1024 * 1024 * 2


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


def test_time_is_attributed_to_operations():
    """An instruction without an operation is attributed to that of the loop or call around it."""
    named = work("w", 1) + ', metadata={op_name="jit(f)/while/body/closed_call/Mlp/dot_general"}'
    result = step(named, LOOP + ', metadata={op_name="jit(f)/scan"}', body=work("v", 0.5).replace("%x", "%y"))
    assert result.op_seconds == {"Mlp/dot_general": pytest.approx(1 * MS), "scan": pytest.approx(2.5 * MS)}


GIB = 2**30


def test_live_values_at_the_peak():
    """The index of a value in a tuple is in braces; the text below the list is ignored."""
    assert parse_live_at_peak(read("too_large.live-range")) == [
        ("fusion.2", (1,), 16 * GIB),
        ("param.1", (), 16 * GIB),
        ("param.2", (), 16 * GIB),
        ("fusion", (), 4 * GIB),
        ("param", (), 4 * GIB),
        ("all-reduce", (), 4),
    ]


def test_live_ranges_of_other_reports():
    assert parse_live_at_peak("HloLiveRange (max 9):\n  InstructionSequence:\n    0:param\n") == []
    assert parse_live_at_peak("  Live ranges at 7 (peak):\n    a{1,0}: 12 bytes (cumulative: 12 bytes)") == [
        ("a", (1, 0), 12)
    ]


def test_buffers_of_a_program_that_does_not_fit():
    """An argument is named by its path in the program, without the index of the array in a NamedArray."""
    buffers = hbm_buffers(parse(read("too_large")), read("too_large.live-range"), read("too_large.usage"))
    assert buffers == [
        Buffer(16 * GIB, "f32[32768,131072]", "dot_general"),
        Buffer(16 * GIB, "f32[32768,131072]", "arguments[1]"),
        Buffer(16 * GIB, "f32[131072,32768]", "arguments[2]"),
        Buffer(4 * GIB, "f32[32768,32768]", "dot_general"),
        Buffer(4 * GIB, "f32[32768,32768]", "arguments"),
        Buffer(4, "f32[]", "reduce_sum"),
    ]


def test_buffers_outside_of_hbm_are_left_out():
    """Space 3 of v4 is not HBM; a name that is not in the module is listed without a shape."""
    ranges = """  Live ranges at 3 (peak):
    fusion.17{}: 16777216 bytes (cumulative: 16777216 bytes)
    gone{}: 5 bytes (cumulative: 16777221 bytes)
    copy-start{0}: 16777216 bytes (cumulative: 33554437 bytes)
    copy-start.1{0}: 16777216 bytes (cumulative: 50331653 bytes)
    while.9{2}: 2621440 bytes (cumulative: 52953093 bytes)
"""
    buffers = hbm_buffers(parse(read("async_gather")), ranges, "")
    assert [(buffer.bytes, buffer.shape) for buffer in buffers] == [
        (16 * MIB, "bf16[4096,2048]"),
        (5 * MIB // 2, "bf16[5,128,2048]"),
        (5, "?"),
    ]


def test_arrays_of_the_host_are_left_out_whatever_their_names():
    """The stack of all layers' inputs of Llama 3.1 70B on v6e-64, of 20 GiB, has a name that no instruction has."""
    ranges = """  Live ranges at 658 (peak):
    dynamic-update-slice.127{}: 21474836480 bytes (cumulative: 21474836480 bytes)
    bitcast_dynamic-update-slice_fusion.21{}: 2147483648 bytes (cumulative: 23622320128 bytes)
"""
    usage = """Memory Space: cmem (color=5)
Total bytes: 21474836480 (20.00GiB)
   20.00GiB(100%);   20.00GiB;            0;                6; 6\u00d7bf16[80,2,8192,8192]

Memory Space: color_6 (color=6)
   2.00GiB(100%);   2.00GiB;            0;                6; bf16[8192,131072]
"""
    buffers = hbm_buffers(parse(read("async_gather")), ranges, usage)
    assert [buffer.bytes for buffer in buffers] == [2 * GIB]


def test_live_bytes_over_the_program():
    """The arguments throughout, the two results of the first fusion, and the last one, written over one of these."""
    module, report = parse(read("too_large")), read("too_large.live-range")
    points = live_bytes(module, report)
    assert [round(point.bytes / GIB) for point in points] == [36, 52, 52, 40]
    assert max(point.bytes for point in points) == 52 * GIB + 4
    assert live_bytes(module, "") == []


def test_long_programs_keep_the_peak():
    lines = [f"    param{{}}:{i}-{i + 1}" for i in range(1000)] + ["    fusion{}:500-501"]
    points = live_bytes(parse(read("too_large")), "BufferLiveRange:\n" + "\n".join(lines))
    assert MAX_POINTS // 2 < len(points) <= MAX_POINTS and max(p.bytes for p in points) > min(p.bytes for p in points)


def test_bytes_of_a_program_that_does_not_fit():
    """Three arrays of 16 GiB, two of 4 GiB, and nine blocks of 512 bytes; other memories are not counted."""
    assert hbm_bytes(read("too_large.usage")) == 56 * GIB + 9 * 512


def test_a_usage_report_without_hbm():
    assert hbm_bytes("Memory Space: hbm (color=3)\nTotal bytes: 7 (7B)\n") == 0


def test_an_unknown_type_is_reported_and_the_rest_is_timed():
    result = step(
        "%q = f4e9[4096,4096] all-gather(%x), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}",
        "%r = f32[30000000] all-gather(%q), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}",
        "%s = f32[30000000] all-gather(%x), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}",
    )
    error = Omission(OmissionKind.INSTRUCTION, "all-gather", "unknown element type 'f4e9'")
    assert dict(result.not_understood) == {error: 1}
    assert [use.transfer.bytes for use in result.uses] == [90e6, 90e6]
