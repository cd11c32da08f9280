"""Choices that the workload leaves to the planner: microbatches and gradient checkpointing."""

from dataclasses import replace

import pytest

from shardplan.cost.calibration import usable_host_bytes
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.hardware import GIB, parse_slice
from shardplan.plan.workload.packing import packed_length
from shardplan.plan.workload.token_counts import TokenRange
from shardplan.search.fastest_batch import TIE, batches
from shardplan.search.make_plan import make_plan, model_from_config
from shardplan.search.open_choices import enumerate_variants


@pytest.mark.slow
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


@pytest.mark.slow
def test_microbatches_divide_the_batch_evenly_over_devices(llama_model, llama_config):
    """Each of 16 groups of devices gets equally many of 144 sequences in 3 microbatches, but not in 2."""
    settings = {"hardware_slice": "v5e-16", "workload_kind": "train", "workload_batch": 144, "mesh_data": 16}
    settings["workload_param_dtype"] = "bfloat16"
    plan = make_plan(llama_config(pin=("batch=data",), workload_microbatches="null", **settings), llama_model)
    assert plan.workload.microbatches == 3


@pytest.mark.slow
def test_no_number_of_microbatches_fits(llama_model, llama_config):
    """More microbatches are advised where their number was given, not where all were tried."""
    settings = {"hardware_slice": "v5e-4", "workload_kind": "train"}
    for numbers, is_advised in (({}, False), ({"workload_microbatches": 1}, True)):
        with pytest.raises(InfeasibleError, match="the nearest miss, mesh") as error:
            make_plan(llama_config(**settings, **numbers), llama_model)
        assert ("more workload.microbatches" in str(error.value)) is is_advised


def test_defaults_follow_from_the_kind(make_config):
    """Training stores float32 and leaves microbatches open; a value that is given stays."""
    for kind, dtype in (("eval", "bfloat16"), ("score", "bfloat16"), ("prefill", "bfloat16"), ("train", "float32")):
        work = make_config(model_config="llama-3.1-8b", workload_kind=kind).workload
        assert (work.param_dtype, work.microbatches, work.num_microbatches) == (dtype, None, 1)
    given = {"workload_kind": "train", "workload_param_dtype": "bfloat16", "workload_microbatches": 1}
    work = make_config(model_config="llama-3.1-8b", **given).workload
    assert (work.param_dtype, work.microbatches) == ("bfloat16", 1)


def test_every_combination_of_open_values_is_tried_once(make_config):
    """Numbers ascend for each kind of checkpointing; logits of 64 x 8192 tokens take blocks of 256 MiB per device."""
    train = {"model_config": "llama-3.1-8b", "workload_kind": "train", "workload_batch": 12}
    variants = list(enumerate_variants(make_config(**train), 128256, False))
    assert [[each.config.workload.microbatches for each in group] for group in variants] == [[1, 2, 3, 4, 6, 12]]
    assert [each.numbers for each in variants[0]][2] == (3, 1)
    assert [each.is_multiple_of((2, 1)) for each in variants[0]] == [False, True, False, True, True, True]
    auto = list(enumerate_variants(make_config(**train, workload_gradient_checkpointing="auto"), 128256, True))
    kinds = [{(each.config.workload.gradient_checkpointing, each.keeps_open) for each in group} for group in auto]
    assert kinds == [{("default", True)}, {("nested", False)}]
    assert {*map(len, auto)} == {6}
    on_tpu = make_config(**train, workload_gradient_checkpointing="auto", hardware_slice="v5e-8")
    # where it is not known what can become of activations, the host of virtual CPU devices has no memory of its own
    [*_, last] = enumerate_variants(on_tpu, 128256, False)
    assert {each.config.workload.gradient_checkpointing for each in last} == {"offload_carries"}
    score = {"model_config": "llama-3.1-8b", "workload_kind": "score", "workload_batch": 64, "hardware_slice": "v5e-8"}
    ((only,),) = enumerate_variants(make_config(**score, workload_position=8192), 128256, False)
    assert only.config.workload.logit_blocks == 128  # 250.5 GiB of logits over 8 devices, 250.5 MiB each
    assert only.config.workload.microbatches == 1
    ((given,),) = enumerate_variants(make_config(**score, workload_logit_blocks=4), 128256, False)
    assert given.config.workload.logit_blocks == 4


@pytest.mark.slow
def test_activations_are_moved_to_hosts_that_have_room(llama_model, llama_config):
    """Where that saves time; otherwise planned without, and refused where nothing else is allowed."""
    settings = {"hardware_slice": "v5e-16", "workload_kind": "train", "workload_microbatches": 1}
    tight = {**settings, "workload_batch": 96, "workload_param_dtype": "bfloat16"}
    moved = make_plan(llama_config(**tight, workload_gradient_checkpointing="auto"), llama_model)
    assert moved.workload.checkpoint_policy.copied
    assert 0 < moved.memory.host <= moved.memory.host_usable == 36 * GIB and moved.memory.fits
    assert any(reason.startswith("host memory: ") for reason in moved.search.reasons)
    roomy = llama_config(**{**tight, "workload_batch": 16}, workload_gradient_checkpointing="auto")
    assert make_plan(roomy, llama_model).memory.host < moved.memory.host  # little is left to gain
    little = llama_config(**tight, workload_gradient_checkpointing="auto", hardware_host_gib=0)
    kept = make_plan(little, llama_model)
    assert not kept.workload.checkpoint_policy.copied and kept.memory.host == 0
    assert kept.cost.step_seconds > moved.cost.step_seconds
    with pytest.raises(InfeasibleError, match=r"moves .* GiB of activations to the host .*, and 0\.01 GiB are usable"):
        full = {"workload_gradient_checkpointing": "offload_carries", "hardware_host_gib": 0.01}
        make_plan(llama_config(**tight, **full), llama_model)


def test_hosts_have_no_more_than_the_compiler_gives_a_device(make_config):
    """Three quarters of a v6e host are 135 GiB a device, and the compiler refuses a program with more than 128."""
    assert usable_host_bytes(parse_slice("v6e-8")) == 128 * GIB
    assert usable_host_bytes(parse_slice("v5p-8")) == 84 * GIB
    with pytest.raises(ConfigError, match=r"hardware\.host_gib is 129"):
        make_config(hardware_slice="v6e-8", hardware_host_gib=129)


@pytest.mark.slow
def test_checkpointing_can_be_chosen(llama_model, llama_config):
    """With a number of microbatches that is given, or each kind would be planned with every number."""
    settings = {"workload_kind": "train", "workload_gradient_checkpointing": "auto", "workload_microbatches": 1}
    roomy = make_plan(llama_config(hardware_slice="v5p-64", workload_batch=32, **settings), llama_model)
    tight = make_plan(llama_config(hardware_slice="v5e-16", workload_batch=32, **settings), llama_model)
    matmuls = {"query_proj", "key_proj", "value_proj", "context", "attn_out", "gate_proj", "up_proj"}
    assert {*roomy.workload.checkpoint_policy.names} == matmuls  # nothing is computed again but elementwise work
    assert not matmuls <= {*tight.workload.checkpoint_policy.names}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eval", pytest.param("score", marks=pytest.mark.whole)])
def test_the_fastest_batch_that_fits(make_config, kind):
    """Of the batches that are considered none is faster by more than the tie, and no smaller one as fast."""
    arguments = {"model_config": "llama-3.1-8b", "hardware_slice": "v6e-4", "workload_position": 1024}
    arguments["workload_kind"] = kind
    config = make_config(**arguments, workload_batch="auto")
    model = model_from_config(config)
    plan = make_plan(config, model)
    rates = {}
    for batch in batches(4, 1024):
        try:
            other = make_plan(make_config(**arguments, workload_batch=batch), model)
        except InfeasibleError:
            break
        rates[batch] = batch / other.cost.step_seconds
    chosen = plan.workload.batch
    assert rates[chosen] >= (1 - TIE) * max(rates.values())
    assert all(rate < (1 - TIE) * max(rates.values()) for batch, rate in rates.items() if batch < chosen)
    assert rates[chosen] > 1.5 * rates[1]


@pytest.mark.slow
def test_an_open_batch_of_training_has_a_floor_and_a_ceiling(llama_model, llama_config, raises_message):
    """Both are needed; of the batches between them the fastest is taken, and the plan has nothing of the range."""
    settings = {"workload_kind": "train", "workload_batch": "auto", "hardware_slice": "v5e-16"}
    with raises_message(ConfigError):
        make_plan(llama_config(**settings), llama_model)
    with raises_message(ConfigError):
        replace(llama_config(), step_tokens="1M-2M")
    with raises_message(ConfigError):
        make_plan(replace(llama_config(**settings), step_tokens="820K-1M"), llama_model)
    with raises_message(ConfigError):
        make_plan(replace(llama_config(**settings), step_tokens="1K-2K"), llama_model)
    for text in ("4M", "4M-", "2M-1M", "0-1M", "a-b"):
        with raises_message(ConfigError):
            replace(llama_config(**settings), step_tokens=text)
    given = {**settings, "workload_microbatches": 1, "workload_param_dtype": "bfloat16"}
    plan = make_plan(replace(llama_config(**given), step_tokens="60K-260K"), llama_model)
    seconds = {}
    for batch in (16, 24, 32, 48):
        each = make_plan(llama_config(**{**given, "workload_batch": batch}), llama_model)
        seconds[batch] = each.cost.step_seconds / batch
    same = make_plan(llama_config(**{**given, "workload_batch": plan.workload.batch}), llama_model)
    assert (plan.workload, plan.mesh, plan.cost) == (same.workload, same.mesh, same.cost)
    fast = [batch for batch in seconds if min(seconds.values()) >= (1 - TIE) * seconds[batch]]
    assert plan.workload.batch == fast[0]


def test_batches_that_are_considered():
    """Powers of two, also times the odd part of the slice; with a floor also times three."""
    assert [b for b in batches(12, 2**17) if b < 99] == [1, 2, 3, 4, 6, 8]
    assert list(batches(8, 4096, TokenRange(1e6, 4e6))) == [256, 384, 512, 768]
    assert list(batches(20, 4096, TokenRange(1e6, 2e6))) == [256, 320, 384, 480]


@pytest.mark.parametrize(("window", "length"), [(100, 512), (128, 512), (600, 2048), (512, 512), (5000, 5120)])
def test_windows_fill_packed_sequences(window, length):
    assert packed_length(window) == length


def test_the_position_that_windows_fill_best(make_config, raises_message):
    """Windows of 100 tokens leave 12 of 512; the length of those of extraction is known later."""
    scoring = {"model_config": "llama-3.1-8b", "workload_kind": "score", "workload_position": "auto"}
    config = make_config(**scoring, workload_window=100)
    assert config.workload.position == packed_length(100) == 512
    with raises_message(ConfigError):
        make_config(**scoring)
