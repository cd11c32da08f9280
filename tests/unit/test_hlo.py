"""The parser of compiled modules reads real modules (from scripts/make_hlo_fixtures.py) and small hand-written ones."""

import pytest
from hlo_modules import read_module

from shardplan.verify.hlo.module import ArrayShape, HloError
from shardplan.verify.hlo.parser import parse


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
    module = read_module(name)
    assert (len(module.computations), module.entry.name) == (computations, entry)
    assert len(module.entry.instructions) == instructions


def test_fields_of_real_instructions():
    module = read_module("async_gather")
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
    kernel = read_module("splash").instructions["splash_mha_dq_no_residuals.1"]
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
    module = read_module("reduce_scatter")
    [fusion] = [i for i in module.entry.instructions.values() if i.called == ("all-reduce-scatter",)]
    inside = [instruction.opcode for instruction in module.inside(fusion)]
    assert "all-reduce" in inside
    assert "add" not in inside  # the reducer runs per element
    [product] = [i for i in module.entry.instructions.values() if i.called == ("fused_computation.1",)]
    # one in the fusion, and one in a nested fusion
    assert [instruction.opcode for instruction in module.inside(product)].count("convolution") == 2


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


def test_unknown_type_has_no_size(raises_message):
    """An array of an unknown type is parsed; only its size raises."""
    [array] = parse_one("%a = f5[2]{0} opcode()").arrays
    with raises_message(HloError):
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
