"""What other settings of a configuration would change."""

import io

import pytest

from shardplan.explain.what_if import Variant, summarize_failures, what_if
from shardplan.report.console import console
from shardplan.report.plan.explain import print_what_if


@pytest.mark.slow
def test_what_if_something_fits(llama_model, llama_config):
    reported: list[str] = []
    variants = {
        variant.change: variant.plan for variant in what_if(llama_config(), llama_model, reported.append).variants
    }
    assert list(variants) == [
        "as it is", *(f"workload.batch {batch}" for batch in (1, 2, 4, 16, 32, 64)), "hardware.slice v4-32",
        "hardware.slice v4-128", "workload.param_dtype float32",
    ]  # fmt: skip
    assert all(variants.values())
    assert reported[:2] == ["as it is", "1 of at most 10 planned, now workload.batch 1"] and len(reported) == 10
    assert variants["hardware.slice v4-128"].cost.step_seconds < variants["as it is"].cost.step_seconds


@pytest.mark.slow
def test_what_if_nothing_fits(llama_model, llama_config):
    """Each change is enlarged until a plan fits, and no further."""
    training = {"workload_kind": "train", "workload_batch": 2, "workload_param_dtype": "bfloat16"}
    config = llama_config(hardware_slice="v5e-4", **training, workload_microbatches=1)
    answer = what_if(config, llama_model)
    variants = answer.variants
    fits = {variant.change: variant.plan is not None for variant in variants}
    assert not fits["as it is"] and "missing" in variants[0].obstacle
    for key in ("hardware.slice", "workload.batch"):
        of_key = [fits[change] for change in fits if change.startswith(key)]
        assert of_key and not any(of_key[:-1])
    assert fits["hardware.slice v5e-8"]
    # one line for all values of a key without a plan, and no row in the table
    stream = io.StringIO()
    print_what_if(variants, console(stream))
    text = stream.getvalue()
    assert str(answer).splitlines()[0].startswith("What if")
    assert "none" not in text.split("  · ")[0] and "hardware.slice v5e-8" in text
    failed = {change.rpartition(" ")[0] for change, has_plan in fits.items() if not has_plan}
    assert text.count("  · ") == len(failed) == len(summarize_failures(variants))


def test_values_without_a_plan_share_a_sentence():
    """The last value is the largest change, which misses by least."""
    changes = ["as it is", "workload.batch 4", "workload.batch 2", "workload.batch 1", "workload.microbatches 2"]
    variants = [Variant(change, None, f"no plan fits ({change})") for change in changes]
    assert summarize_failures(variants) == [
        "as it is: no plan fits (as it is)",
        "workload.batch 4 to 1 (3 values): none has a plan; for the last, no plan fits (workload.batch 1)",
        "workload.microbatches 2: no plan fits (workload.microbatches 2)",
    ]
    two = summarize_failures(variants[1:3])
    assert two == ["workload.batch 4 and 2: none has a plan; for the last, no plan fits (workload.batch 2)"]
    stream = io.StringIO()
    print_what_if(variants, console(stream))
    assert stream.getvalue().startswith("What if: no change of one setting gives a plan\n  · as it is: no plan fits")
