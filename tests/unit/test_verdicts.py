"""Verdicts are printed, ranked, and turned into text and JSON."""

import dataclasses
import io
import json

import pytest
from report_plans import FITS, TOO_LARGE
from test_cases import load

from shardplan.plan.workload.workload import BATCH_AXIS
from shardplan.report.console import console
from shardplan.report.page.judgement import judgement_json
from shardplan.report.plan.verdicts import omission_text, print_ranking, print_verdict, reason_text
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan, model_from_config
from shardplan.verify.compiler.compiled import Compiled
from shardplan.verify.model_facts import ModelFacts
from shardplan.verify.read import read_verdict
from shardplan.verify.verdict import (
    Buffer,
    CompileError,
    CompilerCrash,
    DuplicateMeshAxis,
    Interrupted,
    MemoryLimit,
    Omission,
    OmissionKind,
    Outcome,
    OutOfMemory,
    TimeLimit,
    Verdict,
)

GIB = 2**30


@pytest.fixture(scope="module")
def plan():
    return make_plan(load())


def printed(show, *arguments) -> str:
    out = io.StringIO()
    show(*arguments, console(out))
    return out.getvalue()


@pytest.mark.slow
def test_a_verdict_that_fits(plan):
    text = printed(print_verdict, "this plan", plan, FITS)
    for part in (
        "this plan: fits v5p-16: 3.00 of 4.00 GiB per device, 1.00 GiB free\n2 s a step, ",
        "eval of llama-3.1-8b, mesh replica 1 x data 8 x model 1, attention splash; libtpu 1.2.3",
        "arguments 2.00, temporaries 1.00, output 0.00 GiB; the plan predicted",
        "module.weight[0:2]",
        "core 1.5 s, waiting for transfers 0.5 s; the plan's estimate is",
        "assumed: mystery without cycles takes as long as reading and writing its result (3 times in the program)",
    ):
        assert part in text
    assert any(
        all(part in line for part in ("all-gather", "async", "1.000", "32", "mlp")) for line in text.splitlines()
    )


def test_a_verdict_that_does_not_fit(plan):
    text = printed(print_verdict, "this plan", plan, TOO_LARGE)
    assert text.startswith("this plan: does not fit v5p-16: 5.00 GiB per device needed, 4.00 usable: 1.00 missing\n")
    assert "[all of it]" in text and "MFU" not in text


def test_a_verdict_without_memory(plan):
    undecided = dataclasses.replace(TOO_LARGE, outcome=Outcome.UNDECIDED, reason=TimeLimit(7), memory=None)
    text = printed(print_verdict, "this plan", plan, undecided)
    assert text.startswith("this plan: undecided on v5p-16\n  · not compiled in 7 s; raise compiler.seconds\n")


def test_masked_dense_matmuls_are_named(plan):
    time = dataclasses.replace(FITS.time, masked_dense_seconds=0.5)
    text = printed(print_verdict, "this plan", plan, dataclasses.replace(FITS, time=time))
    assert "0.5 s (25% of the step) are grouped matmuls of experts that the compiler makes of dense ones" in text
    assert "grouped matmuls" not in printed(print_verdict, "this plan", plan, FITS)


def test_negligible_times(plan):
    """Neither `2.22e-16 s` nor `-0.0%`."""
    assert FITS.time is not None
    time = dataclasses.replace(FITS.time, compute_seconds=2.0 - 2e-16)
    text = printed(print_verdict, "this plan", plan, dataclasses.replace(FITS, time=time))
    assert "core 2 s, waiting for transfers none; " in text
    slower = dataclasses.replace(FITS, time=dataclasses.replace(FITS.time, step_seconds=2.0 - 1e-5))
    text = printed(print_ranking, [("a", plan, FITS), ("b", plan, slower)])
    assert "0.0%" not in text and text.count(" same ") == 2


def test_the_assembly_of_a_model_is_not_compared_with_the_plan_of_a_step(plan):
    assert FITS.time is not None
    time = dataclasses.replace(FITS.time, model_flops=0.0, mfu=0.0)
    text = printed(print_verdict, "this plan", plan, dataclasses.replace(FITS, program="load", time=time))
    assert "MFU" not in text and "predicted" not in text and "estimate" not in text


def test_ranking_is_by_time_per_token(plan):
    """Half the batch in half the time is no faster; programs that do not fit come last, ordered by memory."""
    half = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, batch=plan.workload.batch // 2))
    faster = dataclasses.replace(FITS, time=dataclasses.replace(FITS.time, step_seconds=1.25))
    refused = dataclasses.replace(TOO_LARGE, outcome=Outcome.REFUSED, memory=None)
    limited = dataclasses.replace(refused, outcome=Outcome.UNDECIDED)
    larger = dataclasses.replace(TOO_LARGE, memory=dataclasses.replace(FITS.memory, peak=6 * GIB))
    unread = dataclasses.replace(FITS, time=None)
    rows = [(limited, plan), (refused, plan), (larger, plan), (TOO_LARGE, plan), (faster, half), (FITS, plan)]
    ranked = sorted(rows, key=lambda row: row[0].rank(row[1].workload))
    assert [row[0] for row in ranked] == [FITS, faster, TOO_LARGE, larger, refused, limited]
    assert unread.rank(plan.workload)[0] == 0  # it fits, even if its time is unknown
    text = printed(print_ranking, [("a", plan, FITS), ("b", half, faster)])
    row = next(line for line in text.splitlines() if " b " in line)
    assert "+25.0%" in row and f"{half.workload.batch} x 1024" in row


def test_entries_of_a_given_layout_without_effect_are_named(plan):
    config = load()
    given = plan_given_mappings(
        config, model_from_config(config), plan.mesh, {BATCH_AXIS: ["data"], "kv_heads": ["data"]}, {}
    )
    text = printed(print_ranking, [("mine.yaml", given, FITS), ("this plan", plan, FITS)])
    assert "mine.yaml: the model has no axis 'kv_heads', so that mapping it does nothing" in text
    assert "this plan: " not in text


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (None, ""),
        (
            OutOfMemory(3 * GIB // 2, [Buffer(GIB, "bf16[4]", "a"), Buffer(GIB // 4, "f32[]", "b")]),
            "1.50 GiB too much; the largest: 1.00 GiB bf16[4] (a); 0.25 GiB f32[] (b)",
        ),
        (OutOfMemory(GIB, []), "1.00 GiB too much"),
        (CompileError("XlaRuntimeError: no"), "XlaRuntimeError: no"),
        (
            DuplicateMeshAxis("q_proj.weight", ["kv_head", "embed"], "model"),
            "DuplicateSpecError: kv_head, embed of q_proj.weight are all mapped to 'model'",
        ),
        (TimeLimit(7), "not compiled in 7 s; raise compiler.seconds"),
        (MemoryLimit(0.5), "compiling took more than 0.5 GiB of this machine; raise compiler.gib"),
        (CompilerCrash(2, "no libtpu"), "the compiler ended with code 2: no libtpu"),
        (CompilerCrash(-6, "Aborted"), "the compiler crashed (SIGABRT): Aborted"),
        (CompilerCrash(-15, ""), "the compiler was ended by SIGTERM from outside; start the command again"),
        (
            CompilerCrash(-9, ""),
            "the compiler was ended by SIGKILL, as the system does when memory runs out; lower compiler.jobs, or use a "
            "machine with more memory",
        ),
        (Interrupted(), "interrupted"),
    ],
)
def test_reasons_as_text(reason, text):
    assert reason_text(reason) == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (OmissionKind.MODULE_TEXT, "left out: the compiled module: detail"),
        (OmissionKind.MODULE_STRUCTURE, "left out: detail"),
        (OmissionKind.INSTRUCTION, "left out: subject: detail"),
        (OmissionKind.NO_CYCLES, "assumed: subject without cycles takes as long as reading and writing its result"),
        (
            OmissionKind.SCATTER,
            "assumed: subject without cycles takes as long as reading its updates, and changing as many rows",
        ),
        (OmissionKind.TRIP_COUNT, "assumed: a loop of unknown length runs once"),
        (OmissionKind.CONDITIONAL, "assumed: a conditional takes as long as its longest branch, and transfers for all"),
        (OmissionKind.ASYNC_CALL, "left out: asynchronous call without a collective"),
        (OmissionKind.REPLICA_GROUPS, "left out: subject with replica_groups detail"),
    ],
)
def test_omissions_as_text(kind, text):
    assert omission_text(Omission(kind, "subject", "detail")) == text


def test_verdicts_as_json(plan):
    """Enums become their values, reasons and omissions text; the label comes first, the plan's estimate last."""
    values = json.loads(json.dumps(judgement_json("a", plan, FITS)))
    assert list(values) == ["label", *(field.name for field in dataclasses.fields(Verdict)), "estimate"]
    assert (values["outcome"], values["reason"], values["program"]) == ("fits", "", "eval")
    assert values["memory"]["buffers"] == [{"bytes": GIB, "shape": "bf16[4]", "op": "module.weight[0:2]"}]
    assert values["collectives"][0]["form"] == "async"
    assert values["not_understood"] == {
        "assumed: mystery without cycles takes as long as reading and writing its result": 3
    }
    assert values["estimate"]["peak"] == plan.memory.peak
    too_large = judgement_json("b", plan, TOO_LARGE)
    assert too_large["reason"] == "1.00 GiB too much; the largest: 1.00 GiB bf16[4] ([all of it])"
    assert too_large["time"] is None


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 20 * GIB])
def test_the_memory_of_a_device_is_without_that_of_its_host(llama_model, llama_config, host):
    """The peak that the compiler gives counts both: here 32 GiB, of which 12 are in HBM."""
    sizes = {"peak": 32 * GIB, "arguments": 12 * GIB, "temporaries": 13 * GIB, "output": 0, "host": host}
    usage = f"Memory Space: default (color=0)\nTotal bytes: {23 * GIB} (23.00GiB)\n"
    compiled = Compiled(memory=sizes, usage=usage)
    plan = make_plan(llama_config(), llama_model)
    verdict = read_verdict(compiled, plan, ModelFacts(1.0, 1.0, None), "step", {})
    assert verdict.memory is not None and verdict.memory.host == host
    assert verdict.memory.peak == (23 if host else 32) * GIB
