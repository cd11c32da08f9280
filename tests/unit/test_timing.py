"""Collectives, copies, loops and fusions of hand-written modules take as long as calculations by hand say."""

import pytest
from hlo_steps import COMPUTATIONS, GATHER, HBM, HOP, LINK, LOOP, MS, RING, gather, step, timing, uses_of, work

from shardplan.verify.verdict import Omission, OmissionKind


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


def test_time_is_attributed_to_operations():
    """An instruction without an operation is attributed to that of the loop or call around it."""
    named = work("w", 1) + ', metadata={op_name="jit(f)/while/body/closed_call/Mlp/dot_general"}'
    result = step(named, LOOP + ', metadata={op_name="jit(f)/scan"}', body=work("v", 0.5).replace("%x", "%y"))
    assert result.op_seconds == {"Mlp/dot_general": pytest.approx(1 * MS), "scan": pytest.approx(2.5 * MS)}


def test_an_unknown_type_is_reported_and_the_rest_is_timed():
    result = step(
        "%q = f4e9[4096,4096] all-gather(%x), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}",
        "%r = f32[30000000] all-gather(%q), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}",
        "%s = f32[30000000] all-gather(%x), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}",
    )
    error = Omission(OmissionKind.INSTRUCTION, "all-gather", "unknown element type 'f4e9'")
    assert dict(result.not_understood) == {error: 1}
    assert [use.transfer.bytes for use in result.uses] == [90e6, 90e6]
