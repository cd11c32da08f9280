"""Choices that the workload leaves to the planner: microbatches and gradient checkpointing."""

import pytest

from shardplan.errors import InfeasibleError
from shardplan.search.make_plan import make_plan


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
