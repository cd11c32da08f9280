"""Names of logical axes mean nothing: a model with other names has the same plan, up to the names."""

import dataclasses

import pytest
from conftest import GOLDEN
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shardplan.model.registry import abstract_module
from shardplan.search.make_plan import make_plan, model_from_config

AXES = {"Embed": "embed", "Mlp": "mlp", "Layers": "layer"}
"""Property of a Levanter configuration -> the name of its axis. Those of attention are fixed in Levanter's code."""
NAMES = [
    "attention", "data", "model", "replica", "position'", "batch'", "embed.", "microbatch", "key_position",
    "logical axis ", "mlp", "embed", "layer", "vocab", "",
]  # fmt: skip
"""Names of other things: of mesh axes, of parts of a model, of copies and parts of an axis, of each other; and no name.

Not among them are names that a model's own code gives to axes of activations, such as Mixtral's "token".
"""
FAMILIES = ["llama", "qwen3", "mixtral", "gemma", "olmo2"]
KINDS = {"eval": ("v4-16", 16), "train": ("v4-8", 2)}
"""Kind of step -> its slice and batch; training of each number of microbatches is planned, up to that of the batch."""
OFTEN = {("llama", "eval"), ("mixtral", "eval"), ("gemma", "train")}
"""Families and kinds that are renamed once in every run."""
RENAMINGS = st.permutations(NAMES).map(lambda names: dict(zip([*AXES, "Vocab"], names, strict=False)))


def rename(model, names):
    """`model` with the axes of its configuration called `names`, and its vocabulary."""
    kind = type(model.config)
    axes = {key: property(lambda config, key=key: getattr(kind, key).fget(config).alias(names[key])) for key in AXES}
    fields = {field.name: getattr(model.config, field.name) for field in dataclasses.fields(kind) if field.init}
    config = type(kind.__name__, (kind,), axes)(**fields)
    template = abstract_module(config, model.vocab.alias(names["Vocab"]))
    return dataclasses.replace(model, config=config, template=template)


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
    expected = essence(make_plan(config, model), {})

    @settings(max_examples=count, phases=[Phase.generate])  # a plan takes too long to look for others
    @given(RENAMINGS)
    def check(names):
        original = {name: {**AXES, "Vocab": "vocab"}[key] for key, name in names.items()}
        assert essence(make_plan(config, rename(model, names)), original) == expected

    check()


@pytest.mark.parametrize(
    ("names", "microbatches"), [({"Embed": "microbatch", "Mlp": "microbatch'"}, 2), ({"Layers": ""}, 1)]
)
def test_axes_may_be_called_as_the_axis_of_microbatches_or_have_empty_names(make_config, names, microbatches):
    config = make_config(
        model_ref=GOLDEN / "llama",
        hardware_slice="v4-8",
        workload_batch=16,
        workload_position=64,
        workload_kind="train",
        workload_microbatches=microbatches,
    )
    model = model_from_config(config)
    original = {name: AXES[key] for key, name in names.items()}
    renamed = rename(model, {**AXES, "Vocab": "vocab", **names})
    assert essence(make_plan(config, renamed), original) == essence(make_plan(config, model), {})
