"""An error in a trainer section is reported on one line, with the key, its value, and what is valid."""

import pytest
from levanter_sections import convert, read_trainer

from shardplan.errors import ConfigError


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"mesh": {"axes": {"model": 256}}},
            "trainer.mesh.axes.model 256 does not divide the 128 devices; did you mean 128?",
        ),
        (
            {"mesh": {"axes": {"model": 64, "replica": 8}}},
            "trainer.mesh.axes.replica 8 does not divide the 2 devices that trainer.mesh.axes.model 64 leaves; "
            "did you mean 2?",
        ),
        ({"mesh": {"axes": {"model": "2"}}}, "trainer.mesh.axes.model is '2'; it must be a positive integer or -1"),
        ({"mesh": {"axes": {"model": 0}}}, "trainer.mesh.axes.model is 0; it must be a positive integer or -1"),
        (
            {"mesh": {"axes": {"replica": True}}},
            "trainer.mesh.axes.replica is True; it must be a positive integer or -1",
        ),
        (
            {"mesh": {"dcn_axes": {"replica_dcn": 0}}},
            "trainer.mesh.dcn_axes.replica_dcn is 0; it must be a positive integer or -1",
        ),
        (
            {"mesh": {"shared_mapping": {"mlp": "modle"}}},
            "trainer.mesh.shared_mapping maps 'mlp' to the unknown mesh axis 'modle'; did you mean 'model'?",
        ),
        (
            {"mesh": {"compute_mapping": {"mlp": "(data, model)"}}},
            "trainer.mesh.compute_mapping maps 'mlp' to the unknown mesh axis '(data, model)'; "
            "valid: data, model, replica, replica_dcn",
        ),
        (
            {"mesh": {"shared_mapping": {"mlp": 3}}},
            "trainer.mesh.shared_mapping maps 'mlp' to 3; "
            "it must map names of axes to a mesh axis, a list of them, or null",
        ),
        ({"mesh": {"param_mapping": None}}, "trainer.mesh.param_mapping is None; it must be a section with keys"),
        (
            {"mesh": {"batch_axis_name": ["a"]}},
            "trainer.mesh.batch_axis_name is ['a']; it must be the name of an axis, or null",
        ),
        ({"train_batch_size": 2.5}, "trainer.train_batch_size is 2.5; it must be a positive integer or -1"),
        ({"train_batch_size": None}, "trainer.train_batch_size is None; it must be a positive integer or -1"),
        (
            {"train_batch_size": -1},
            "trainer.train_batch_size and trainer.per_device_parallelism are both -1; set one of them",
        ),
        (
            {"train_batch_size": [{"start": 0}]},
            "trainer.train_batch_size[0].value is None; it must be a positive integer",
        ),
        (
            {"mp": "p=f64"},
            "trainer.mp is 'p=f64': unknown type 'f64'; valid: bf16, bfloat16, f16, f32, float16, float32, full, half",
        ),
        ({"mp": "q=f32"}, "trainer.mp is 'q=f32': unknown key 'q'; valid: c, compute, o, output, p, params"),
        ({"mp": 16}, "trainer.mp is 16; it must be text such as 'p=f32,c=bf16'"),
        (
            {"mesh": {"shared_mapping": {"mlp": []}}},
            "trainer.mesh.shared_mapping maps 'mlp' to an empty list, with which Levanter fails; null replicates it",
        ),
        ({"mesh": None}, "trainer.mesh is None; it must be a section with keys"),
        ({"mesh": {"axis": {"model": 2}}}, "trainer.mesh: unknown key 'axis'; did you mean 'axes'?"),
        (
            {"mesh": {"axes": {"context": 4}}},
            "trainer.mesh.axes: a plan's mesh has no axis 'context'; valid: data, model, replica",
        ),
        (
            {"mesh": {"dcn_axes": {"slice": 2}}},
            "trainer.mesh.dcn_axes: across slices, a plan's mesh has no axis 'slice'; valid: data_dcn, replica_dcn",
        ),
        (
            {"mesh": {"dcn_axes": {"replica_dcn": 2}}},
            "trainer.mesh.dcn_axes.replica_dcn is 2, but there is 1 slice; set it to 1 or -1",
        ),
        (
            {"mesh": {"shared_mapping": {"mlp": "data_dcn"}}},
            "trainer.mesh.shared_mapping maps 'mlp' to the unknown mesh axis 'data_dcn'; did you mean 'data'?",
        ),
        (
            {"mesh": {"dcn_axes": {"data_dcn": -1, "replica_dcn": -1}}},
            "trainer.mesh.dcn_axes: replica_dcn and data_dcn are -1; only one can take the remaining slices",
        ),
        (
            {"mesh": {"axes": {"data": -1, "model": -1}}},
            "trainer.mesh.axes: data and model are -1; only one can take the remaining devices",
        ),
        (
            {"mesh": {"axes": {"replica": -1, "model": -1}}},
            "trainer.mesh.axes: replica and model are -1; only one can take the remaining devices",
        ),
        (
            {"mesh": {"axes": {"model": 48}}},
            "trainer.mesh.axes.model 48 does not divide the 128 devices; did you mean 32 or 64?",
        ),
        (
            {"mesh": {"axes": {"data": 16, "model": 4}}},
            "trainer.mesh.axes: replica 1 x data 16 x model 4 is 1/2 of the 128 devices; set data to 32 or -1",
        ),
        ({"mesh": {"axes": {"model": None}}}, "trainer.mesh.axes.model is None; it must be a positive integer or -1"),
        (
            {"mesh": {"param_mapping": {"embed": ["data", "modle"]}}},
            "trainer.mesh.param_mapping maps 'embed' to the unknown mesh axis 'modle'; did you mean 'model'?",
        ),
        (3, "trainer is 3; it must be a section with keys"),
    ],
    ids=str,
)
def test_errors(trainer, message):
    with pytest.raises(ConfigError) as raised:
        read_trainer(trainer, devices=128)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"model_axis_size": 48},
            "trainer.model_axis_size 48 does not divide the 128 devices; did you mean 32 or 64?",
        ),
        ({"model_axis_size": 256}, "trainer.model_axis_size 256 does not divide the 128 devices; did you mean 128?"),
        (
            {"model_axis_size": 64, "replica_ici_axis_size": 8},
            "trainer.replica_ici_axis_size 8 does not divide the 2 devices that trainer.model_axis_size 64 leaves; "
            "did you mean 2?",
        ),
        ({"replica_dcn_axis_size": 2}, "trainer.replica_dcn_axis_size 2 does not divide the 1 slice; did you mean 1?"),
        ({"model_axis_size": "2"}, "trainer.model_axis_size is '2'; it must be a positive integer"),
        ({"model_axis_size": -1}, "trainer.model_axis_size is -1; it must be a positive integer"),
        ({"replica_dcn_axis_size": 0}, "trainer.replica_dcn_axis_size is 0; it must be a positive integer or -1"),
        ({"replica_ici_axis_size": True}, "trainer.replica_ici_axis_size is True; it must be a positive integer"),
        (
            {"axis_resources": {"mlp": "modle"}},
            "trainer.axis_resources maps 'mlp' to the unknown mesh axis 'modle'; did you mean 'model'?",
        ),
        (
            {"parameter_axis_resources": {"mlp": ["data", "replica_dcn"]}},
            "trainer.parameter_axis_resources maps 'mlp' to the unknown mesh axis 'replica_dcn'; "
            "did you mean 'replica'?",
        ),
        (
            {"axis_resources": {"mlp": "(data, model)"}},
            "trainer.axis_resources maps 'mlp' to the unknown mesh axis '(data, model)'; valid: data, model, replica",
        ),
        (
            {"axis_resources": {"mlp": 3}},
            "trainer.axis_resources maps 'mlp' to 3; it must map names of axes to a mesh axis, a list of them, or null",
        ),
        ({"axis_resources": None}, "trainer.axis_resources is None; it must be a section with keys"),
        (
            {"tensor_parallel_axes": "mlp"},
            "trainer.tensor_parallel_axes is 'mlp'; it must be a list of axes, or null",
        ),
        ({"fsdp_axis": 3}, "trainer.fsdp_axis is 3; it must be the name of an axis, a list of names, or null"),
        ({"batch_axis": ["a"]}, "trainer.batch_axis is ['a']; it must be the name of an axis, or null"),
        (
            {"axis_resources": {"mlp": []}},
            "trainer.axis_resources maps 'mlp' to an empty list, with which Levanter fails; null replicates it",
        ),
    ],
    ids=str,
)
def test_errors_of_a_section_of_levanter_12(trainer, message):
    with pytest.raises(ConfigError) as raised:
        convert(trainer, "v5e-128")
    assert str(raised.value) == message


def test_errors_over_slices(raises_message):
    with raises_message(ConfigError):
        convert({"model_axis_size": 32}, "4xv5e-16")
    with raises_message(ConfigError):
        convert({"replica_dcn_axis_size": 3}, "4xv5e-16")
    with raises_message(ConfigError):
        read_trainer({"mesh": {"axes": {"model": 32}}}, devices=64, slices=4)
    with raises_message(ConfigError):
        read_trainer({"mesh": {"dcn_axes": {"replica_dcn": 2}}}, devices=64, slices=4)
    with raises_message(ConfigError):
        read_trainer({}, devices=64, slices=3)
