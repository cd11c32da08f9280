"""The sentences about a plan, and the typed values that other code decides by."""

import json
import re
from dataclasses import replace

import equinox as eqx
import haliax.nn as hnn
import jax
import pytest
from haliax.nn.scan import Stacked
from parallel_model import ParallelConfig, ParallelModel

from shardplan import load_config
from shardplan.plan.attention_plan import Strategy
from shardplan.plan.file.sections import Caveat
from shardplan.plan.plan import Plan
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan
from shardplan.search.reasons import CAVEATS, STRATEGIES, Rejection, describe_choice, describe_time


def test_every_caveat_and_strategy_has_a_sentence():
    assert set(CAVEATS) == set(Caveat) and set(STRATEGIES) == set(Strategy)


def test_a_choice_is_described():
    assert describe_choice(fits=True, evaluated=751, has_kernel=True) == (
        "fastest of 751 candidates (ties within 0.1 %: smallest memory); attention runs in a kernel"
    )
    assert describe_choice(fits=False, evaluated=7, has_kernel=True) == (
        "no plan fits; of 7 candidates this one needs the least memory"
    )


def test_overlapped_weight_gathers_are_described():
    overlapped = "compute 1.5 s, weight gathers 1.09 s (overlapped), other collectives 0.5 s"
    assert describe_time(2.0, 1.5, 1.09, 0.5 - 2e-16) == overlapped
    none = "compute 1.5 s, no weight gathers, other collectives 0.5 s"
    assert describe_time(2.0, 1.5, 0.0, 0.5) == describe_time(2.0, 1.5, 1.9e-3, 0.5) == none
    alone = "compute 2 s, weight gathers 1.09 s (overlapped), no other collectives"
    assert describe_time(2.0, 2.0 - 2e-16, 1.09, 2e-16) == alone
    exposed = "compute 1.5 s, weight gathers 1.09 s (1 s exposed), other collectives 0.5 s"
    assert describe_time(3.0, 1.5, 1.09, 0.5) == exposed


@pytest.mark.slow
def test_reasons_and_caveats_of_a_plan(llama_model, llama_config):
    plan = make_plan(llama_config(workload_batch=1), llama_model)
    assert re.fullmatch(r"fastest of \d+ candidates .*; attention runs in a kernel", plan.search.reasons[0])
    at = plan.search.reasons.index("sequence sharded over 16 devices; keys and values gathered, contiguous order")
    (others,) = plan.search.reasons[at + 1 :]
    methods = others.removeprefix("other attention methods, by time: ").split(", ")
    assert len(methods) > 1
    change = r"(same|[+-]\d+\.\d %)( \([+-]\d+\.\d\d GiB\))?"
    for method in methods:
        assert re.fullmatch(rf"(all_gather|ring|ulysses|hybrid) (contiguous|zigzag) {change}", method)
    times = [float(found[1]) for found in map(re.compile(r"([+-]\S+) %").search, methods) if found]
    assert times == sorted(times)
    assert set(plan.search.rejected) <= set(Rejection) and not plan.search.caveats


def test_caveats_round_trip(llama_model, llama_config):
    pins = ("batch=data", "position=", "mesh.replica=2", "mesh.data=4", "mesh.model=1")
    plan = make_plan(replace(llama_config(workload_batch=4, hardware_slice="v5p-16"), pin=pins), llama_model)
    assert plan.search.caveats == [Caveat.REPEATED_WORK]
    assert CAVEATS[Caveat.REPEATED_WORK] in plan.search.reasons
    values = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(values) == plan
    assert all(isinstance(caveat, Caveat) for caveat in Plan.from_json(values).search.caveats)
    del values["search"]["caveats"]  # plans of version 0.1 have none
    assert Plan.from_json(values).search.caveats == []


@pytest.mark.slow
def test_a_mesh_axis_that_shards_no_tokens_shards_no_parameters(llama_model, llama_config):
    """The compiler would slice activations, which is not modelled; only a pin stores parameters so, with a caveat.

    Devices along that mesh axis repeat the same work: only pins, of the mesh and of the batch, make such a plan.
    """
    config = llama_config(workload_batch=4, hardware_slice="v5p-16")
    pins = ("batch=data", "position=", "mesh.replica=2", "mesh.data=4", "mesh.model=1")
    free = make_plan(replace(config, pin=pins), llama_model)
    assert free.search.caveats == [Caveat.REPEATED_WORK]
    assert CAVEATS[Caveat.REPEATED_WORK] in free.search.reasons
    assert not any("replica" in mesh_axes for mesh_axes in free.param_mapping.values())
    pinned = make_plan(replace(config, pin=(*pins, "params.embed=replica")), llama_model)
    assert pinned.search.caveats == [Caveat.SLICED_ACTIVATIONS, Caveat.REPEATED_WORK]
    given = plan_given_mappings(config, llama_model, pinned.mesh, pinned.compute_mapping, pinned.param_mapping)
    assert given.search.caveats == pinned.search.caveats
    assert not make_plan(config, llama_model).search.caveats
    sentence = CAVEATS[Caveat.SLICED_ACTIVATIONS]
    assert sentence in pinned.search.reasons and sentence in given.search.reasons


class MlpBlock(eqx.Module):
    """A layer without attention."""

    norm: hnn.RmsNorm
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(config, *, key):
        keys = jax.random.split(key, 2)
        return MlpBlock(
            hnn.RmsNorm.init(config.Embed, use_bias=False),
            hnn.Linear.init(config.Embed, config.Ffn, key=keys[0], use_bias=False),
            hnn.Linear.init(config.Ffn, config.Embed, key=keys[1], use_bias=False),
        )

    def __call__(self, x, mask):
        return x + self.down(hnn.gelu(self.up(self.norm(x))))


class MlpModel(ParallelModel):
    @classmethod
    def init(cls, Vocab, config, *, key):
        model = super().init(Vocab, config, key=key)
        blocks = Stacked.init(config.Layers, MlpBlock, gradient_checkpointing=True)
        return eqx.tree_at(lambda each: each.blocks, model, blocks(config, key=jax.random.split(key, config.depth)))


class MlpConfig(ParallelConfig):
    @property
    def model_type(self):
        return MlpModel


@pytest.mark.slow
@pytest.mark.parametrize("workload", [{}, {"kind": "train", "microbatches": 1}, {"kind": "prefill", "batch": 1}])
def test_kernels_are_said_of_models_that_have_some(tmp_path, workload):
    """Neither in the reasons of the plan nor in what is printed of it; the same model with attention says it."""
    sizes = {"width": 256, "depth": 2, "groups": 4, "queries": 2, "head_width": 128, "ffn": 512, "positions": 512}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "own", "vocab_size": 512, **sizes}))
    settings = {"batch": 8, "position": 512, **workload}
    texts = []
    for name in (f"{__name__}:MlpConfig", "parallel_model:ParallelConfig"):
        section = {"config": str(path), "levanter_class": name}
        plan = make_plan(load_config(model=section, hardware={"slice": "v6e-4"}, workload=settings))
        texts.append(f"{plan} {plan.search.reasons} {plan.search.caveats}")
    assert "attention" not in texts[0]
    assert "attention runs in a kernel" in texts[1]
