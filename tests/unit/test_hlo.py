"""The parser of compiled modules reads real modules (from scripts/make_hlo_fixtures.py) and small hand-written ones."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.verify.hlo import trip_counts
from shardplan.verify.hlo.module import ArrayShape, HloError, Module
from shardplan.verify.hlo.parser import parse
from shardplan.verify.hlo.replica_groups import parse_replica_groups, parse_source_target_pairs
from shardplan.verify.hlo.trip_counts import SymbolicInt, evaluate_integer, trip_count

FIXTURES = Path(__file__).parent / "hlo"


def read(name: str) -> Module:
    return parse((FIXTURES / f"{name}.txt").read_text(encoding="utf-8"))


def parse_one(line: str):
    """The only instruction of a module."""
    return parse(f"ENTRY %main () -> f32[] {{\n  ROOT {line}\n}}").entry.root


@pytest.mark.parametrize(
    ("name", "computations", "entry", "instructions"),
    [
        ("async_gather", 14, "main.3_spmd", 13),
        ("windowed", 13, "main.3_spmd", 18),
        ("reduce_scatter", 8, "main.0_spmd", 6),
        ("two_slices", 7, "main.0_spmd", 16),
        ("splash", 3, "main.4_spmd", 52),
        ("splash_batch", 5, "main.4_spmd", 40),
        ("groups", 3, "main.0_spmd", 9),
        ("ragged_dot", 11, "main.0_spmd", 40),
        ("ragged_all_to_all", 2, "main.0_spmd", 13),
        ("too_large", 9, "main.0_spmd", 9),
    ],
)
def test_real_modules_are_read_completely(name, computations, entry, instructions):
    """The numbers were counted with grep: time and memory of a lost computation or instruction would be missing."""
    module = read(name)
    assert (len(module.computations), module.entry.name) == (computations, entry)
    assert len(module.entry.instructions) == instructions


@pytest.mark.parametrize(
    ("name", "trips"),
    [
        ("async_gather", {"while.9": 5}),
        # 7 layers; each iteration of the inner loop receives two of eight shards from either side
        ("windowed", {"while.13": 7, "while.14": 2}),
    ],
)
def test_trip_counts_of_real_loops(name, trips):
    """Trip counts include those of an inner loop whose start comes from the outer loop's tuple."""
    module, counts = read(name), {}

    def visit(computation, parameters):
        for instruction in computation.instructions.values():
            if instruction.opcode == "while":
                counts[instruction.name], inside = trip_count(module, computation, instruction, parameters)
                visit(module.computations[instruction.attributes["body"].removeprefix("%")], inside)

    visit(module.entry, [])
    assert counts == trips


def test_fields_of_real_instructions():
    module = read("async_gather")
    gather = module.instructions["all-gather.22"]
    assert (gather.opcode, gather.operands) == ("all-gather", ("constant_dynamic-slice_fusion.4",))
    assert gather.collective_id.split() == ["4"]
    assert gather.arrays == (ArrayShape("bf16", (1, 2048, 2048), space=3),)
    assert gather.op_name == "jit(mlp)/while/body/closed_call/dot_general"
    assert gather.cycles is None
    product = module.instructions["fusion.19"]
    assert product.cycles == 147594
    # /*index=5*/ and the {} inside of output_to_operand_aliasing are neither operands nor attributes
    assert len(product.operands) == len(product.arrays) == 11
    assert product.called == ("async_collective_fusion.19",)
    assert sorted(product.attributes) == [
        "backend_config", "calls", "kind", "metadata", "output_to_operand_aliasing",
    ]  # fmt: skip


def test_attributes_on_several_lines():
    """A kernel's metadata are quoted JSON on several lines, none of which starts like an instruction."""
    kernel = read("splash").instructions["splash_mha_dq_no_residuals.1"]
    assert kernel.op_name.endswith("/pallas_call")
    assert kernel.attributes["custom_call_target"] == '"tpu_custom_call"'
    assert '\\"block_kv_dq\\": 128' in kernel.attributes["frontend_attributes"]
    assert [array.dims for array in kernel.arrays] == [(128, 128), (2, 256, 128)]
    assert len(kernel.operands) == 9


def test_a_computation_ends_after_its_last_instruction():
    """An attribute on several lines may have one that begins like the end of a computation on another thread."""
    module = parse(
        """
%on_another_thread (a: f32[]) -> f32[] {
  ROOT %a = f32[] parameter(0)
}, execution_thread="sparsecore"

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %kernel = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"cost_estimate": {"flops": 1
}, "name": "gmm"}}, metadata={op_name="jit(f)/gmm"}
  ROOT %last = f32[8] negate(%kernel)
}
"""
    )
    assert [*module.computations] == ["on_another_thread", "main"]
    assert [*module.entry.instructions] == ["x", "kernel", "last"]
    assert module.entry.instructions["kernel"].op_name == "jit(f)/gmm"


def test_instructions_inside_of_an_instruction():
    module = read("reduce_scatter")
    [fusion] = [i for i in module.entry.instructions.values() if i.called == ("all-reduce-scatter",)]
    inside = [instruction.opcode for instruction in module.inside(fusion)]
    assert "all-reduce" in inside
    assert "add" not in inside  # the reducer runs per element
    [product] = [i for i in module.entry.instructions.values() if i.called == ("fused_computation.1",)]
    # one in the fusion, and one in a nested fusion
    assert [instruction.opcode for instruction in module.inside(product)].count("convolution") == 2


@pytest.mark.parametrize(
    ("name", "instruction", "first", "count"),
    [
        # [4,16]<=[16,4]T(1,0)
        ("async_gather", "all-gather.22", tuple(range(0, 64, 4)), 4),
        # [16,4]<=[64]
        ("async_gather", "all-reduce.2", (0, 1, 2, 3), 16),
        # {{0,4,8, ...}, ...}
        ("reduce_scatter", "all-reduce.1", tuple(range(0, 64, 4)), 4),
        # mesh['axis_0'=4,'axis_1'=1,'axis_2'=4], device_ids=([2,2,4]T(1,0,2)) {'axis_0'}
        ("groups", "all-gather", (0, 8, 4, 12), 4),
        # mesh['axis_0'=2,'axis_1'=1,'axis_2'=8] {'axis_0'}
        ("groups", "all-gather.1", (0, 8), 8),
        # mesh['axis_0'=4,'axis_1'=1] {'axis_0','axis_1'}
        ("too_large", "all-reduce", (0, 1, 2, 3), 1),
        # {{0,2,4,6},{1,3,5,7}}: the 8 partitions of one of two slices
        ("two_slices", "all-gather.2", (0, 2, 4, 6), 2),
    ],
)
def test_replica_groups_of_real_collectives(name, instruction, first, count):
    """Every notation of the compiler is read; `device_ids` after a comma is a part of the groups."""
    groups = parse_replica_groups(read(name).instructions[instruction].attributes["replica_groups"], 64)
    assert groups is not None
    assert groups[0] == first and len(groups) == count
    assert sorted(member for group in groups for member in group) == list(range(len(first) * count))


@st.composite
def grids(draw):
    dims = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return dims, draw(st.permutations(range(len(dims))))


@given(grids(), st.data())
def test_groups_from_iota_agree_with_numpy(grid, data):
    dims, order = grid
    n = math.prod(dims)
    size = data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
    text = f"[{n // size},{size}]<=[{','.join(map(str, dims))}]T({','.join(map(str, order))})"
    expected = np.arange(n).reshape(dims).transpose(order).reshape(-1, size)
    assert parse_replica_groups(text, n) == [tuple(row) for row in expected.tolist()]


@given(grids(), grids(), st.data())
def test_groups_from_a_mesh_agree_with_numpy(grid, tile, data):
    """A group extends along the chosen axes, in the order in which they are named."""
    sizes, chosen = grid
    chosen = chosen[: data.draw(st.integers(1, len(sizes)))]
    n = math.prod(sizes)
    devices = np.arange(n)
    declared = ",".join(f"'axis_{i}'={size}" for i, size in enumerate(sizes))
    text = f"mesh[{declared}]"
    if data.draw(st.booleans()):
        dims, order = tile if math.prod(tile[0]) == n else (list(sizes), list(reversed(range(len(sizes)))))
        devices = devices.reshape(dims).transpose(order).reshape(-1)
        text += f", device_ids=([{','.join(map(str, dims))}]T({','.join(map(str, order))}))"
    text += " {" + ",".join(f"'axis_{i}'" for i in chosen) + "}"
    others = [i for i in range(len(sizes)) if i not in chosen]
    expected = devices.reshape(sizes).transpose([*others, *chosen]).reshape(-1, math.prod(sizes[i] for i in chosen))
    assert parse_replica_groups(text, n) == [tuple(row) for row in expected.tolist()]


def test_other_groups():
    assert parse_replica_groups("{}", 3) == parse_replica_groups("", 3) == [(0, 1, 2)]
    assert parse_replica_groups("{{0,2},{1}}", 3) == [(0, 2), (1,)]
    # a part of an axis is reported as not understood, instead of read wrongly
    assert parse_replica_groups("mesh['a'=4] {'a':(1)2}", 4) is None
    assert parse_replica_groups("@mesh", 4) is None


def test_source_target_pairs():
    assert parse_source_target_pairs("{{0,14},{2,0}}") == [(0, 14), (2, 0)]


@pytest.mark.parametrize(
    ("shape", "arrays"),
    [
        ("f32[]", [("f32", (), 0)]),
        ("bf16[2,3]{1,0:T(8,128)(2,1)S(3)}", [("bf16", (2, 3), 3)]),
        ("(s32[]{:T(128)S(6)}, (pred[7], u8[1,2]{1,0}), /*index=5*/token[])", [
            ("s32", (), 6), ("pred", (7,), 0), ("u8", (1, 2), 0), ("token", (), 0),
        ]),
        ("f32[<=16,4]{1,0}", [("f32", (16, 4), 0)]),
        ("()", []),
    ],
)  # fmt: skip
def test_shapes(shape, arrays):
    instruction = parse_one(f"%a = {shape} opcode()")
    assert [(array.dtype, array.dims, array.space) for array in instruction.arrays] == arrays
    assert instruction.opcode == "opcode"


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("pred", 1), ("s4", 0.5), ("u2", 0.25), ("s8", 1), ("f8e4m3b11fnuz", 1), ("bf16", 2), ("f16", 2), ("u32", 4),
     ("f32", 4), ("s64", 8), ("c64", 8), ("c128", 16), ("token", 0)],
)  # fmt: skip
def test_bytes(dtype, size):
    assert ArrayShape(dtype, (3, 8)).bytes == 24 * size


def test_unknown_type_has_no_size():
    """An array of an unknown type is parsed; only its size raises."""
    [array] = parse_one("%a = f5[2]{0} opcode()").arrays
    with pytest.raises(HloError, match="unknown element type 'f5'"):
        _ = array.bytes


def test_unknown_opcodes_and_attributes():
    instruction = parse_one(
        '%a.1 = f32[2] frobnicate-start(f32[2]{0} %b, c), knob={x={1,2}, y="}"}, on, metadata={op_name="o"}'
    )
    assert instruction.opcode == "frobnicate-start"
    assert instruction.operands == ("b", "c")  # with and without the shape before the name
    assert instruction.attributes["knob"] == '{x={1,2}, y="}"}'
    assert instruction.attributes["on"] == ""
    assert instruction.op_name == "o"


def test_brackets_in_quotes_and_escaped_quotes():
    instruction = parse_one('%a = f32[] custom-call(%b), target="a\\"),{(", metadata={op_name="f[g]/(h"}, channel_id=7')
    assert instruction.operands == ("b",)
    assert (instruction.op_name, instruction.attributes["channel_id"]) == ("f[g]/(h", "7")


def test_the_root_need_not_be_last():
    module = parse("ENTRY %m () -> s32[] {\n  ROOT %a = s32[] constant(1)\n  %b = s32[] constant(2)\n}")
    assert module.entry.root.name == "a" and list(module.entry.instructions) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no entry computation"),
        ("HloModule m\n", "no entry computation"),
        ("%m () -> f32[] {\n  ROOT %a = f32[] x()\n}", "no entry computation"),
        ("ENTRY %m () -> f32[] {\n  ROOT %a = f32[] x()", "no entry computation"),  # truncated
        ("ENTRY %m () -> f32[] {\n  %a = f32[] x()\n}", "computation m has 0 roots"),
        ("ENTRY %m () -> f32[] {\n  ROOT %a = f32[] x()\n  ROOT %b = f32[] x()\n}", "computation m has 2 roots"),
        ("ENTRY %m () -> f32[] {\n  something\n}", "not an instruction: something"),
        ("ENTRY %m () -> f32[] {\n  ROOT %a = f32[]\n}", "not an instruction: %a = f32[]"),
        ("ENTRY %m () -> f32[] {\n  ROOT %a = f32[] x(%b\n}", "unbalanced brackets"),
        ("ENTRY %m () -> f32[] {\n  ROOT %a = (f32[], f32[] x(%b\n}", "unbalanced brackets"),
    ],
)
def test_malformed_text(text, message):
    with pytest.raises(HloError) as error:
        parse(text)
    assert message in str(error.value)


@pytest.mark.parametrize("line", ["%a = f32[x] y()", "%a = f32[?,2] y()", "%a = f32[] y(), device_ids=([2])"])
def test_malformed_shapes_and_attributes(line):
    with pytest.raises(HloError):
        parse_one(line)


def loop(start: str, limit: str, direction: str, step: str, swapped: bool = False) -> str:
    """A loop with its variable in slot 0 and its limit in slot 1."""
    compared = "%n, %i" if swapped else "%i, %n"
    return f"""
%body (p: (s32[], s32[])) -> (s32[], s32[]) {{
  %p = (s32[], s32[]) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %k = s32[] constant({step})
  %next = s32[] add(%i, %k)
  ROOT %t = (s32[], s32[]) tuple(%next, %n)
}}

%condition (p.1: (s32[], s32[])) -> pred[] {{
  %p.1 = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p.1), index=0
  %n = s32[] get-tuple-element(%p.1), index=1
  ROOT %c = pred[] compare({compared}), direction={direction}
}}

ENTRY %main (argument: s32[]) -> (s32[], s32[]) {{
  %argument = s32[] parameter(0)
  %start = s32[] {start}
  %limit = s32[] {limit}
  %copy = s32[]{{:T(128)}} copy(%limit)
  %tuple = (s32[], s32[]) tuple(%start, %copy)
  ROOT %while = (s32[], s32[]) while(%tuple), condition=%condition, body=%body
}}
"""


def trips(text: str) -> int | None:
    module = parse(text)
    return trip_count(module, module.entry, module.entry.root, [])[0]


def run(start: int, limit: int, direction: str, step: int) -> int | None:
    """Run the loop, and return its number of iterations; None if it does not end."""
    continues = {
        "LT": lambda i: i < limit,
        "LE": lambda i: i <= limit,
        "GT": lambda i: i > limit,
        "GE": lambda i: i >= limit,
        "NE": lambda i: i != limit,
    }[direction]
    count = 0
    while continues(start + count * step):
        count += 1
        if count > 100:
            return None
    return count


@pytest.mark.parametrize(
    ("start", "limit", "direction", "step", "count"),
    [
        (0, 7, "LT", 1, 7),
        (0, 7, "LE", 1, 8),
        (7, 0, "GT", -1, 7),
        (7, 0, "GE", -1, 8),
        (3, 9, "NE", 2, 3),
        (0, 7, "LT", 3, 3),  # 0, 3, 6
        (0, 6, "LE", 3, 3),  # 0, 3, 6
        (5, 5, "LT", 1, 0),
        (6, 5, "LE", 1, 0),
        (4, 4, "NE", 1, 0),
        (0, 7, "NE", 2, None),  # the variable never equals the limit
        (0, 7, "LT", -1, None),  # infinite
        (0, 7, "LT", 0, None),
    ],
)
def test_trip_counts(start, limit, direction, step, count):
    assert trips(loop(f"constant({start})", f"constant({limit})", direction, str(step))) == count


@settings(max_examples=200)
@given(
    st.integers(-9, 9), st.integers(-9, 9), st.sampled_from(["LT", "LE", "GT", "GE", "NE"]), st.integers(-4, 4),
    st.booleans(),
)  # fmt: skip
def test_trip_counts_agree_with_running_the_loop(start, limit, direction, step, swapped):
    """Every known trip count is right; that of a loop with step 0 may be unknown, even if it has no iteration."""
    mirrored = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}[direction] if swapped else direction
    count = trips(loop(f"constant({start})", f"constant({limit})", mirrored, str(step), swapped))
    assert count == run(start, limit, direction, step) or (count is None and step == 0)


@pytest.mark.parametrize(
    ("start", "limit"),
    [
        ("constant(0)", "custom-call(%argument), custom_call_target=\"f\""),
        ("custom-call(%argument), custom_call_target=\"f\"", "constant(7)"),
        ("constant(0)", "copy(%argument)"),
        ("constant(0)", "constant({...})"),
    ],
)  # fmt: skip
def test_loops_of_unknown_length(start, limit):
    assert trips(loop(start, limit, "LT", "1")) is None


def test_a_limit_that_the_body_changes():
    text = loop("constant(0)", "constant(7)", "LT", "1").replace("tuple(%next, %n)", "tuple(%next, %k)")
    assert trips(text) is None


def test_a_variable_that_doubles():
    text = loop("constant(1)", "constant(7)", "LT", "2").replace("add(%i, %k)", "multiply(%i, %k)")
    assert trips(text) is None


def test_a_condition_in_a_fusion_that_looks_ahead():
    """i + 1 < 7, with the limit and the variable as parameters of the fusion, in the other order."""
    text = loop("constant(0)", "constant(7)", "LT", "1").replace(
        "ROOT %c = pred[] compare(%i, %n), direction=LT",
        "ROOT %c = pred[] fusion(%n, %i), kind=kLoop, calls=%compared",
    )
    fused = """
%compared (limit: s32[], variable: s32[]) -> pred[] {
  %limit = s32[] parameter(0)
  %variable = s32[] parameter(1)
  %one = s32[] constant(1)
  %ahead = s32[] add(%variable, %one)
  ROOT %less = pred[] compare(%ahead, %limit), direction=LT
}
"""
    assert trips(fused + text) == 6


def test_an_inner_loop_that_starts_at_the_outer_variable():
    """The trip count of such a loop differs between iterations of the outer one, so it is unknown."""
    inner = loop("constant(0)", "constant(7)", "LT", "1")
    inner = inner[: inner.index("ENTRY")]
    text = f"""{inner}
%outer_body (o: (s32[], s32[])) -> (s32[], s32[]) {{
  %o = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%o), index=0
  %m = s32[] get-tuple-element(%o), index=1
  %from_variable = (s32[], s32[]) tuple(%j, %m)
  %triangle = (s32[], s32[]) while(%from_variable), condition=%condition, body=%body
  %zero = s32[] constant(2)
  %from_constant = (s32[], s32[]) tuple(%zero, %m)
  %square = (s32[], s32[]) while(%from_constant), condition=%condition, body=%body
  %one = s32[] constant(1)
  %after = s32[] add(%j, %one)
  ROOT %u = (s32[], s32[]) tuple(%after, %m)
}}

ENTRY %main () -> (s32[], s32[]) {{
  %start = s32[] constant(0)
  %limit = s32[] constant(7)
  %tuple = (s32[], s32[]) tuple(%start, %limit)
  ROOT %while = (s32[], s32[]) while(%tuple), condition=%condition, body=%outer_body
}}
"""
    module = parse(text)
    count, inside = trip_count(module, module.entry, module.entry.root, [])
    assert count == 7
    body = module.computations["outer_body"]
    counts = {name: trip_count(module, body, body.instructions[name], inside)[0] for name in ("triangle", "square")}
    assert counts == {"triangle": None, "square": 5}


def test_values_through_fusions():
    """2 * 3 - 1 is evaluated with its product in a fusion; a value that is no integer is unknown."""
    text = """
%fused (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %product = s32[] multiply(%a, %b)
}

ENTRY %main () -> s32[] {
  %two = s32[] constant(2)
  %three = s32[] constant(3)
  %six = s32[] fusion(%two, %three), kind=kLoop, calls=%fused
  %one = s32[] constant(1)
  %float = f32[] constant(1.5)
  ROOT %five = s32[] subtract(%six, %one)
}
"""
    module = parse(text)
    assert evaluate_integer(module, module.entry, "five", []) == SymbolicInt(None, 5)
    assert evaluate_integer(module, module.entry, "float", []) is None


def test_long_chains_are_evaluated_once(monkeypatch):
    """Each of 12 fusions uses the previous one twice, like residual connections; a real loop body has hundreds."""
    lines = [f"  %f{i} = f32[8] fusion(%f{i - 1}, %f{i - 1}), calls=%c" for i in range(1, 13)]
    text = "\n".join(
        [
            "%c (a: f32[8], b: f32[8]) -> f32[8] {",
            "  %a = f32[8] parameter(0)",
            "  %b = f32[8] parameter(1)",
            "  ROOT %r = f32[8] maximum(%a, %b)",
            "}",
            "ENTRY %main (f: f32[8]) -> f32[8] {",
            "  %f0 = f32[8] parameter(0)",
            *lines,
            "  ROOT %s = f32[8] negate(%f12)",
            "}",
        ]
    )
    module, calls = parse(text), []
    monkeypatch.setattr(trip_counts, "evaluate_integer", lambda *args: calls.append(args[2]) or evaluate_integer(*args))
    trip_counts.evaluate_integer(module, module.entry, "f12", [])
    assert len(calls) < 200
