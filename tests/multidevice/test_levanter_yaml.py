"""With the printed YAML Levanter has a plan's mesh, batch and shardings."""

import json
import logging
import math
from dataclasses import dataclass, replace

import draccus
import equinox as eqx
import haliax as hax
import jax
import jmp
import levanter.tracker
import numpy as np
import optax
import pytest
import yaml
from haliax.partitioning import pspec_for_axis
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.data.dataset import ListAsyncDataset
from levanter.models.lm_model import LmExample
from levanter.trainer import Trainer, TrainerConfig

from shardplan.experts.method import ExpertMethod
from shardplan.hardware.mesh_axes import MESH_AXES
from shardplan.levanter_config.mesh_section import DCN_AXES
from shardplan.levanter_config.trainer_section import parse_trainer_section
from shardplan.levanter_config.writer import trainer_yaml
from shardplan.model.bundled_configs import BUNDLED
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan, model_from_config

OPTIMIZER = optax.sgd(0.1)


@pytest.fixture
def shrunken_config(make_config, tmp_path):
    """Make a configuration for a published model with two layers, or for a golden one."""

    def make(model, **overrides):
        if model not in BUNDLED:
            return make_config(model_ref=f"tests/golden/data/{model}", **overrides)
        config = json.loads(BUNDLED[model].read_text()) | {"num_hidden_layers": 2}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return make_config(model_config=path, **overrides)

    return make


def given_plan(config, mesh, compute, params):
    """The plan of a given mesh, as (replica, data, model), and given mappings."""
    sizes = dict(zip(("replica", "data", "model"), mesh, strict=True))
    return plan_given_mappings(config, model_from_config(config), sizes, compute, params)


def parse_printed(plan):
    """Parse the printed text: the trainer section, and comments."""
    return yaml.safe_load(trainer_yaml(plan))["trainer"]


def decode_trainer(plan):
    """Build the configuration that a Levanter program has after `initialize`."""
    trainer = draccus.decode(TrainerConfig, parse_printed(plan))
    trainer._validate_and_set_defaults()
    return trainer


def sharded_axes(mapping, mesh):
    """Remove mesh axes of size 1 and unsharded logical axes from a mapping of Levanter or shardplan."""
    as_tuples = {axis: (v,) if isinstance(v, str) else tuple(v or ()) for axis, v in mapping.items()}
    kept = {axis: tuple(a for a in axes if mesh.get(a, 1) > 1) for axis, axes in as_tuples.items()}
    return {axis: axes for axis, axes in kept.items() if axes}


def mesh_of(trainer):
    """The mesh of a Levanter program on one slice: that of a plan, and axes across slices, of one device."""
    shape = dict(trainer.device_mesh.shape)
    assert all(shape.pop(axis, 1) == 1 for axis in DCN_AXES.values())
    return {axis: shape[axis] for axis in sorted(shape, key=MESH_AXES.index)}


def spec_of(parameter):
    return PartitionSpec(*(tuple(mesh_axes) if mesh_axes else None for mesh_axes in parameter.spec))


@dataclass
class Case:
    """A plan on eight devices: searched for, or with a given mesh and mappings."""

    model: str
    workload: dict
    given: tuple | None = None
    """Sizes of the mesh and both mappings; None to search for them."""

    def plan(self, shrunken_config):
        config = shrunken_config(self.model, **({"hardware_slice": "v4-16", "workload_position": 2048} | self.workload))
        return make_plan(config) if self.given is None else given_plan(config, *self.given)


CUBE = (2, 2, 2)
TENSOR = {"kv_head": ["model"], "mlp": ["model", "replica"]}
CASES = {
    "data alone": Case("llama-3.1-8b", {}),
    "stored on model x data": Case(
        "llama-3.1-8b", {}, ((1, 4, 2), {"batch": ["data"], "mlp": ["model"]}, {"mlp": ["model", "data"]})
    ),
    "replica": Case("llama-3.1-8b", {"workload_batch": 4, "mesh_replica": 2, "workload_position": 4096}),
    "train": Case("llama-3.1-8b", {"workload_kind": "train", "workload_batch": 16, "workload_microbatches": 1}),
    "larger model with replica": Case("llama-3.1-405b", {"workload_batch": 4, "mesh_replica": 2}),
    "experts": Case("mixtral-8x7b", {"workload_batch": 2}),
    "position": Case(
        "llama-3.1-8b",
        {"hardware_slice": "cpu-8", "workload_kind": "prefill", "workload_batch": 1, "workload_position": 4096},
    ),
    # two sequences, for four devices of replica and data
    "batch on data alone": Case(
        "llama-3.1-8b",
        {"workload_batch": 2},
        (CUBE, {"batch": ["data"], **TENSOR}, {"embed": ["data"], **TENSOR}),
    ),
    "batch alone": Case("llama-3.1-8b", {}, (CUBE, {"batch": ["replica"], "position": ["data"]}, {"mlp": ["model"]})),
    "batch on nothing": Case("llama-3.1-8b", {"workload_batch": 1}, (CUBE, {"mlp": ["model"]}, {"mlp": ["model"]})),
    # by default, Levanter stores parameters with their compute sharding
    "stored replicated": Case("llama-3.1-8b", {}, ((1, 4, 2), {"batch": ["data"], "mlp": ["model"]}, {})),
    # GPT-2 has parameters with positions, which would have the mesh axis on two dimensions
    "position embeddings": Case(
        "gpt2",
        {"workload_position": 16},
        (CUBE, {"batch": ["replica", "data"], "position": ["model"]}, {"embed": ["model"]}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_levanter_and_shardplan_parse_the_plan(shrunken_config, name, caplog):
    """shardplan's own parser maps the batch and all other axes as Levanter does."""
    plan = CASES[name].plan(shrunken_config)
    with caplog.at_level(logging.ERROR):
        trainer = decode_trainer(plan)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert mesh_of(trainer) == plan.mesh
    for parameter in plan.parameters:
        assert pspec_for_axis(parameter.axes, trainer.parameter_axis_mapping) == spec_of(parameter), parameter.path
    assert sharded_axes(trainer.compute_axis_mapping, plan.mesh) == sharded_axes(plan.compute_mapping, plan.mesh)
    assert trainer.TrainBatch == trainer.EvalBatch == hax.Axis("batch", plan.workload.batch)
    assert trainer.microbatch_size == plan.workload.batch
    assert trainer.mp == jmp.get_policy(f"p={plan.workload.param_dtype},c={plan.workload.compute_dtype}")
    parsed = parse_trainer_section(parse_printed(plan), plan.hardware.devices)
    compute, planned = (sharded_axes(m, plan.mesh) for m in (parsed.compute_mapping, plan.compute_mapping))
    assert parsed.mesh == plan.mesh and compute == planned and parsed.batch == plan.workload.batch
    assert parsed.param_mapping == plan.param_mapping


@pytest.mark.parametrize(
    ("mesh", "across", "within"),
    [
        ((2, 4, 2), {"replica_dcn": 2, "data_dcn": 2}, {"replica": 1, "data": 2, "model": 2}),
        ((1, 8, 2), {"data_dcn": 4}, {"replica": 1, "data": 2, "model": 2}),
        ((8, 1, 2), {"replica_dcn": 4}, {"replica": 2, "data": 1, "model": 2}),
    ],
)
def test_slices_split_replica_first(shrunken_config, mesh, across, within):
    """As in the plan's own mesh; data has the remaining slices."""
    config = shrunken_config("llama-3.1-8b", hardware_slice="4xv5e-4")
    plan = given_plan(config, mesh, {"batch": ["replica", "data"]}, {"mlp": ["model"]})
    section = parse_printed(plan)
    assert section["mesh"]["dcn_axes"] == across and section["mesh"]["axes"] == within
    assert parse_trainer_section(section, plan.hardware.devices, 4).mesh == plan.mesh
    sizes = draccus.decode(TrainerConfig, section).mesh.axis_shapes(16, 4)
    assert sizes == (within, {"replica_dcn": 1, **across})


@pytest.mark.parametrize("batch", [["replica", "data"], []])
@pytest.mark.parametrize("mesh", [(2, 4, 2), (1, 8, 2), (8, 1, 2)])
def test_every_mesh_over_slices_is_expressed(shrunken_config, mesh, batch):
    """Levanter's mesh has the sizes of the plan's, whichever axes cross slices, and the same devices share a shard."""
    config = shrunken_config("llama-3.1-8b", hardware_slice="4xv5e-4", workload_batch=16)
    plan = given_plan(config, mesh, {"batch": batch, "mlp": ["data", "model"]}, {"mlp": ["replica", "model"]})
    section = parse_printed(plan)
    parsed = parse_trainer_section(section, plan.hardware.devices, 4)
    assert parsed.mesh == plan.mesh and parsed.param_mapping == plan.param_mapping
    assert parsed.compute_mapping == {axis: axes for axis, axes in plan.compute_mapping.items() if axes}
    trainer = draccus.decode(TrainerConfig, section)
    within, across = trainer.mesh.axis_shapes(16, 4)
    assert {axis: within[axis] * across.get(DCN_AXES.get(axis), 1) for axis in plan.mesh} == plan.mesh
    sizes = within | across
    assert section["mesh"]["compute_mapping"]["batch"] is not None  # Levanter's data loader needs a mesh axis
    for ours, theirs in (
        (plan.compute_mapping, trainer.compute_axis_mapping), (plan.param_mapping, trainer.parameter_axis_mapping)
    ):  # fmt: skip
        shards = {axis: math.prod(sizes[a] for a in axes) for axis, axes in sharded_axes(theirs, sizes).items()}
        assert shards == {axis: math.prod(plan.mesh[a] for a in axes) for axis, axes in ours.items() if axes}


@pytest.mark.parametrize(("axis", "is_wrong"), [("position", False), ("head_size", True)])
def test_warning_about_attention_that_would_be_wrong(shrunken_config, axis, is_wrong):
    mesh_and_mappings = ((1, 4, 2), {"batch": ["data"], axis: ["model"]}, {})
    for hardware, is_warned in (("v4-16", is_wrong), ("cpu-8", False)):
        config = shrunken_config("llama-3.1-8b", hardware_slice=hardware)
        text = trainer_yaml(given_plan(config, *mesh_and_mappings))
        assert (f"# model.attn_backend must be jax_flash: with {axis} sharded, " in text) == is_warned


@pytest.mark.parametrize("compute", [{"vocab": ["model"]}, {}])
def test_warning_about_losses_that_would_be_wrong(shrunken_config, compute):
    plan = given_plan(shrunken_config("llama-3.1-8b"), (1, 4, 2), {"batch": ["data"], **compute}, {"vocab": ["model"]})
    assert ("# Call shardplan.patch_levanter() first, " in trainer_yaml(plan)) == bool(compute)


@pytest.mark.parametrize(
    ("attention", "method", "order"),
    [
        (AttentionPlan("all_gather", 1, 8), '"all_gather"', ""),
        (
            AttentionPlan("ring", 1, 8, "zigzag", "splash"),
            '"ring", kernel="splash", layout=layout',
            '2048, 8, 1, "zigzag"',
        ),
        (AttentionPlan("ulysses", 8, kernel="splash"), '"ulysses", ulysses=8, kernel="splash"', ""),
    ],
)
def test_printed_call_of_the_planned_attention(shrunken_config, attention, method, order):
    workload = {"workload_batch": 1, "workload_position": 2048, "model_levanter_class": "levanter"}
    plan = make_plan(shrunken_config("llama-3.1-8b", hardware_slice="v4-16", **workload))
    text = trainer_yaml(replace(plan, attention=attention))
    assert f"#     method = Method({method})\n#     model = with_sequence_parallel(model, method)\n" in text
    assert (f"#     layout = SequenceLayout({order})\n" in text) == bool(order)
    assert ("#     sequence = shard_sequence(example, layout)\n" in text) == bool(order)
    assert "attn_backend" not in text


@pytest.mark.parametrize(
    ("experts", "first", "replaced"),
    [
        (ExpertMethod(), "patch_levanter() first, as scripts/levanter_main.py does,", '"gather_tokens"'),
        (ExpertMethod("exchange_tokens"), 'patch_levanter(ExpertMethod("exchange_tokens")) first', '"exchange_tokens"'),
    ],
)
def test_printed_calls_of_the_planned_experts(shrunken_config, experts, first, replaced):
    config = shrunken_config("mixtral-8x7b", hardware_slice="v5p-64", model_levanter_class="levanter")
    plan = given_plan(config, (1, 8, 4), {"batch": ["data"], "experts": ["data"]}, {"experts": ["data"]})
    assert "ExpertMethod" not in trainer_yaml(replace(plan, experts=None))
    text = trainer_yaml(replace(plan, experts=experts))
    assert first in " ".join(text.replace("\n#", "").split())
    assert f"#     model = with_expert_parallel(model, ExpertMethod({replaced}))\n" in text


def test_class_of_the_model_that_the_section_is_for(shrunken_config):
    """Levanter's programs gather all keys where positions of the decoder are sharded."""
    settings = {"hardware_slice": "v4-16", "workload_batch": 1, "workload_position": 2048}
    plan = make_plan(shrunken_config("llama-3.1-8b", **settings))
    text = " ".join(trainer_yaml(plan).replace("\n#", "").split())
    assert (
        "model.type must be shardplan_decoder; for Levanter's llama, plan with --model.levanter_class levanter." in text
    )
    assert "run shardplan eval instead, or plan with --pin position=" in text and "with_sequence_parallel" not in text
    unsharded = make_plan(shrunken_config("pythia-12b", **settings, pin="position="))
    text = trainer_yaml(unsharded)
    assert "# model.type must be shardplan_decoder.\n" in text and "shardplan eval" not in text


def test_printed_gradient_checkpointing(shrunken_config):
    workload = {"workload_kind": "train", "workload_param_dtype": "bfloat16", "workload_microbatches": 1}
    text = trainer_yaml(
        make_plan(shrunken_config("llama-3.1-8b", workload_gradient_checkpointing="nested", **workload))
    )
    assert "# model.gradient_checkpointing must be nested, as planned." in text


GIVEN_PLANS = {
    "yaml": (CUBE, {"batch": ["replica", "data"], "mlp": ["model"]}, {"mlp": ["model"], "embed": ["data"]}),
    "batch on data alone": (
        CUBE,
        {"batch": ["data"], "vocab": ["model", "replica"], **TENSOR},
        {"embed": ["data"], "vocab": ["model", "replica"], **TENSOR},
    ),
    "batch on nothing": (CUBE, {"position": ["data"], **TENSOR}, {"mlp": ["model", "replica", "data"]}),
    "experts": (
        CUBE,
        {"batch": ["replica", "data"], "experts": ["data"], "mlp": ["model"]},
        {"experts": ["data"], "mlp": ["model", "replica"]},
    ),
}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("yaml", "llama"),
        ("experts", "mixtral"),
        *(
            pytest.param(name, family, marks=pytest.mark.whole)
            for name, family in (
                ("batch on data alone", "llama"), ("batch on nothing", "llama"), ("yaml", "gemma"), ("yaml", "olmo2")
            )
        ),
    ],
)  # fmt: skip
def test_levanter_trains_with_the_plan(make_config, golden, tmp_path, request, name, family):
    """Levanter's Trainer loads, shards and steps as planned, and has the same loss as Levanter's own model, unplanned.

    The loss of a router is that of the whole batch.
    """
    config = make_config(
        model_ref=golden / family,
        workload_kind="train",
        workload_batch={"batch on data alone": 2, "yaml": 8}.get(name, 4),
        workload_microbatches=2 if name == "yaml" else 1,
        workload_position=256,
        workload_param_dtype="float32",
        workload_compute_dtype="float32",
    )
    model = model_from_config(config)
    plan = given_plan(config, *GIVEN_PLANS[name])
    position, key = model.template.Pos, jax.random.PRNGKey(0)
    rows = [(np.arange(position.size, dtype=np.int32) * (row + 7)) % 200 for row in range(plan.workload.batch)]
    examples = [LmExample.causal(hax.named(row, (position,))) for row in rows]

    def init():
        return model.config.model_type.init(model.vocab, model.config, key=key)

    untrained = init()
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), MESH_AXES)):
        tokens, weights = (
            hax.stack("batch", [getattr(each, key) for each in examples]) for key in ("tokens", "loss_weight")
        )
        batch = LmExample(tokens=tokens, loss_weight=weights, attn_mask=examples[0].attn_mask)
        unplanned = float(eqx.filter_jit(mean_loss)(untrained, batch))
    request.getfixturevalue("patched_levanter")
    trainer = decode_trainer(plan)
    assert trainer.microbatch_size == plan.workload.batch // plan.workload.microbatches
    trainer.tracker, trainer.id = levanter.tracker.NoopConfig(), name
    trainer.checkpointer.base_path = str(tmp_path)
    trainer.log_jaxprs = trainer.log_xla_hlo = False
    with levanter.tracker.current_tracker(trainer.tracker.init(name)), Trainer(trainer, OPTIMIZER, mean_loss) as run:
        example = next(iter(run.data_loader(ListAsyncDataset(examples))))
        info = run.train_step(run.initial_state(key, model_init=init), example)
    tokens = example.tokens
    mesh = tokens.array.sharding.mesh
    assert mesh_of(trainer) == plan.mesh
    on_plan = NamedSharding(mesh, pspec_for_axis(tokens.axes, {a: tuple(m) for a, m in plan.compute_mapping.items()}))
    assert tokens.array.sharding.is_equivalent_to(on_plan, 2)
    arrays = [a for a in jax.tree.leaves(info.state.model, is_leaf=eqx.is_array) if eqx.is_array(a)]
    assert len(arrays) == len(plan.parameters)
    for array, parameter in zip(arrays, plan.parameters, strict=True):
        assert array.shape == tuple(parameter.axes.values())
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec_of(parameter)), array.ndim), parameter.path
    assert float(info.loss) == pytest.approx(unplanned, rel=1e-5)


def mean_loss(model, example, key=None):
    """Mean of Levanter's losses over all targets."""
    return (hax.sum(model.compute_next_token_loss(example, reduction=None)) / hax.sum(example.loss_weight)).scalar()
