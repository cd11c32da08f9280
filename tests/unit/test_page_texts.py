"""Labels, units, ticks and messages of pages, and groups of parameters."""

import pytest

from shardplan.plan.file.parameters import ParameterPlan
from shardplan.report.page.labels import (
    distinct_labels,
    join_with_counts,
    repeated_runs,
    short_cause,
    short_label,
)
from shardplan.report.page.units import LogAxis, gib_text, linear_ticks, rate_text, seconds_text
from shardplan.report.plan.parameter_groups import group_parameters
from shardplan.report.templating import ended, prose


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("run `a --b x`, then `c`.", "run <code>a --b x</code>, then <code>c</code>."),
        ("`<a>` & 'b'", "<code>&lt;a&gt;</code> &amp; &#39;b&#39;"),
        ("one ` alone", "one ` alone"),
    ],
)
def test_code_in_messages(text, html):
    assert prose(text) == html


@pytest.mark.parametrize(
    ("text", "html"), [("did you mean 'x'?", "did you mean &#39;x&#39;?"), ("use 4", "use 4."), ("done.", "done.")]
)
def test_messages_end_in_one_mark(text, html):
    assert ended(text) == html


def test_groups_of_parameters():
    """Only what is equal in all that is shown: several numbers make a group if all their combinations are there."""

    def parameter(path, size=8, dtype="bfloat16"):
        return ParameterPlan(path, {"embed": size}, dtype, [None], 2 * size)

    paths = [f"a[{i}].b[{j}].w" for i in range(3) for j in range(2) if (i, j) != (2, 1)]
    others = [parameter("a[3].b[0].w", 4), parameter("a[5].b[0].w"), parameter("c[7].w"), parameter("w")]
    groups = group_parameters([*map(parameter, paths), *others])
    expected = {"a[0-1].b[0-1].w": 4, "a[2,5].b[0].w": 2, "a[3].b[0].w": 1, "c[7].w": 1, "w": 1}
    assert {group.path: len(group.parameters) for group in groups} == expected
    assert [group.path for group in groups] == list(expected)


def test_labels():
    assert short_label("transformer.layers.stacked.mlp.gate_proj.weight") == "mlp.gate_proj"
    assert short_label("segments[0].stacked.layers[1].mlp.gate_proj.weight") == "mlp.gate_proj"
    assert (
        short_label("Model/scan(layer)/Attention/contract head_size -> batch/0 1") == "Attention (contract head_size)"
    )
    backward = "transpose(jvp(Model))/scan(layer)/Mlp/Linear/contract embed -> batch, mlp/0 1 , 2 1 -> 0 2"
    assert short_label(backward) == "Mlp (contract embed)"
    assert short_cause(f"gradient of {backward}") == "gradient of Mlp (contract embed)"
    assert short_label("Model/Linear/0 1 2 , 3 2 -> 0 1 3") == "Model"
    assert distinct_labels(["a.stacked.b.weight", "c.stacked.b.weight", "d.weight"]) == [
        "a.stacked.b.weight",
        "c.stacked.b.weight",
        "d",
    ]
    assert short_cause("weights of a.stacked.b.weight") == "weights of b"
    assert short_cause("replicated for Model/scan(layer)/permute") == "replicated for permute"
    assert join_with_counts(["a", "b", "a"]) == "a (2); b"
    assert repeated_runs([1, 1, 32, 32, 32, 1, 4]) == [(2, 4, 32), (6, 6, 4)]


def test_units_and_ticks():
    assert (gib_text(3 * 2**30), gib_text(5 * 2**20), gib_text(512)) == ("3.00 GiB", "5.0 MiB", "0.5 KiB")
    assert (seconds_text(2.345), seconds_text(0.0012), seconds_text(0)) == ("2.35 s", "1.2 ms", "0 s")
    assert [seconds_text(seconds) for seconds in (0.9996, 0.9994, 999.6)] == ["1 s", "999 ms", "1,000 s"]
    assert (rate_text(9.996e14), rate_text(9.99e14)) == ("1 PFLOP/s", "999 TFLOP/s")
    assert [(tick.text, round(tick.at)) for tick in linear_ticks(31.0)] == [
        ("0", 0), ("10", 32), ("20", 65), ("30", 97),
    ]  # fmt: skip
    assert [tick.text for tick in LogAxis(1.0, 1e5).ticks()] == ["1", "10", "100", "1,000", "10,000", "100,000"]
    assert [tick.text for tick in LogAxis(0.4, 0.48).ticks()] == ["0.4", "0.42", "0.44", "0.46", "0.48"]
