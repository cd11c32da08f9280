"""Names of logical axes mean nothing: a model with other names has the same plan, up to the names."""

import dataclasses

import pytest
from conftest import GOLDEN
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shardplan.decoder.parts.mlp.experts import ExpertsConfig
from shardplan.experts.planned_model import with_planned_experts
from shardplan.model.model_class import DECODER
from shardplan.model.registry import abstract_module
from shardplan.search.make_plan import make_plan, model_from_config

pytestmark = pytest.mark.slow

LEVANTER_AXES = {"Embed": "embed", "Mlp": "mlp", "Layers": "layer"}
"""Property of a Levanter configuration -> the name of its axis. Those of attention are fixed in Levanter's code."""
DECODER_AXES = {
    "Embed": "embed", "Mlp": "mlp", "Layers": "layers", "KVHeads": "kv_head", "QHeadsPerGroup": "q_heads_per_group",
    "Heads": "heads", "HeadSize": "head_size", "Experts": "experts", "ExpertMlp": "expert_mlp",
    "Scores": "expert_score",
}  # fmt: skip
"""Property of a configuration of the decoder, or of one of its parts -> the name of its axis."""
ATTENTION = ("KVHeads", "QHeadsPerGroup", "HeadSize")
"""Those of queries, keys and values."""
NAMES = [
    "attention", "data", "model", "replica", "position'", "batch'", "embed.", "microbatch", "key_position",
    "logical axis ", "mlp", "embed", "layer", "vocab", "",
]  # fmt: skip
"""Names of other things: of mesh axes, of parts of a model, of copies and parts of an axis, of each other; and no name.

Not among them are names that a model's own code gives to axes of activations, such as Mixtral's "token".
"""
DECODER_NAMES = [
    *NAMES, "layers", "kv_head", "q_heads_per_group", "heads", "head_size", "experts", "expert_mlp", "expert_score",
]  # fmt: skip
"""Further names of each other, which are fixed in Levanter's models."""
FAMILIES = ["llama", "qwen3", "mixtral", "gemma", "olmo2"]
KINDS = {"eval": ("v4-16", 16), "train": ("v4-8", 2)}
"""Kind of step -> its slice and batch; training of each number of microbatches is planned, up to that of the batch.

Levanter's classes train, and the decoder evaluates.
"""
OFTEN = {("llama", "eval"), ("mixtral", "eval"), ("gemma", "train")}
"""Families and kinds that are renamed once in every run."""


def axes_of(model):
    """Property of a configuration -> the name of its axis, for all axes of a model that can be renamed."""
    return {**(DECODER_AXES if model.is_decoder else LEVANTER_AXES), "Vocab": "vocab"}


def renamings(model):
    """Property of a configuration -> another name."""
    permutations = st.permutations(DECODER_NAMES if model.is_decoder else NAMES)
    renamings = permutations.map(lambda names: dict(zip(axes_of(model), names, strict=False)))
    # keys have that axis beside those of attention, and no array has two axes of one name
    return renamings.filter(lambda names: all(names.get(key) != "key_position" for key in ATTENTION))


def rename(model, names):
    """`model` with the axes of its configuration called `names`, and its vocabulary."""
    config = rename_config(model.config, names)
    if model.is_decoder:
        segments = [
            dataclasses.replace(segment, layers=tuple(rename_layer(layer, names) for layer in segment.layers))
            for segment in config.segments
        ]
        config = dataclasses.replace(config, segments=tuple(segments))
    template = abstract_module(config, model.vocab.alias(names["Vocab"]))
    return with_planned_experts(dataclasses.replace(model, config=config, template=template))


def rename_config(config, names):
    """A configuration of a subclass whose axes are called `names`, of a model or of a part of one."""
    kind = type(config)
    axes = {key: rename_property(kind, key, names[key]) for key in names if hasattr(kind, key)}
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(kind) if field.init}
    return type(kind.__name__, (kind,), axes)(**fields)


def rename_property(kind, key, name):
    """The property `key` of a class, whose axis is called `name`; of a decoder's layers, those of its only segment."""

    def renamed(config):
        axis = getattr(kind, key).fget(config)
        if isinstance(axis, tuple):
            (only,) = axis
            return (only.alias(name),)
        return axis.alias(name)

    return property(renamed)


def rename_layer(layer, names):
    """The configuration of a layer of a decoder whose attention and MLP have axes that are called `names`."""
    mlp = rename_config(layer.mlp, names)
    if isinstance(mlp, ExpertsConfig):
        mlp = dataclasses.replace(mlp, router=rename_config(mlp.router, names))
    return dataclasses.replace(layer, attention=rename_config(layer.attention, names), mlp=mlp)


def essence(plan, original):
    """What a plan decides and predicts, with axes called by their original names."""
    mappings = [
        {original.get(axis, axis): mesh_axes for axis, mesh_axes in mapping.items()}
        for mapping in (plan.compute_mapping, plan.param_mapping)
    ]
    specs = {parameter.path: parameter.spec for parameter in plan.parameters}
    vocab = original.get(plan.model.vocab, plan.model.vocab)
    return vocab, plan.mesh, mappings, specs, plan.attention, plan.memory, plan.cost.step_seconds, plan.compiler_options


@pytest.mark.parametrize(
    ("family", "kind", "count"),
    [
        pytest.param(
            *(family, kind, count),
            marks=[] if count == 1 and (family, kind) in OFTEN else [pytest.mark.whole],
        )
        for family in FAMILIES
        for kind in KINDS
        for count in (1, 20)
    ],
)
def test_the_plan_is_the_same_under_other_names(make_config, family, kind, count):
    slice_name, batch = KINDS[kind]
    config = make_config(
        model_ref=GOLDEN / family,
        hardware_slice=slice_name,
        workload_batch=batch,
        workload_position=64,
        workload_kind=kind,
    )
    model = model_from_config(config)
    assert model.is_decoder == (kind == "eval")
    expected = essence(make_plan(config, model), {})

    @settings(max_examples=count, phases=[Phase.generate])  # a plan takes too long to look for others
    @given(renamings(model))
    def check(names):
        original = {name: axes_of(model)[key] for key, name in names.items()}
        assert essence(make_plan(config, rename(model, names)), original) == expected

    check()


@pytest.mark.parametrize(
    ("names", "microbatches"), [({"Embed": "microbatch", "Mlp": "microbatch'"}, 2), ({"Layers": ""}, 1)]
)
@pytest.mark.parametrize("model_class", [None, pytest.param(DECODER, marks=pytest.mark.whole)])
def test_axes_may_be_called_as_the_axis_of_microbatches_or_have_empty_names(
    make_config, names, microbatches, model_class
):
    config = make_config(
        model_ref=GOLDEN / "llama",
        model_levanter_class=model_class,
        hardware_slice="v4-8",
        workload_batch=16,
        workload_position=64,
        workload_kind="train",
        workload_microbatches=microbatches,
    )
    model = model_from_config(config)
    assert model.is_decoder == (model_class is not None)
    original = {name: axes_of(model)[key] for key, name in names.items()}
    renamed = rename(model, {**axes_of(model), **names})
    assert essence(make_plan(config, renamed), original) == essence(make_plan(config, model), {})
