"""Slices by tokens per second per chip, and by cost."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import fails, run

from shardplan import load_config, rank_slices
from shardplan.cost.calibration import STEP_ERROR
from shardplan.errors import ConfigError
from shardplan.explain.rank_slices import RankedSlice, SliceRanking
from shardplan.hardware.slice_selection import parse_prices, select_slices
from shardplan.plan.file.sections import Caveat, HardwareInfo
from shardplan.plan.plan import Plan
from shardplan.report.console import console
from shardplan.report.plan.slice_ranking import print_slice_ranking, ranking_json

GALLERY = Path(__file__).parents[2] / "docs" / "gallery" / "plans"
ARGUMENTS = ["--model.config=llama-3.1-8b", "--workload.batch=16"]


def ranked(plan, slice_name, devices, seconds, price=None, **workload):
    """A ranked slice whose step takes `seconds`."""
    hardware = HardwareInfo(slice_name, devices, plan.hardware.hbm_gib)
    changed = replace(plan, hardware=hardware, cost=replace(plan.cost, step_seconds=seconds))
    return RankedSlice(replace(changed, workload=replace(plan.workload, **workload)), True, price)


def text_of(ranking, monkeypatch, columns=80):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    print_slice_ranking(ranking, console(stream))
    return stream.getvalue()


@pytest.fixture(scope="module")
def training():
    return Plan.load(str(GALLERY / "70b-training.json"))


@pytest.fixture(scope="module")
def evaluation():
    return Plan.load(str(GALLERY / "405b-evaluation.json"))


@pytest.mark.slow
def test_slices_and_generations(tmp_path):
    """15 GiB of weights, on chips of 15.75 GiB; the price decides which generation is first."""
    path = tmp_path / "ranking.json"
    named = ["--rank_slices", "v5e-8,v5e-1", "v5e-4", "v6e-1", "--price", "v5e=1.25", "v6e=50"]
    done = run("plan", *ARGUMENTS, *named, "--json", path)
    assert done.returncode == 0, done.stderr
    values = json.loads(path.read_text())
    slices = {each["slice"]: each for each in values["slices"]}
    assert set(slices) == {"v5e-4", "v5e-8", "v6e-1"} and list(slices)[2] == "v6e-1"
    for each in slices.values():
        assert each["peak"] < each["available"] and each["workload"]["batch"] == 16
        speed = 16 * 2048 / each["step_seconds"] / each["chips"]
        assert each["tokens_per_second_per_chip"] == pytest.approx(speed)
        price = 50 if each["slice"] == "v6e-1" else 1.25
        assert each["cost_per_million_tokens"] == pytest.approx(price / (speed * 3600) * 1e6)
    assert [name for name, each in slices.items() if each["is_smallest"]] in (["v5e-4", "v6e-1"],)
    assert list(values["without_plan"]) == ["v5e-1"]
    text = " ".join(done.stdout.split())
    assert "smallest of these that fits: v5e-4 and v6e-1 eval, batch 16 x 2048 tokens, bfloat16 parameters" in text
    assert "· slice v5e-1: no plan fits v5e-1: the nearest miss" in text


@pytest.mark.whole
def test_training_chooses_microbatches_and_stores_float32():
    """Parameters, gradients and moments of 8B take 120 GiB in float32; a v6e-4 has 125, a v6e-8 250."""
    config = load_config(model={"config": "llama-3.1-8b"}, workload={"kind": "train", "batch": 64, "position": 4096})
    ranking = rank_slices(config, ["v6e-4", "v6e-8"])
    (only,) = ranking.ranked
    assert (only.plan.hardware.slice, only.chips, only.is_smallest) == ("v6e-8", 8, True)
    assert only.plan.workload.param_dtype == "float32"
    assert only.plan.workload.microbatches > 1 and 64 % only.plan.workload.microbatches == 0
    assert [each.change for each in ranking.failed[0]] == ["slice v6e-4"]
    with pytest.raises(ConfigError, match="batch auto needs step_tokens in training"):
        rank_slices(replace(config, workload=replace(config.workload, batch=-1)), ["v6e-4", "v6e-8"])


def test_a_budget_of_tokens_has_days_and_a_price(training, monkeypatch):
    """A trillion tokens at 1,024 sequences of 4,096 in 10 s on 128 chips are 27.6 days, and 169,500 at 2 an hour."""
    fast = replace(ranked(training, "v5p-256", 128, 10.0, 2.0, batch=1024, position=4096), tokens=1e12)
    slow = replace(ranked(training, "v6e-128", 128, 20.0, None, batch=2048, position=4096), tokens=1e12)
    steps = 1e12 / (1024 * 4096)
    assert fast.days == pytest.approx(steps * 10 / 86400) and fast.cost == pytest.approx(2 * 128 * steps * 10 / 3600)
    assert (slow.days, slow.cost) == (pytest.approx(fast.days), None)
    text = text_of(SliceRanking([fast, slow], [], []), monkeypatch, 160)
    assert text.startswith(f"v5p-256 has the lowest cost of the run: {fast.cost:,.0f}\n")
    assert [line.split("│")[-3:-1] for line in text.splitlines() if line.startswith("│")] == [
        [" 27.59 ", f"{f'{fast.cost:,.0f}':>16} "], [" 27.59 ", f"{'-':>16} "],
    ]  # fmt: skip
    values = ranking_json(SliceRanking([fast], [], []))["slices"][0]
    assert (values["days"], values["cost"]) == (fast.days, fast.cost)
    assert ranking_json(SliceRanking([replace(fast, tokens=None)], [], []))["slices"][0]["days"] is None


def test_a_step_of_other_batches_is_no_measure(training, monkeypatch):
    """Where slices have batches of their own, tokens are compared."""
    slices = [ranked(training, "v5p-256", 128, 10.0, 2.0, batch=batch) for batch in (1024, 512)]
    assert "the lowest cost per million tokens" in text_of(SliceRanking(slices, [], []), monkeypatch, 160)
    assert "the lowest cost per step" in text_of(SliceRanking(slices[:1], [], []), monkeypatch, 160)


@pytest.mark.slow
def test_nothing_fits():
    done = run("plan", *ARGUMENTS, "--rank_slices", "v5e", "--mesh.data=1", "--mesh.model=1", "--mesh.replica=1")
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert done.stderr.endswith("no plan fits any slice of v5e; several slices have more memory, as in 2xv6e-256\n")


def test_speeds_within_the_error_of_the_estimates_are_a_tie(evaluation, monkeypatch):
    """Seconds of a step of 128 chips, where 10 s is the fastest: 11% more is a tie, 12% is none."""
    slices = [ranked(evaluation, f"v4:{n}x4x8", 128, seconds) for n, seconds in ((4, 10.0), (8, 11.09), (12, 11.2))]
    ranking = SliceRanking(slices, [], [])
    assert STEP_ERROR == 0.11 and [each.plan.hardware.slice for each in ranking.best] == ["v4:4x4x8", "v4:8x4x8"]
    text = text_of(ranking, monkeypatch)
    speeds = [evaluation.workload.tokens / seconds / 128 for seconds in (10.0, 11.09)]
    first = f"v4:4x4x8 and v4:8x4x8 have the most tokens/s per chip: {speeds[0]:,.0f} to {speeds[1]:,.0f} (no"
    assert text.startswith(first)
    assert text_of(SliceRanking(slices[2:], [], []), monkeypatch).startswith(
        "v4:12x4x8 has the most tokens/s per chip: "
    )


def test_costs_are_of_a_step_or_of_a_million_tokens(training, evaluation, monkeypatch):
    """128 chips for 9 s at 5 an hour are 1.6; at 2^19 tokens a step, a million of them cost 3.05."""
    workload = {"batch": 128, "position": 4096}
    for plan, cost, title in (
        (training, 1.6, "cost per step"),
        (evaluation, 1.6 / 2**19 * 1e6, "cost per million tokens"),
    ):
        cheap = ranked(plan, "v4-256", 128, 9.0, 5.0, **workload)
        other = ranked(plan, "v5p-64", 32, 9.0, None, **workload)
        ranking = SliceRanking([cheap, other], [], ["v6e"])
        assert (cheap.cost_per_step, cheap.cost_per_million_tokens) == pytest.approx((1.6, 1.6 / 2**19 * 1e6))
        text = text_of(ranking, monkeypatch)
        assert text.startswith(f"v4-256 has the lowest {title}: {cost:.2f}\n")
        assert "  · no price for v5p: these slices are ranked last, by tokens/s per chip\n" in text
        assert "  · the price of v6e is not used: none of its slices is ranked\n" in text
        values = ranking_json(ranking)
        assert [each["price_per_chip_hour"] for each in values["slices"]] == [5.0, None]
        assert values["best"] == ["v4-256"] and values["unused_prices"] == ["v6e"]


def test_times_that_are_guesses_are_named(evaluation, monkeypatch):
    """Without a kernel the time of attention is a guess, whatever the other slices have."""
    first, second = (ranked(evaluation, name, 128, 9.0) for name in ("v4-256", "v4-8"))
    caveats = [Caveat.NO_ATTENTION_KERNEL]
    guessed = replace(second.plan, search=replace(second.plan.search, caveats=caveats))
    ranking = SliceRanking([first, replace(second, plan=guessed)], [], [])
    text = " ".join(text_of(ranking, monkeypatch).split())
    assert "no kernel can run attention on v4-8: the times there are guesses, which the error" in text
    assert [each["is_guess"] for each in ranking_json(ranking)["slices"]] == [False, True]


def test_headline_and_table_name_what_was_planned(training, monkeypatch):
    """Of what was chosen for each slice the headline has the range; no table is wider than 80 columns."""
    slices = [
        ranked(training, "4xv6e-256", 1024, 9.0, 2.7, microbatches=2, gradient_checkpointing="default"),
        ranked(training, "tpu7x-4096", 4096, 30.0, 12.0, microbatches=16, gradient_checkpointing="nested"),
    ]
    text = text_of(SliceRanking(slices, [], []), monkeypatch)
    assert (
        "train, batch 128 x 8192 tokens, float32 parameters, bfloat16 compute, adamw, 2 to 16 microbatches, gradient "
        "checkpointing default or nested"
    ) in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80 and "replica x data x model" in text
    sizes = " x ".join(map(str, training.mesh.values()))
    row = next(line.split() for line in text.splitlines() if line.startswith("tpu7x-4096 "))
    assert row[1:4] == ["2048", "128", "16"] and " ".join(row[4:9]) == sizes
    wide = text_of(SliceRanking(slices, [], []), monkeypatch, 240)
    assert "microbatches" in wide and "GiB of available" in wide


def test_names_of_slices_and_generations():
    selected = select_slices(["v6e-16,v6e-8", "V5E", "v6e-8", "2xv6e-256", "v4:4x4x12"])
    assert [[each.name for each in slices] for slices in selected] == [
        ["v6e-8", "v6e-16", "2xv6e-256"],
        [f"v5e-{n}" for n in (1, 4, 8, 16, 32, 64, 128, 256)],
        ["v4:4x4x12"],
    ]
    assert {slices[0].generation.name for slices in select_slices(["all"])} >= {
        "v3",
        "v4",
        "v5e",
        "v5p",
        "v6e",
        "tpu7x",
    }


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["v5"], "rank_slices: 'v5' is no generation and no slice; did you mean 'v5e' or 'v5p'?"),
        (["v4,tpu7"], "rank_slices: 'tpu7' is no generation and no slice; did you mean 'tpu7x'?"),
        (["Trillium"], "rank_slices: 'Trillium' is no generation and no slice; did you mean 'v6e'?"),
        (["h100"], "rank_slices: 'h100' is no generation and no slice; valid: all, tpu7x, v3, v4, v5e, v5p, v6e"),
        (["v5p8"], "rank_slices: 'v5p8': did you mean 'v5p-8'?"),
        (["v5e-4x4"], "rank_slices: 'v5e-4x4': did you mean 'v5e:4x4'?"),
        (["v6e-9"], "did you mean 'v6e-8'?"),
        (["cpu-8"], "rank_slices: cpu-8 has virtual devices, whose times mean nothing; name TPU slices"),
        ([","], "rank_slices: no slice is named; name generations or slices, for example v5e v6e-8"),
    ],
)
def test_unknown_slices(names, message):
    with pytest.raises(ConfigError) as error:
        select_slices(names)
    assert message in str(error.value) and "hardware.slice" not in str(error.value)


def test_prices():
    assert parse_prices(["v6e=2.70,v5p=4", "v6e=2.7", "V5E=.5"]) == {"v6e": 2.7, "v5p": 4.0, "v5e": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v6e", "price 'v6e': write GENERATION=NUMBER, the price of a chip-hour, for example v6e=2.70"),
        ("v6e=2,70", "price '70': write GENERATION=NUMBER"),
        ("v6e=$2", "price 'v6e=$2': write GENERATION=NUMBER"),
        ("v6e=0", "price of v6e is 0; it must be more than 0"),
        ("v6e=1,v6e=2", "price: v6e has two, 1 and 2; leave one of them out"),
        ("v6=2", "price: 'v6' is no generation; did you mean 'v6e'?"),
        ("v6e-8=2", "price: 'v6e-8' is no generation; a chip has one price in all slices of a generation, for example"),
    ],
)
def test_unusable_prices(text, message):
    with pytest.raises(ConfigError) as error:
        parse_prices([text])
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank_slices", "v4", "--what_if"], "rank_slices plans for many slices; leave out --what_if"),
        (["--price", "v4=1"], "price is for ranking slices; name some with --rank_slices, or leave price out"),
        (["--rank_slices", "v4", "--price", "v4"], "price 'v4': write GENERATION=NUMBER"),
    ],
)
def test_unusable_arguments(arguments, message):
    fails(run("plan", *ARGUMENTS, *arguments), 2, message)
