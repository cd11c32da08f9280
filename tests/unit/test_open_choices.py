"""Choices that the workload leaves to the planner: microbatches and gradient checkpointing."""

import pytest

from shardplan.errors import ConfigError, InfeasibleError
from shardplan.plan.packing import packed_length
from shardplan.search.fastest_batch import TIE, batches
from shardplan.search.make_plan import make_plan

pytestmark = pytest.mark.with_levanter_12


@pytest.mark.parametrize("batch", [16, pytest.param(240, marks=pytest.mark.whole)])
def test_microbatches_can_be_chosen(llama_model, llama_config, batch):
    """The fastest number of microbatches is chosen, also if divisors of the batch do not divide each other."""
    settings = {"hardware_slice": "v5e-16", "workload_kind": "train", "workload_batch": batch, "mesh_replica": 1}
    plan = make_plan(llama_config(workload_microbatches="null", **settings), llama_model)
    seconds = {}
    for n in (n for n in range(1, batch + 1) if batch % n == 0):
        try:
            seconds[n] = make_plan(llama_config(workload_microbatches=n, **settings), llama_model).cost.step_seconds
        except InfeasibleError as error:
            assert "missing" in str(error)
    assert plan.cost.step_seconds == min(seconds.values()) == seconds[plan.workload.microbatches]
    assert not plan.search.proven_optimal  # numbers were left out after a slower one, of which they are multiples


def test_microbatches_divide_the_batch_evenly_over_devices(llama_model, llama_config):
    """Each of 16 groups of devices gets equally many of 144 sequences in 3 microbatches, but not in 2."""
    settings = {"hardware_slice": "v5e-16", "workload_kind": "train", "workload_batch": 144, "mesh_data": 16}
    plan = make_plan(llama_config(pin=("batch=data",), workload_microbatches="null", **settings), llama_model)
    assert plan.workload.microbatches == 3


def test_no_number_of_microbatches_fits(llama_model, llama_config):
    with pytest.raises(InfeasibleError, match="the nearest miss, mesh"):
        make_plan(
            llama_config(hardware_slice="v5e-4", workload_kind="train", workload_microbatches="null"), llama_model
        )


def test_checkpointing_can_be_chosen(llama_model, llama_config):
    roomy = make_plan(
        llama_config(hardware_slice="v5p-64", workload_kind="train", workload_gradient_checkpointing="auto"),
        llama_model,
    )
    tight = make_plan(
        llama_config(hardware_slice="v5e-16", workload_kind="train", workload_gradient_checkpointing="auto"),
        llama_model,
    )
    assert roomy.workload.gradient_checkpointing == "save_all"
    assert tight.workload.gradient_checkpointing != "save_all"


@pytest.mark.parametrize("kind", ["eval", pytest.param("score", marks=pytest.mark.whole)])
def test_the_fastest_batch_that_fits(make_config, kind):
    """Of the batches that are considered none is faster by more than the tie, and no smaller one as fast."""
    arguments = {"model_config": "llama-3.1-8b", "hardware_slice": "v5e-8", "workload_position": 512}
    arguments["workload_kind"] = kind
    plan = make_plan(make_config(**arguments, workload_batch="auto"))
    rates = {}
    for batch in batches(8, 512):
        try:
            other = make_plan(make_config(**arguments, workload_batch=batch))
        except InfeasibleError:
            break
        rates[batch] = batch / other.cost.step_seconds
    chosen = plan.workload.batch
    assert rates[chosen] >= (1 - TIE) * max(rates.values())
    assert all(rate < (1 - TIE) * max(rates.values()) for batch, rate in rates.items() if batch < chosen)
    assert rates[chosen] > 1.5 * rates[1]


def test_an_open_batch_of_training_is_refused(make_config):
    with pytest.raises(ConfigError, match=r"workload\.batch auto is not for training"):
        make_plan(make_config(model_config="llama-3.1-8b", workload_kind="train", workload_batch="auto"))


def test_batches_of_slices_that_are_no_power_of_two():
    assert [b for b in batches(12, 2**17) if b < 99] == [1, 2, 3, 4, 6, 8]


@pytest.mark.parametrize(("window", "length"), [(100, 512), (128, 512), (600, 2048), (512, 512), (5000, 5120)])
def test_windows_fill_packed_sequences(window, length):
    assert packed_length(window) == length


def test_the_position_that_windows_fill_best(make_config):
    """Windows of 100 tokens leave 12 of 512; the length of those of extraction is known later."""
    scoring = {"model_config": "llama-3.1-8b", "workload_kind": "score", "workload_position": "auto"}
    config = make_config(**scoring, workload_window=100)
    assert config.workload.position == packed_length(100) == 512
    with pytest.raises(ConfigError, match="position auto is the length that packed windows fill best"):
        make_config(**scoring)
