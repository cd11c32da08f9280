"""The buffers of a program at its peak, and its bytes over time, from the reports of the compiler."""

from hlo_modules import read_text

from shardplan.verify.hlo.parser import parse
from shardplan.verify.hlo.peak_buffers import MAX_POINTS, hbm_buffers, hbm_bytes, live_bytes, parse_live_at_peak
from shardplan.verify.verdict import Buffer

GIB, MIB = 2**30, 2**20


def test_live_values_at_the_peak():
    """The index of a value in a tuple is in braces; the text below the list is ignored."""
    assert parse_live_at_peak(read_text("too_large.live-range")) == [
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
    buffers = hbm_buffers(
        parse(read_text("too_large")), read_text("too_large.live-range"), read_text("too_large.usage")
    )
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
    buffers = hbm_buffers(parse(read_text("async_gather")), ranges, "")
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
    buffers = hbm_buffers(parse(read_text("async_gather")), ranges, usage)
    assert [buffer.bytes for buffer in buffers] == [2 * GIB]


def test_live_bytes_over_the_program():
    """The arguments throughout, the two results of the first fusion, and the last one, written over one of these."""
    module, report = parse(read_text("too_large")), read_text("too_large.live-range")
    points = live_bytes(module, report)
    assert [round(point.bytes / GIB) for point in points] == [36, 52, 52, 40]
    assert max(point.bytes for point in points) == 52 * GIB + 4
    assert live_bytes(module, "") == []


def test_long_programs_keep_the_peak():
    lines = [f"    param{{}}:{i}-{i + 1}" for i in range(1000)] + ["    fusion{}:500-501"]
    points = live_bytes(parse(read_text("too_large")), "BufferLiveRange:\n" + "\n".join(lines))
    assert MAX_POINTS // 2 < len(points) <= MAX_POINTS and max(p.bytes for p in points) > min(p.bytes for p in points)


def test_bytes_of_a_program_that_does_not_fit():
    """Three arrays of 16 GiB, two of 4 GiB, and nine blocks of 512 bytes; other memories are not counted."""
    assert hbm_bytes(read_text("too_large.usage")) == 56 * GIB + 9 * 512


def test_a_usage_report_without_hbm():
    assert hbm_bytes("Memory Space: hbm (color=3)\nTotal bytes: 7 (7B)\n") == 0
