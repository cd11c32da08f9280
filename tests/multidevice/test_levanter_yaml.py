"""With the printed YAML, and the Python that the flat schema needs, Levanter has a plan's mesh, batch and shardings."""

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
from conftest import levanter_losses, loss_weights
from haliax.partitioning import pspec_for_axis
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.data.dataset import ListAsyncDataset
from levanter.models.lm_model import LmExample
from levanter.trainer import Trainer, TrainerConfig

from shardplan.levanter_config.mesh_schema import DCN_AXES
from shardplan.levanter_config.trainer_section import parse_trainer_section
from shardplan.levanter_config.writer import trainer_yaml
from shardplan.model.bundled_configs import BUNDLED
from shardplan.model.levanter_compat import IS_MARIN, TrainerSchema
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.plan.mesh_axes import MESH_AXES
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan, model_from_config

OPTIMIZER = optax.sgd(0.1)
USE_CLASS = "# Use this class instead of TrainerConfig:\n"


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
    """Parse the printed text: the trainer section, and the class for it, Levanter's own or the one in the comment."""
    text = trainer_yaml(plan)
    section, (_, _, comment) = yaml.safe_load(text)["trainer"], text.partition(USE_CLASS)
    names = {}
    exec("\n".join(line.removeprefix("# ") for line in comment.splitlines() if line != "#"), names)
    return section, names.get("PlannedTrainerConfig", TrainerConfig)


def decode_trainer(plan):
    """Build the configuration that a Levanter program has after `initialize`."""
    section, config_class = parse_printed(plan)
    trainer = draccus.decode(config_class, section)
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
    needs_python: bool | None
    """Whether YAML alone cannot express it; None if that depends on the search."""
    given: tuple | None = None
    """Sizes of the mesh and both mappings; None to search for them."""

    def plan(self, shrunken_config):
        config = shrunken_config(self.model, **({"hardware_slice": "v4-16", "workload_position": 2048} | self.workload))
        return make_plan(config) if self.given is None else given_plan(config, *self.given)


CUBE = (2, 2, 2)
TENSOR = {"kv_head": ["model"], "mlp": ["model", "replica"]}
CASES = {
    "data alone": Case("llama-3.1-8b", {}, None),
    "stored on model x data": Case(
        "llama-3.1-8b", {}, True, ((1, 4, 2), {"batch": ["data"], "mlp": ["model"]}, {"mlp": ["model", "data"]})
    ),
    "replica": Case("llama-3.1-8b", {"workload_batch": 4, "mesh_replica": 2, "workload_position": 4096}, None),
    "train": Case(
        "llama-3.1-8b", {"workload_kind": "train", "workload_batch": 16, "workload_param_dtype": "float32"}, None
    ),
    "replica, no lists": Case("llama-3.1-405b", {"workload_batch": 4, "mesh_replica": 2}, None),
    "experts": Case("mixtral-8x7b", {"workload_batch": 2}, None),
    "position": Case(
        "llama-3.1-8b",
        {"hardware_slice": "cpu-8", "workload_kind": "prefill", "workload_batch": 1, "workload_position": 4096},
        None,
    ),
    # two sequences for four batch shards, as Levanter counts them
    "batch on data alone": Case(
        "llama-3.1-8b",
        {"workload_batch": 2},
        True,
        (CUBE, {"batch": ["data"], **TENSOR}, {"embed": ["data"], **TENSOR}),
    ),
    "batch alone": Case(
        "llama-3.1-8b", {}, True, (CUBE, {"batch": ["replica"], "position": ["data"]}, {"mlp": ["model"]})
    ),
    "batch on nothing": Case(
        "llama-3.1-8b", {"workload_batch": 1}, True, (CUBE, {"mlp": ["model"]}, {"mlp": ["model"]})
    ),
    # by default, Levanter stores parameters with their compute sharding
    "stored replicated": Case("llama-3.1-8b", {}, False, ((1, 4, 2), {"batch": ["data"], "mlp": ["model"]}, {})),
    # GPT-2 has parameters with positions, which would have the mesh axis on two dimensions
    "position embeddings": Case(
        "gpt2",
        {"workload_position": 16},
        False,
        (CUBE, {"batch": ["replica", "data"], "position": ["model"]}, {"embed": ["model"]}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_levanter_parses_the_plan(shrunken_config, name, caplog):
    plan = CASES[name].plan(shrunken_config)
    with caplog.at_level(logging.ERROR):
        trainer = decode_trainer(plan)
    if CASES[name].needs_python is not None:
        assert (type(trainer) is not TrainerConfig) == (CASES[name].needs_python and not IS_MARIN)
    assert mesh_of(trainer) == plan.mesh
    for parameter in plan.parameters:
        assert pspec_for_axis(parameter.axes, trainer.parameter_axis_mapping) == spec_of(parameter), parameter.path
    assert sharded_axes(trainer.compute_axis_mapping, plan.mesh) == sharded_axes(plan.compute_mapping, plan.mesh)
    assert trainer.TrainBatch == trainer.EvalBatch == hax.Axis("batch", plan.workload.batch)
    assert trainer.microbatch_size == plan.workload.batch
    assert trainer.mp == jmp.get_policy(f"p={plan.workload.param_dtype},c={plan.workload.compute_dtype}")


@pytest.mark.parametrize("name", CASES)
def test_shardplan_parses_the_plan(shrunken_config, name):
    """shardplan's own parser accepts lists of mesh axes, and maps the batch as Levanter does."""
    plan = CASES[name].plan(shrunken_config)
    section, config_class = parse_printed(plan)
    parsed = parse_trainer_section(section, plan.hardware.devices)
    compute, planned = (dict(sharded_axes(m, plan.mesh)) for m in (parsed.compute_mapping, plan.compute_mapping))
    if config_class is not TrainerConfig:  # the class maps the batch, which YAML cannot
        compute.pop("batch", None)
        planned.pop("batch", None)
    assert parsed.mesh == plan.mesh and compute == planned and parsed.batch == plan.workload.batch
    stored = {axis: mesh_axes for axis, mesh_axes in parsed.param_mapping.items() if axis != "batch"}
    assert stored == plan.param_mapping


@pytest.mark.skipif(IS_MARIN, reason="the flat schema is that of levanter 1.2")
@pytest.mark.parametrize(("mesh", "replica"), [((2, 4, 2), (2, 1)), ((1, 8, 2), (1, 1)), ((8, 1, 2), (4, 2))])
def test_slices_split_replica_first(shrunken_config, monkeypatch, mesh, replica):
    """As in the plan's own mesh; Levanter gives data the remaining slices."""
    config = shrunken_config("llama-3.1-8b", hardware_slice="4xv5e-4")
    plan = given_plan(config, mesh, {"batch": ["replica", "data"]}, {"mlp": ["model"]})
    section, _ = parse_printed(plan)
    assert (section["replica_dcn_axis_size"], section["replica_ici_axis_size"]) == replica
    assert parse_trainer_section(section, plan.hardware.devices, 4).mesh == plan.mesh
    monkeypatch.setattr("jax.device_count", lambda: 16)
    trainer = draccus.decode(TrainerConfig, section)
    trainer.num_slices = 4
    sizes = trainer.replica_axis_size, trainer.data_axis_size // trainer.replica_axis_size, trainer.model_axis_size
    assert sizes == mesh


@pytest.mark.skipif(not IS_MARIN, reason="the mesh schema is that of marin-levanter")
@pytest.mark.parametrize("batch", [["replica", "data"], []])
@pytest.mark.parametrize("mesh", [(2, 4, 2), (1, 8, 2), (8, 1, 2)])
def test_every_mesh_over_slices_is_expressed(shrunken_config, mesh, batch):
    """Levanter's mesh has the sizes of the plan's, whichever axes cross slices, and the same devices share a shard."""
    config = shrunken_config("llama-3.1-8b", hardware_slice="4xv5e-4", workload_batch=16)
    plan = given_plan(config, mesh, {"batch": batch, "mlp": ["data", "model"]}, {"mlp": ["replica", "model"]})
    section, _ = parse_printed(plan)
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


@pytest.mark.parametrize("schema", TrainerSchema)
@pytest.mark.parametrize("axis", ["position", "head_size"])
def test_warning_about_attention_that_would_be_wrong(shrunken_config, axis, schema):
    mesh_and_mappings = ((1, 4, 2), {"batch": ["data"], axis: ["model"]}, {})
    is_wrong = axis == "head_size" or schema == TrainerSchema.FLAT
    for hardware, is_warned in (("v4-16", is_wrong), ("cpu-8", False)):
        config = shrunken_config("llama-3.1-8b", hardware_slice=hardware)
        text = trainer_yaml(given_plan(config, *mesh_and_mappings), schema)
        assert (f"# model.attn_backend must be jax_flash: with {axis} sharded, " in text) == is_warned


@pytest.mark.parametrize("schema", TrainerSchema)
@pytest.mark.parametrize("compute", [{"vocab": ["model"]}, {}])
def test_warning_about_losses_that_would_be_wrong(shrunken_config, compute, schema):
    plan = given_plan(shrunken_config("llama-3.1-8b"), (1, 4, 2), {"batch": ["data"], **compute}, {"vocab": ["model"]})
    is_wrong = bool(compute) and schema == TrainerSchema.MESH
    assert ("# Call shardplan.patch_levanter() first, " in trainer_yaml(plan, schema)) == is_wrong


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
    plan = make_plan(shrunken_config("llama-3.1-8b", hardware_slice="v4-16", workload_batch=1, workload_position=2048))
    text = trainer_yaml(replace(plan, attention=attention))
    assert f"#     method = Method({method})\n#     model = with_sequence_parallel(model, method)\n" in text
    assert (f"#     layout = SequenceLayout({order})\n" in text) == bool(order)
    assert ("#     sequence = shard_sequence(example, layout)\n" in text) == bool(order)
    assert "attn_backend" not in text


def test_printed_gradient_checkpointing(shrunken_config):
    workload = {"workload_kind": "train", "workload_param_dtype": "bfloat16"}
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
}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("yaml", "llama"),
        *(
            pytest.param(name, family, marks=pytest.mark.whole)
            for name, family in (
                ("batch on data alone", "llama"), ("batch on nothing", "llama"), ("yaml", "gemma"), ("yaml", "olmo2")
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("patched_levanter")
def test_levanter_trains_with_the_plan(make_config, golden, tmp_path, name, family):
    """Levanter's Trainer loads, shards and steps as planned, and has the same loss as without a plan."""
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
        unplanned = np.mean([float(eqx.filter_jit(mean_loss)(untrained, example)) for example in examples])
    trainer = decode_trainer(plan)
    assert trainer.microbatch_size == plan.workload.batch // plan.workload.microbatches
    trainer.tracker, trainer.id = levanter.tracker.NoopConfig(), name
    trainer.checkpointer.base_path = str(tmp_path)
    trainer.log_jaxprs = trainer.log_xla_hlo = False
    with levanter.tracker.current_tracker(trainer.tracker.init(name)), Trainer(trainer, OPTIMIZER, mean_loss) as run:
        example = next(iter(run.data_loader(list_dataset(examples))))
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


def list_dataset(examples):
    """Levanter's data set of a list."""
    return ListAsyncDataset(examples) if IS_MARIN else ListAsyncDataset(examples, is_complete=True)


def mean_loss(model, example, key=None):
    """Mean loss as Levanter computes it; its own mean fails with levanter 1.2 on JAX 0.10."""
    return (hax.sum(levanter_losses(model, example)) / hax.sum(loss_weights(example))).scalar()


@pytest.mark.skipif(IS_MARIN, reason="the mesh schema has lists")
def test_a_list_without_the_class_raises(make_config, golden):
    """Without the class, JAX raises an error instead of computing with replicated parameters."""
    config = make_config(model_ref=golden / "llama", workload_position=16)
    plan = given_plan(config, CUBE, {"batch": ["replica", "data"]}, {"mlp": ["model", "data"]})
    trainer = draccus.decode(TrainerConfig, parse_printed(plan)[0])
    with trainer.use_device_mesh(), pytest.raises(ValueError, match=r"\['model', 'data'\]"):
        hax.shard(hax.zeros(hax.Axis("mlp", 8)), trainer.parameter_axis_mapping)
