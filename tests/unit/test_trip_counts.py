"""How often the loops of compiled modules run: as often as a loop in Python, or unknown."""

import pytest
from hlo_modules import read_module
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.verify.hlo import trip_counts
from shardplan.verify.hlo.parser import parse
from shardplan.verify.hlo.trip_counts import SymbolicInt, evaluate_integer, trip_count


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
    module, counts = read_module(name), {}

    def visit(computation, parameters):
        for instruction in computation.instructions.values():
            if instruction.opcode == "while":
                counts[instruction.name], inside = trip_count(module, computation, instruction, parameters)
                visit(module.computations[instruction.attributes["body"].removeprefix("%")], inside)

    visit(module.entry, [])
    assert counts == trips


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
