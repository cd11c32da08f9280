"""The traced state-dict program moves elements exactly as Levanter's converter does when it is run."""

from pathlib import Path

import jax
import numpy as np
import pytest
from haliax.state_dict import from_torch_compatible_state_dict
from test_views import materialise

from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import TensorIndex
from shardplan.checkpoint.mapping.state_dict_program import expected_tensors, trace_program
from shardplan.checkpoint.match import match_checkpoint
from shardplan.errors import CheckpointError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.registry import build_model

MODEL_TYPES = sorted(path.name for path in Path(__file__).parents[1].joinpath("golden", "data").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_TYPES)
def test_program_equals_running_the_converter(golden, name):
    template = build_model(read_config(str(golden / name / "config.json"), None), 64).template
    shapes = expected_tensors(template)
    # every element gets a distinct number, exact in float32
    numbers, start = {}, 0
    for tensor, shape in shapes.items():
        size = int(np.prod(shape))
        numbers[tensor] = np.arange(start, start + size, dtype=np.int64).reshape(shape)
        start += size
    assert start < 2**24
    state = {tensor: jax.numpy.asarray(value, np.float32) for tensor, value in numbers.items()}
    converted = dict(named_leaves(from_torch_compatible_state_dict(template, state)))
    program = trace_program(template)
    assert program.views.keys() == converted.keys()
    for path, view in program.views.items():
        expected = getattr(converted[path], "array", converted[path])
        np.testing.assert_array_equal(materialise(view, numbers), np.asarray(expected, np.int64), err_msg=path)


def test_scaled_weights_keep_their_factor():
    import equinox as eqx
    import haliax as hax

    axes = hax.Axis("embed", 4), hax.Axis("mlp", 8)
    template = eqx.filter_eval_shape(
        hax.nn.Linear.init, *axes, key=jax.random.PRNGKey(0), use_bias=False, reparam_cls=hax.nn.mup.HiddenLinearMup
    )
    state = {"linear.weight": jax.numpy.arange(32.0).reshape(8, 4)}
    expected = from_torch_compatible_state_dict({"linear": template}, state)["linear"].weight.array
    (piece,) = trace_program({"linear": template}).views["['linear'].weight"].pieces
    np.testing.assert_allclose(np.arange(32.0).reshape(8, 4) * piece.scale, expected)


def test_a_converter_that_computes_is_refused(raises_message):
    import haliax as hax
    from haliax.state_dict import ModuleWithStateDictSerialization

    class Squared(ModuleWithStateDictSerialization):
        weight: hax.NamedArray

        def from_state_dict(self, state_dict, prefix=None):
            return Squared(hax.named(state_dict["weight"] ** 2, "embed"))

    template = Squared(hax.NamedArray(jax.ShapeDtypeStruct((4,), np.float32), (hax.Axis("embed", 4),)))
    with raises_message(CheckpointError):
        trace_program(template)


def test_a_converter_may_read_other_names_than_it_writes(raises_message):
    """Those of an older checkpoint, in which one tensor may be several; a name that neither has is reported."""
    import haliax as hax
    from haliax.state_dict import ModuleWithStateDictSerialization

    class Renamed(ModuleWithStateDictSerialization):
        weight: hax.NamedArray

        def from_state_dict(self, state_dict, prefix=None):
            if "weight" not in state_dict:
                state_dict = {"weight": jax.numpy.concatenate([state_dict["old.0"], state_dict["old.1"]])}
            return Renamed(hax.named(state_dict["weight"], ("embed", "mlp")))

    template = Renamed(
        hax.NamedArray(jax.ShapeDtypeStruct((4, 2), np.float32), (hax.Axis("embed", 4), hax.Axis("mlp", 2)))
    )

    def index(**shapes):
        tensors = {}
        for name, shape in shapes.items():
            tensors[name.replace("_", ".")] = Tensor(None, 0, shape, np.dtype("float32"), "a.safetensors")
        return TensorIndex(tensors)

    assert match_checkpoint(template, index(weight=(4, 2)), "ck").program.tensors == {"weight": (4, 2)}
    program = match_checkpoint(template, index(old_0=(2, 2), old_1=(2, 2)), "ck").program
    assert program.tensors == {"old.0": (2, 2), "old.1": (2, 2)}
    numbers = {"old.0": np.arange(4).reshape(2, 2), "old.1": np.arange(4, 8).reshape(2, 2)}
    np.testing.assert_array_equal(materialise(program.views["weight"], numbers), np.arange(8).reshape(4, 2))
    with raises_message(CheckpointError):
        match_checkpoint(template, index(old_0=(2, 2)), "ck")
    with raises_message(CheckpointError):
        match_checkpoint(template, index(old_0=(2, 2), old_1=(3, 2)), "ck")
