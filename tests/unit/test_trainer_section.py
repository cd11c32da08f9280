"""A trainer section has the mesh, mappings, types and batch that Levanter has of it."""

import draccus
import pytest
from levanter_sections import BATCH, assert_levanter_agrees, mesh, read_trainer

from shardplan.errors import ConfigError
from shardplan.levanter_config.trainer_section import DEFAULT_TRAIN_BATCH_SIZE


def test_an_empty_trainer_has_the_defaults():
    assert read_trainer({}) == read_trainer({"mesh": {}})
    assert (read_trainer({}).batch, read_trainer({}).param_dtype, read_trainer({}).compute_dtype) == (
        None,
        "float32",
        "float32",
    )


def test_mesh():
    section = read_trainer(
        """
        mp: params=float16
        train_batch_size: 32
        mesh:
          axes: {model: 4, replica: 2}
          shared_mapping: {heads: null, vocab: model}
          compute_mapping: {token: [replica_dcn, replica, data], kv_head: model}
          param_mapping: {embed: [data, model], mlp: [replica_dcn, data]}
        """,
        devices=64,
    )
    assert section.mesh == mesh(2, 8, 4)
    assert list(section.mesh) == ["replica", "data", "model"]
    assert section.compute_mapping == {
        "mlp": ["model"],
        "vocab": ["model"],
        "kv_head": ["model"],
        "token": BATCH,
        "batch": BATCH,
    }
    assert section.param_mapping == {"mlp": ["data"], "vocab": ["model"], "embed": ["data", "model"]}
    assert (section.batch, section.param_dtype, section.compute_dtype) == (32, "float16", "float16")


def test_mesh_defaults():
    section = read_trainer({"mesh": {}})
    assert section.mesh == mesh(1, 8, 1)
    assert section.compute_mapping == {"mlp": ["model"], "heads": ["model"], "batch": BATCH}
    assert section.param_mapping == {"mlp": ["model"], "heads": ["model"], "embed": ["data"]}
    assert read_trainer({"mesh": {"param_mapping": {}}}).param_mapping == {"mlp": ["model"], "heads": ["model"]}


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"model": -1}, mesh(1, 1, 8)),  # data gives way where it was not given
        ({"model": -1, "replica": 2}, mesh(2, 1, 4)),
        ({"model": -1, "data": 2}, mesh(1, 2, 4)),
        ({"model": 2, "data": 4}, mesh(1, 4, 2)),
        ({"replica": -1, "data": 1}, mesh(8, 1, 1)),
        ({"data": -1, "replica": 1, "model": 8}, mesh(1, 1, 8)),
    ],
)
def test_an_axis_of_size_minus_one_takes_the_remaining_devices(axes, expected):
    assert read_trainer({"mesh": {"axes": axes}}).mesh == expected


@pytest.mark.parametrize(
    ("section", "batch"),
    [
        ({}, {"batch": BATCH}),
        ({"batch_axis_name": "row"}, {"row": BATCH}),
        ({"batch_axis_name": None}, {}),
        ({"batch_axis_name": "row", "compute_mapping": {"batch": "data"}}, {"row": ["data"], "batch": ["data"]}),
        ({"batch_axis_name": "row", "compute_mapping": {"row": "replica"}}, {"row": ["replica"]}),
        ({"shared_mapping": {"batch": "data"}}, {"batch": ["data"]}),
        ({"compute_mapping": {"batch": None}}, {}),
    ],
)
def test_batch_axis_of_the_mesh_schema(section, batch):
    assert read_trainer({"mesh": section}).compute_mapping == {"mlp": ["model"], "heads": ["model"], **batch}


def test_mesh_over_slices(raises_message):
    mappings = {"param_mapping": {"a": "replica", "b": "replica_dcn", "c": ["data", "replica_dcn"]}}
    section = read_trainer({"mesh": mappings}, devices=64, slices=4)
    assert section.mesh == mesh(4, 16, 1)
    assert section.compute_mapping["batch"] == BATCH
    # within a slice replica is of size 1
    assert section.param_mapping == {"mlp": ["model"], "heads": ["model"], "b": ["replica"], "c": ["data", "replica"]}

    both = {"axes": {"replica": 2}, "dcn_axes": {"replica_dcn": 4}}
    section = read_trainer({"mesh": both}, devices=64, slices=4)
    assert section.mesh == mesh(8, 8, 1)
    assert section.compute_mapping["batch"] == BATCH
    with raises_message(ConfigError):
        read_trainer({"mesh": both | {"param_mapping": {"a": "replica"}}}, devices=64, slices=4)
    with raises_message(ConfigError):
        read_trainer({"mesh": both | {"shared_mapping": {"b": ["replica", "replica_dcn"]}}}, devices=64, slices=4)


BATCH_OVER_SLICES = {"batch": ["replica_dcn", "replica", "data_dcn", "data"]}
MESH_SECTIONS = [
    {},
    {"axes": {"model": 2}},
    {"axes": {"model": -1}},
    {"axes": {"replica": 2, "data": 2, "model": 2}},
    {"shared_mapping": {"mlp": None, "vocab": "model"}},
    {"shared_mapping": {"batch": "data"}, "param_mapping": {}},
    {
        "compute_mapping": {"heads": ["data", "model"], "token": "replica"},
        "param_mapping": {"embed": ["data", "model"]},
    },
    {"compute_mapping": {"batch": ["data"]}, "batch_axis_name": "row"},
    {"batch_axis_name": "mlp"},
    {"compute_mapping": {"batch": "replica_dcn"}},
]


@pytest.mark.parametrize("section", MESH_SECTIONS, ids=str)
@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"mp": "p=f32,c=bf16", "train_batch_size": 64, "per_device_parallelism": 2},
        {"mp": "bf16", "train_batch_size": -1, "per_device_parallelism": 3},
    ],
    ids=["default", "microbatches", "per device"],
)
def test_levanter_agrees(section, trainer):
    assert_levanter_agrees({**trainer, "mesh": section}, read_trainer({**trainer, "mesh": section}))


@pytest.mark.parametrize(
    "trainer",
    [
        {"mp": "p=f32,c=bf16"},
        {"mp": "c=bf16"},
        {"mp": "p=f16"},
        {"mp": "params=bfloat16,compute=full,output=f16"},
        {"mp": "bf16"},
        {"mp": "full", "train_batch_size": 64, "per_device_parallelism": 2},
        {"train_batch_size": -1, "per_device_parallelism": 3, "mesh": {"axes": {"replica": 2, "model": 2}}},
    ],
    ids=str,
)
def test_levanter_agrees_about_types_and_batches(trainer):
    assert_levanter_agrees(trainer, read_trainer(trainer))


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"axes": {"model": 2, "replica": 2}},
        {"dcn_axes": {"data_dcn": -1}, "compute_mapping": BATCH_OVER_SLICES, "param_mapping": {}},
        {"dcn_axes": {"data_dcn": 2}, "compute_mapping": BATCH_OVER_SLICES, "param_mapping": {}},
        {"dcn_axes": {"data_dcn": 4}, "axes": {"model": 16}, "compute_mapping": BATCH_OVER_SLICES, "param_mapping": {}},
    ],
    ids=str,
)
def test_levanter_agrees_over_slices_about_the_mesh(section):
    from levanter.utils.mesh import MeshConfig

    within, across = draccus.decode(MeshConfig, section).axis_shapes(128, 4)
    parsed = read_trainer({"mesh": section}, devices=128, slices=4).mesh
    assert parsed["replica"] == within["replica"] * across["replica_dcn"]
    assert parsed["data"] == within["data"] * across.get("data_dcn", 1)
    assert parsed["model"] == within["model"]


def test_batch():
    schedule = [{"start": 0, "value": 32}, {"start": 100, "value": 256}, {"start": 200, "value": 64}]
    assert read_trainer({"train_batch_size": schedule}).batch == 256
    per_device = {"train_batch_size": -1, "per_device_parallelism": 4}
    assert read_trainer({**per_device, "mesh": {"axes": {"model": 2}}}).batch == 16
    assert (
        read_trainer({**per_device, "mesh": {"axes": {"replica": 2}, "compute_mapping": {"batch": "data"}}}).batch == 16
    )
    assert read_trainer({**per_device, "mesh": {"batch_axis_name": "row"}}, devices=64, slices=2).batch == 256


@pytest.mark.parametrize(
    ("trainer", "microbatches"),
    [
        ({}, 1),
        ({"per_device_parallelism": -1}, 1),
        ({"per_device_parallelism": 2}, 4),
        ({"mesh": {"axes": {"model": 2}}}, 1),
        ({"per_device_parallelism": 2, "mesh": {"axes": {"model": 2}}}, 8),
    ],
)
def test_microbatches(trainer, microbatches):
    assert read_trainer({"train_batch_size": 64, **trainer}).microbatches == microbatches


def test_half_is_bfloat16():
    assert read_trainer({"mp": "p=f32,c=half"}).compute_dtype == "bfloat16"


def test_default_batch_size_of_levanter():
    from levanter.trainer import TrainerConfig

    assert TrainerConfig.train_batch_size == DEFAULT_TRAIN_BATCH_SIZE
