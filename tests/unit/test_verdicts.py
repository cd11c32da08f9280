"""Verdicts as a reader sees them."""

import dataclasses
import io

import pytest
from test_cases import load

from shardplan.plan.plan import BATCH_AXIS
from shardplan.report.tables import console
from shardplan.report.verdicts import print_ranking, print_verdict
from shardplan.search.make_plan import make_plan, model_of, plan_layout
from shardplan.verify.verdict import Buffer, CompiledCollective, CompiledMemory, CompiledTime, Verdict

GIB = 2**30
FITS = Verdict(
    outcome="fits",
    reason="",
    program="eval",
    slice="v5p-16",
    mesh={"replica": 1, "data": 8, "model": 1},
    options={},
    attention="splash",
    compile_seconds=1.0,
    versions={"libtpu": "1.2.3"},
    memory=CompiledMemory(3 * GIB, 2 * GIB, GIB, 0, 4 * GIB, [Buffer(GIB, "bf16[4]", "module.weight[0:2]")]),
    time=CompiledTime(2.0, 1.5, 0.0, 4e12, 0.25, {}),
    collectives=[CompiledCollective("all-gather", ["data"], GIB, 32, 0.5, "mlp", "async")],
    not_understood={"mystery without cycles": 3},
)
TOO_LARGE = dataclasses.replace(
    FITS,
    outcome="does not fit",
    reason="1.00 GiB too much; the largest: [all of it]",
    memory=dataclasses.replace(FITS.memory, peak=5 * GIB),
    time=None,
    collectives=[],
)


@pytest.fixture(scope="module")
def plan():
    return make_plan(load())


def printed(show, *arguments) -> str:
    out = io.StringIO()
    show(*arguments, console(out))
    return out.getvalue()


def test_a_verdict_that_fits(plan):
    text = printed(print_verdict, "this plan", plan, FITS)
    for part in (
        "this plan: eval of configs/models/llama-3.1-8b.json on v5p-16, mesh replica 1 x data 8 x model 1",
        "fits (libtpu 1.2.3, 1.0 s)",
        "peak 3.00 of 4.00 GiB per device (1.00 free): arguments 2.00, temporaries 1.00, output 0.00; the plan",
        "module.weight[0:2]",
        "modelled step 2 s: core 1.5 s, waiting for transfers 0.5 s; MFU 25.0%; the plan's estimate is",
        "left out: mystery without cycles (3 times in the program)",
    ):
        assert part in text
    assert any(
        all(part in line for part in ("all-gather", "async", "1.000", "32", "mlp")) for line in text.splitlines()
    )


def test_one_that_does_not_fit(plan):
    text = printed(print_verdict, "this plan", plan, TOO_LARGE)
    assert "(1.00 too much)" in text and "[all of it]" in text and "MFU" not in text


def test_what_assembles_a_model_is_not_compared_with_the_plan_of_a_step(plan):
    text = printed(print_verdict, "this plan", plan, dataclasses.replace(FITS, program="load"))
    assert "MFU" not in text and "predicted" not in text and "estimate" not in text


def test_ranking_is_by_time_per_token(plan):
    """Half the batch in half the time is no faster; what does not fit comes after what does, by memory."""
    half = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, batch=plan.workload.batch // 2))
    faster = dataclasses.replace(FITS, time=dataclasses.replace(FITS.time, step_seconds=1.25))
    refused = dataclasses.replace(TOO_LARGE, outcome="refused", memory=None)
    limited = dataclasses.replace(refused, outcome="undecided")
    larger = dataclasses.replace(TOO_LARGE, memory=dataclasses.replace(FITS.memory, peak=6 * GIB))
    unread = dataclasses.replace(FITS, time=None)
    rows = [(limited, plan), (refused, plan), (larger, plan), (TOO_LARGE, plan), (faster, half), (FITS, plan)]
    ranked = sorted(rows, key=lambda row: row[0].rank(row[1].workload))
    assert [row[0] for row in ranked] == [FITS, faster, TOO_LARGE, larger, refused, limited]
    assert unread.rank(plan.workload)[0] == 0  # it fits all the same
    text = printed(print_ranking, [("a", plan, FITS), ("b", half, faster)])
    row = next(line for line in text.splitlines() if " b " in line)
    assert "+25.0%" in row and f"{half.workload.batch} x 1024" in row


def test_a_given_layout_says_what_in_it_does_nothing(plan):
    config = load()
    given = plan_layout(config, model_of(config), plan.mesh, {BATCH_AXIS: ["data"], "kv_heads": ["data"]}, {})
    text = printed(print_ranking, [("mine.yaml", given, FITS), ("this plan", plan, FITS)])
    assert "mine.yaml: the model has no axis 'kv_heads', so that mapping it does nothing" in text
    assert "this plan: " not in text
