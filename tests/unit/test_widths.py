"""What commands print fits terminals of 80 and 120 columns: no word is cut, and the verdict comes first."""

import dataclasses
import io
import math
import re
from functools import partial

import pytest
from conftest import GOLDEN
from report_plans import FITS, TOO_LARGE
from rich.console import Console

from shardplan import config as configuration
from shardplan.checkpoint.forecast import ArrayForecast, Forecast
from shardplan.checkpoint.transfer.reads.byte_ranges import ReadVolume
from shardplan.doctor.findings import Check, HostFinding, Level
from shardplan.explain.what_if import Variant
from shardplan.explain.why_not import WhyNot, why_not
from shardplan.lint.edits import diff_trainers
from shardplan.lint.lint import lint_trainer, target_of
from shardplan.lint.repair import Repair, Review
from shardplan.plan.diff import diff_plans
from shardplan.plan.plan import Plan
from shardplan.report.console import console
from shardplan.report.doctor import print_findings
from shardplan.report.evaluation import print_evaluation
from shardplan.report.plan.diff import print_difference
from shardplan.report.plan.explain import print_what_if, print_why
from shardplan.report.plan.lint import print_review, review_json
from shardplan.report.plan.tables import print_plan, spec_text
from shardplan.report.plan.verdicts import print_ranking, print_verdict
from shardplan.report.schedule import print_forecast
from shardplan.report.text import make_table, print_first_fitting, print_wrapped, with_path_ends
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan, model_from_config
from shardplan.verify.verdict import Buffer, CollectiveForm, CompiledCollective

WIDTHS = (80, 120)
GIB = 2**30
LARGE = ["--model.config=llama-3.1-405b", "--workload.batch=16", "--workload.position=4096"]
ONLY_NARROW = {"(the", "end", "of", "each", "path)", "GiB", "-", "+"}
"""Words of narrow forms that the full form does not have."""
PROJECTION = "Attention._compute_qkv/Linear/contract embed -> batch, position, kv_head, q_heads_per_group, head_size"
"""The operation with the longest word, in attention of Llama."""
GATE = "module.transformer.layers.stacked.mlp.gate_proj.weight"


def render(width, show, *arguments) -> str:
    stream = io.StringIO()
    show(*arguments, Console(file=stream, width=width))
    return stream.getvalue()


def words(text: str) -> set[str]:
    return set(re.sub(r"[\u2500-\u257f]", " ", text).split())


def assert_readable(show, *arguments) -> dict[int, str]:
    """Check every width, and return what is printed: whole words, of the wide form or the ends of its paths."""
    wide = words(render(1000, show, *arguments))
    printed = {width: render(width, show, *arguments) for width in WIDTHS}
    for width, text in printed.items():
        too_long = [line for line in text.splitlines() if len(line) > width]
        assert not too_long, too_long
        cut = {
            word
            for word in words(text) - wide - ONLY_NARROW
            if not any(each.endswith((f".{word}", f"/{word}")) for each in wide)
        }
        assert not cut
        assert "…" not in text
    return printed


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Llama 3.1 405B on v4-256: long paths, long PartitionSpecs, sharded positions."""
    return make_plan(configuration.parse_config([*LARGE, "--hardware.slice=v4-256"]))


@pytest.mark.slow
def test_plan(plan):
    printed = assert_readable(print_plan, plan)
    assert any(len(axes or ()) > 1 for parameter in plan.parameters for axes in parameter.spec)
    for text in printed.values():
        lines = text.splitlines()
        assert re.fullmatch(r"fits v4-256: \d+\.\d\d of 30\.75 GiB per device, \d+\.\d\d GiB free", lines[0])
        speed = r"[\d.]+ s a step, [\d,]+ tokens/s, MFU \d+\.\d%, limited by (compute|collectives) \(\d+%\)"
        assert re.fullmatch(speed, lines[1])
        for parameter in plan.parameters:  # one row each
            end = parameter.path.rpartition(".")[0].rpartition(".")[2]
            size = f"{parameter.bytes_per_device / 2**20:,.2f}"
            rows = [line for line in lines if f"{end}.weight" in line and spec_text(parameter.spec) in line]
            assert len(rows) == 1 and size in rows[0]
    assert "shards ┃" in printed[120] and "shards ┃" not in printed[80]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("gpt2", "eval"), ("gemma2", "prefill"), ("mixtral", "train")])
@pytest.mark.parametrize("slice_name", ["cpu-8", "v4-16"])
def test_plans_of_other_architectures(golden, make_config, name, kind, slice_name):
    """With other paths, and specs as long as they get: two dimensions sharded, one of them over two mesh axes."""
    config = make_config(
        model_ref=golden / name, workload_position=16, workload_kind=kind, hardware_slice=slice_name, workload_batch=8
    )
    mapping = {"embed": ["replica", "data"], "mlp": ["model"], "heads": ["model"], "kv_head": ["model"]}
    mesh = {"replica": 2, "data": 2, "model": 2}
    plan = plan_given_mappings(config, model_from_config(config), mesh, {"batch": ["data"]}, mapping)
    printed = assert_readable(print_plan, plan)
    # a CPU has no peak
    speed = f"tokens/s, MFU {plan.mfu:.1%}, limited by" if plan.mfu is not None else "tokens/s, limited by"
    assert (plan.mfu is None) == (slice_name == "cpu-8")
    assert all(speed in text.splitlines()[1] for text in printed.values())


def test_plan_with_several_kinds_of_attention(mixed_attention):
    """Each is named with its layers; parameters that differ in the number of a layer are one row."""
    _, plan = mixed_attention
    printed = assert_readable(print_plan, plan)
    for text in printed.values():
        prose = " ".join(re.sub(r"[\u2500-\u257f]", " ", text).split())
        assert "every 6th layer from 5 (3 of 20)" in prose and "all but every 6th layer from 5 (17 of 20)" in prose
    rows = [line.split() for line in printed[120].splitlines() if "mlp.up_proj.weight" in line]
    assert [(row[1][-28:], row[-6]) for row in rows] == [
        ("layers[0-5].mlp.up_proj.weight"[-28:], "6"), ("layers[0].mlp.up_proj.weight", "1"),
    ]  # fmt: skip
    per_device = {each.path: each.bytes_per_device for each in plan.parameters if "mlp.up_proj" in each.path}
    assert len(per_device) == 7
    assert sum(float(row[-2]) for row in rows) == pytest.approx(sum(per_device.values()) / 2**20, abs=0.01)


def test_why_not_with_several_kinds_of_attention(mixed_attention):
    """What changes is said by kind; causes that differ in the number of a layer are one line."""
    config, plan = mixed_attention
    answer = why_not("position=", plan, config)
    assert answer.plan is not None and answer.plan.attention != plan.attention
    assert math.isclose(
        sum(seconds for cause, seconds in answer.seconds.items() if cause.startswith("compute")),
        answer.plan.cost.compute_seconds - plan.cost.compute_seconds,
    )
    for text in assert_readable(print_why, [answer]).values():
        prose = " ".join(text.split())
        assert " s: attention of every 6th layer from 5 (3 of 20), causal, head size 12, by Levanter's own" in prose
        assert " s: compute, attention of causal, window 8, head size 12" in prose


def test_plan_that_does_not_fit(plan):
    larger = dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, peak=40 * GIB))
    missing = (40 * GIB - plan.memory.usable) / GIB
    first = f"does not fit v4-256: 40.00 GiB per device needed, {40 - missing:.2f} usable: {missing:.2f} missing"
    for text in assert_readable(print_plan, larger).values():
        assert text.splitlines()[0] == first


@pytest.fixture
def verdict():
    """A verdict with long paths of operations, on the largest buffers and collectives."""
    assert FITS.memory is not None
    ops = (GATE, "contract embed -> batch, position, vocab", "layers/stacked/self_attn/dot_general")
    return dataclasses.replace(
        FITS,
        memory=dataclasses.replace(FITS.memory, buffers=[Buffer(GIB, "bf16[126,8,16,128,16384]", op) for op in ops]),
        collectives=[
            CompiledCollective("reduce-scatter", ["replica", "data"], GIB, 1134, 0.5, op, CollectiveForm.WINDOWED)
            for op in ops
        ]
        + [CompiledCollective("collective-permute", ["replica"], GIB, 126, 0.00644, PROJECTION, CollectiveForm.ASYNC)],
    )


def test_verdict(plan, verdict):
    for text in assert_readable(print_verdict, "this plan", plan, verdict).values():
        first, second, *_ = text.splitlines()
        assert first == "this plan: fits v5p-16: 3.00 of 4.00 GiB per device, 1.00 GiB free"
        assert second == "2 s a step, 32,768 tokens/s, MFU 25.0%, limited by compute (75%)"


def test_ranking(plan, verdict):
    rows = [("configs/levanter/405b-usual.yaml", plan, verdict), ("this plan", plan, TOO_LARGE)]
    for text in assert_readable(print_ranking, rows).values():
        assert "peak GiB" in text and "vs fastest" in text and "1.00 GiB too much" in text


@pytest.fixture(scope="module")
def target():
    argv = [f"--model.config={GOLDEN / 'llama' / 'config.json'}", "--hardware.slice=v4-16", "--workload.position=64"]
    return target_of(configuration.parse_config(argv))


@pytest.mark.slow
def test_review(target):
    usual = {"mp": "p=bf16,c=bf16", "mesh": {"axes": {"model": 2}}}
    broken = {**usual, "mesh": {"axes": {"model": 3}, "shared_mapping": {"kv_heads": "model"}}}
    before, after = lint_trainer(broken, target), lint_trainer(usual, target)
    assert before.errors and not after.errors
    repair = Repair(2, diff_trainers(broken, usual), after)
    review = Review("levanter.yaml", before, ["batch 16 (Levanter's default is 512)"], repair, after.plan)
    for text in assert_readable(print_review, review).values():
        assert text.startswith("cannot run on v4-16: mesh size; peak ")
    unpriced = dataclasses.replace(after.subject.step, unpriced={"conv_general_dilated": 1})
    after = dataclasses.replace(after, subject=dataclasses.replace(after.subject, step=unpriced))
    fine = dataclasses.replace(review, lint=after, repair=None)
    assert review_json(fine)["limits"][0].startswith("conv_general_dilated is not priced")
    for text in assert_readable(print_review, fine).values():
        first, second, *_ = text.splitlines()
        assert first.startswith("fits v4-16: ") and " tokens/s, MFU " in second
        assert "limit of the prediction: conv_general_dilated is not priced: counted as elementwise" in " ".join(
            text.split()
        )


def test_difference(plan):
    other = plan_given_mappings(
        configuration.parse_config([*LARGE, "--hardware.slice=v4-512"]),
        model_from_config(configuration.parse_config(LARGE)),
        {"replica": 4, "data": 8, "model": 8},
        {"batch": ["data"]},
        {"embed": ["model", "replica", "data"]},
    )
    difference = diff_plans(plan, other)
    assert difference.parameters and difference.settings and difference.memory
    for text in assert_readable(print_difference, "results/before.json", "results/after.json", difference).values():
        assert text.startswith("before  results/before.json\nafter   results/after.json\n")


def test_answers(plan):
    """Other settings and choices, planned or not."""
    obstacle = "no plan fits v4-128: the nearest miss, mesh replica 4 x data 8 x model 2, needs 40.00 GiB per device"
    variants = [
        Variant("workload.gradient_checkpointing recompute", plan),
        Variant("hardware.slice v4-128", None, obstacle),
    ]
    for text in assert_readable(print_what_if, variants).values():
        assert any("recompute" in line and "tokens" not in line for line in text.splitlines()) and obstacle[:20] in text
    slower = dataclasses.replace(plan, cost=dataclasses.replace(plan.cost, step_seconds=1.5 * plan.cost.step_seconds))
    cause = f"all-gather, weights of {GATE}"
    answers = [
        WhyNot("mlp=data", plan, slower, "", ["mlp=model"], {cause: 0.5}),
        WhyNot("embed=model", plan, plan, "", [], {}),
        WhyNot("mesh.model=128", plan, None, obstacle, [], {}),
    ]
    for text in assert_readable(print_why, answers).values():
        assert "(+50.0%)" in text and "the plan makes this choice" in text


def test_schedule(plan):
    arrays = [ArrayForecast(p.path, p.bytes_per_device, 128, 16384, "all-gather, all-to-all") for p in plan.parameters]
    volumes = {process: ReadVolume(GIB, 4096) for process in range(32)}
    forecast = Forecast("llama-3.1-405b", 32 * GIB, 6.25e9, volumes, arrays)
    for text in assert_readable(print_forecast, forecast, plan).values():
        assert text.startswith("32 processes read 1.00 to 1.00 GiB each, in 4096 to 4096 ranges;")


def test_results():
    row = {"tokens": 131072, "bytes": 524288, "loss_per_token": 4.6444, "perplexity": 104.0, "bits_per_byte": 1.67}
    ids = ("the-first-document", "shard 3 of the validation set, paragraph 123456", "row 0")
    run = {
        "tokens_per_second": 1234.5, "windows_per_second": 12.3, "steps": 99, "programs": 1, "compile_seconds": 2.0,
        "waiting_seconds": 0.1,
    }  # fmt: skip
    summary = {
        "task": {"kind": "loss"}, "texts": dict.fromkeys(ids, row), "total": row, "run": run,
        "load": {"bytes": GIB, "seconds": 2.0},
    }  # fmt: skip
    for text in assert_readable(print_evaluation, summary).values():
        assert text.startswith("loss per token 4.6444 nats, perplexity 104.00, bits per byte")
        assert text.index("Texts") < text.index("1,234 tokens/s") < text.index("1.00 GiB of weights were")


def test_a_pipe_has_the_width_that_columns_says(monkeypatch):
    for value, width in ((None, 240), ("80", 80), ("0", 240), ("wide", 240)):
        if value is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", value)
        assert console(io.StringIO()).width == width


def test_findings_of_a_host():
    findings = {
        Check.VERSIONS: [HostFinding(Level.OK, "Python 3.12.3, jax 0.11.2, jaxlib 0.11.2")],
        Check.COORDINATOR: [
            HostFinding(Level.ERROR, "port 1234: in use", "process 0 listens there", "end what listens there, or " * 5),
            HostFinding(Level.ERROR, "host-0 does not resolve"),
        ],
        Check.DISK: [],
    }
    printed = assert_readable(partial(print_findings, "host-3"), findings)
    for text in printed.values():
        first, second, *_, last = text.splitlines()
        assert first == "host-3: 2 errors, 1 ok"
        assert second == "ok       versions     Python 3.12.3, jax 0.11.2, jaxlib 0.11.2"
        assert "port 1234: in use; required: process 0 listens there; remedy: end what" in " ".join(text.split())
        assert last == "error    coordinator  host-0 does not resolve"


def test_words_that_are_longer_than_the_console_keep_their_own_line():
    assert render(20, print_wrapped, f"see {GATE} here").splitlines() == ["see", GATE, "here"]
    table = make_table("", ("operation",), ("GiB",))
    table.add_row(f"see {GATE} here", "1.0")
    assert GATE in render(20, print_first_fitting, [table])


def test_values_and_units_stay_together():
    text = "compute mapping mlp -> model x data, embed -> data takes 1.09 s and 0.49 GiB"
    for width in range(20, 60):
        printed = render(width, print_wrapped, text)
        assert all(part in printed for part in ("mlp -> model x data", "embed -> data", "1.09 s", "0.49 GiB"))
        assert max(map(len, printed.splitlines())) <= width


def test_paths_are_shortened_by_whole_components_while_they_are_distinct():
    def build(ends):
        return make_table(" ".join(ends), ())

    titles = [table.title for table in with_path_ends(build, ["a.mlp.w", "a.attn.w", "lm_head.w", "x y.z", "b/c.d"])]
    assert titles == [
        "a.mlp.w a.attn.w lm_head.w x y.z b/c.d",
        "mlp.w attn.w lm_head.w x y.z b/c.d",
        "mlp.w attn.w lm_head.w x y.z c.d",
    ]
