"""Every kind of finding: which trainer sections have it, with which message, and which do not."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import draccus
import jax
import numpy as np
import pytest
import yaml
from jax.sharding import Mesh
from levanter.data.loader import DataLoader
from levanter.layers.attention import AttentionBackend
from levanter.schedule import BatchSchedule
from levanter.trainer import TrainerConfig
from levanter.utils.jax_utils import best_effort_sharding

from shardplan import config
from shardplan.errors import ConfigError
from shardplan.levanter_config.levanter_file import read_levanter_file
from shardplan.levanter_config.model_section import ATTENTION_BACKENDS, ModelSection, parse_model_section
from shardplan.levanter_config.programs import PROGRAMS
from shardplan.levanter_config.trainer_section import TRAINER_KEYS
from shardplan.levanter_config.training_extras import TrainingExtras, parse_extras
from shardplan.lint.checks.training import adapter_bytes
from shardplan.lint.lint import assumptions, lint_trainer, target_of
from shardplan.model.huggingface.hf_config import read_config

ROOT = Path(__file__).parents[2]
LLAMA = "llama-3.1-8b"


@pytest.fixture(scope="module")
def lint_8b():
    """Lint a trainer section, given as YAML, for Llama-3.1-8B: 32 layers, 8 key heads of 4 query heads, mlp 14336.

    The types are bfloat16 unless the section has others.
    """
    targets = {}

    def run(trainer, slice_name="v4-16", backend=None):
        if (slice_name, backend) not in targets:
            argv = [f"--model.config={LLAMA}", f"--hardware.slice={slice_name}", "--workload.batch=16"]
            targets[slice_name, backend] = target_of(config.parse_config(argv), ModelSection(attention_backend=backend))
        values = yaml.safe_load(trainer)
        if isinstance(values, dict):
            values.setdefault("mp", "bf16")
        return lint_trainer(values, targets[slice_name, backend])

    return run


def only(findings, kind):
    (match,) = [finding for finding in findings if finding.kind == kind]
    return match


def kinds(result):
    return [(finding.severity, finding.kind) for finding in result.findings]


USUAL = """
mesh:
  axes: {model: 2}
  shared_mapping: {kv_head: model}
  param_mapping: {embed: data, vocab: model}
"""


def test_usual_mapping_has_no_findings(lint_8b):
    result = lint_8b(USUAL)
    assert result.findings == () and result.plan is not None
    assert result.plan.mesh == {"replica": 1, "data": 4, "model": 2}


def test_misspelt_axis_that_leaves_parameters_replicated(lint_8b):
    trainer = "{mesh: {axes: {model: 8}, shared_mapping: {kv_heads: model}, param_mapping: {}}}"
    finding = only(lint_8b(trainer).findings, "unknown axis")
    assert finding.severity == "error" and finding.where == ("trainer.mesh.shared_mapping.kv_heads",)
    assert finding.text == (
        "the model has no axis 'kv_heads', so mapping it has no effect: Haliax silently replicates, on every device, "
        "q_proj.weight 1.00, k_proj.weight 0.25, v_proj.weight 0.25 GiB"
    )
    assert finding.remedy == "did you mean 'kv_head'?"
    assert finding.parameters["transformer.layers.stacked.self_attn.k_proj.weight"] == 32 * 8 * 128 * 4096 * 2


def test_misspelt_axis_of_parameters_sharded_over_another_axis(lint_8b):
    finding = only(lint_8b(USUAL.replace("vocab", "vocabs")).findings, "unknown axis")
    assert finding.severity == "warning"
    assert finding.text == (
        "the model has no axis 'vocabs', so mapping it has no effect: model does not shard "
        "token_embeddings.weight and lm_head.weight"
    )


def test_unknown_axis_without_a_similar_name(lint_8b):
    finding = only(lint_8b(USUAL.replace("vocab: model", "vocab: model, expert_42: data")).findings, "unknown axis")
    assert (finding.severity, finding.text) == (
        "warning",
        "the model has no axis 'expert_42', so mapping it has no effect",
    )
    assert finding.remedy.startswith("valid: batch, embed, head_size, heads, kv_head, ")


@pytest.mark.parametrize(
    ("model", "axis", "what"),
    [
        (
            "mixtral-8x7b",
            "token",
            "over data 8 is not predicted, and in models that route tokens to experts it gave wrong logits",
        ),
        (
            "mixtral-8x7b",
            "token_repeat",
            "over data 8 is not predicted, and in models that route tokens to experts it gave wrong logits",
        ),
        ("llama-3.1-8b", "token", None),
    ],
)
def test_axes_that_only_activations_have(model, axis, what):
    argv = [f"--model.config={model}", "--hardware.slice=v4-16"]
    trainer = {"mp": "bf16", "mesh": {"shared_mapping": {axis: "data"}}}
    result = lint_trainer(trainer, target_of(config.parse_config(argv)))
    if what is None:
        assert only(result.findings, "unknown axis").text.endswith("so mapping it has no effect")
        return
    finding = only(result.findings, "activation axis")
    assert (finding.severity, finding.where) == ("warning", (f"trainer.mesh.shared_mapping.{axis}",))
    assert what in finding.text and "unknown axis" not in {finding.kind for finding in result.findings}


def test_axis_along_which_layers_are_stacked(lint_8b):
    finding = only(lint_8b(USUAL.replace("kv_head: model", "kv_head: model, layer: data")).findings, "stacked axis")
    assert (finding.severity, finding.where) == ("warning", ("trainer.mesh.shared_mapping.layer",))
    assert finding.text.startswith(
        "layers are stacked along 'layer': sharded over data 4, every iteration of the loop over layers "
    )
    assert ("warning", "stacked axis") not in kinds(lint_8b("{mesh: {shared_mapping: {layer: model}}}"))
    # it is never suggested for a misspelt axis
    misspelt = lint_8b("{mesh: {shared_mapping: {layers: data}}}")
    assert "'layer'" not in only(misspelt.findings, "unknown axis").remedy


def test_positions_and_a_batch_axis_of_another_name_are_known(lint_8b):
    mapping = "{mlp: null, heads: null, position: model}"
    trainer = f"{{mesh: {{axes: {{model: 2}}, batch_axis_name: row, shared_mapping: {mapping}}}}}"
    result = lint_8b(trainer, backend="vanilla")
    assert kinds(result) == []
    assert result.plan is not None and result.plan.compute_mapping["batch"] == ["replica", "data"]


@pytest.mark.parametrize(
    ("params", "severity"), [("{vocab: model}", "error"), ("{embed: data, vocab: model}", "warning")]
)
def test_heads_is_not_an_axis_of_the_query_key_and_value_projections(lint_8b, params, severity):
    mappings = f"shared_mapping: {{mlp: model, heads: model}}, param_mapping: {params}"
    finding = only(lint_8b(f"{{mesh: {{axes: {{model: 4}}, {mappings}}}}}").findings, "heads")
    assert finding.severity == severity and finding.where == ("trainer.mesh.shared_mapping.heads",)
    assert finding.text.startswith(
        "'heads' is not an axis of q_proj.weight, k_proj.weight and v_proj.weight, which have kv_head, "
        "q_heads_per_group and head_size and so "
    )
    consequence = {
        "error": "are silently replicated, on every device: q_proj.weight 1.00, k_proj.weight 0.25, ",
        "warning": "are not sharded over model 4",
    }
    assert consequence[severity] in finding.text
    assert finding.remedy == "map kv_head to model as well"


def test_more_devices_than_key_heads(lint_8b):
    trainer = "{mesh: {axes: {model: 16}, shared_mapping: {mlp: model, heads: model}}}"
    assert only(lint_8b(trainer, "v4-64").findings, "heads").remedy == (
        "16 does not divide kv_head (8): make model 8, and map kv_head to it as well"
    )


def test_mesh_axes_without_a_logical_axis(lint_8b):
    trainer = "{mesh: {axes: {model: 4}, shared_mapping: {mlp: null, heads: null}}}"
    finding = only(lint_8b(trainer).findings, "unused mesh axis")
    assert (finding.severity, finding.where) == ("warning", ("trainer.mesh.axes.model",))
    assert finding.text == "no logical axis is mapped to model (4 devices): they all store and compute the same"
    assert finding.remedy == "map a logical axis to model in trainer.mesh.shared_mapping, or make it 1"
    stored = "{mesh: {axes: {model: 4}, shared_mapping: {mlp: null, heads: null, mlps: model}, param_mapping: %s}}"
    finding = only(lint_8b(stored % "{embed: data, vocab: model}").findings, "unused mesh axis")
    assert finding.text == (
        "model (4 devices) shards only stored vocab and no computation: these devices all do the same work"
    )
    mesh = "{mesh: {axes: {replica: 2}, compute_mapping: {batch: data}}}"
    assert only(lint_8b(mesh).findings, "unused mesh axis").where == ("trainer.mesh.axes.replica",)


@pytest.mark.parametrize("model", [4, 1])
def test_duplicates_name_the_tensors(lint_8b, model):
    """JAX refuses a mesh axis on two dimensions of an array even where it has one device."""
    mapping = "{mlp: null, heads: null, kv_head: model, head_size: model}"
    result = lint_8b(f"{{mesh: {{axes: {{model: {model}}}, shared_mapping: {mapping}}}}}")
    finding = only(result.findings, "duplicate")
    assert finding.severity == "error"
    assert finding.where == ("trainer.mesh.shared_mapping.kv_head", "trainer.mesh.shared_mapping.head_size")
    assert finding.text == (
        "kv_head and head_size share the mesh axis model in one array (DuplicateSpecError): q_proj.weight, "
        "k_proj.weight, v_proj.weight, the result of q_proj.weight and the result of k_proj.weight"
    )
    assert finding.remedy == "shard only one dimension of an array over model: keep it for one of kv_head and head_size"
    assert result.plan is None


def test_duplicates_are_where_the_mesh_axis_is_mapped(lint_8b):
    """The default mapping of mlp to model is not what collides."""
    errors = lint_8b("{mesh: {param_mapping: {embed: data, mlp: data}}}").errors
    assert {finding.where for finding in errors} == {
        ("trainer.mesh.param_mapping.embed", "trainer.mesh.param_mapping.mlp")
    }


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        (
            "{mesh: {shared_mapping: {embed: data}, param_mapping: {}}}",
            "batch and embed share the mesh axis data in one array (",
        ),
        (
            "{mesh: {param_mapping: {mlp: [data, data]}}}",
            "mlp is mapped twice to data in one array (DuplicateSpecError): gate",
        ),
        (
            "{mesh: {param_mapping: {embed: data, mlp: data}}}",
            "mlp and embed share the mesh axis data in one array (DuplicateSpec",
        ),
    ],
)
def test_duplicates_of_activations_and_of_stored_parameters(lint_8b, trainer, text):
    assert any(finding.text.startswith(text) for finding in lint_8b(trainer).errors)


def test_indivisible(lint_8b):
    trainer = "{mesh: {axes: {model: 16}, shared_mapping: {mlp: model, heads: null, kv_head: model}}}"
    result = lint_8b(trainer, "v4-64")
    finding = only(result.findings, "indivisible")
    assert (finding.severity, finding.where) == ("error", ("trainer.mesh.shared_mapping.kv_head",))
    assert finding.text == "kv_head (8) is not divisible by the 16 devices of model 16 (IndivisibleError)"
    assert finding.remedy == "shard it over at most 8 of the 16 devices, or map another axis"
    assert result.plan is None
    both = lint_8b("{mesh: {axes: {model: 4}, param_mapping: {kv_head: [model, data]}}}", "v4-64")
    assert "by the 32 devices of model 4 x data 8 (" in only(both.findings, "indivisible").text


def test_a_model_section_of_another_model(tmp_path):
    from shardplan.levanter_config.model_section import parse_model_section

    target = config.parse_config([f"--model.config={LLAMA}", "--hardware.slice=v4-16"])
    same = parse_model_section({"model": {"type": "llama", "hidden_dim": 4096, "num_kv_heads": 8}})
    assert target_of(target, same).model_section == same
    other = parse_model_section({"model": {"hidden_dim": 4096, "num_layers": 16}})
    with pytest.raises(ConfigError, match=r"model.num_layers is 16 in the file, and 32 in llama-3.1-8b; lint the file"):
        target_of(target, other)


def test_levanter_rounds_the_vocabulary_up(tmp_path):
    """GPT-2's 50257 tokens, which nothing divides; eval_lm rounds by the mapping for computing alone."""

    path = tmp_path / "config.json"
    path.write_text(json.dumps({**read_config(LLAMA, None), "vocab_size": 50257}))

    def lint_odd(trainer, kind):
        argv = [f"--model.config={path}", "--hardware.slice=v4-16", "--workload.batch=16"]
        return lint_trainer(
            {"mp": "bf16", **trainer}, target_of(config.parse_config([*argv, f"--workload.kind={kind}"]))
        )

    mesh = {"axes": {"model": 2}}
    both = {"mesh": {**mesh, "shared_mapping": {"mlp": None, "heads": None, "vocab": "model"}}}
    at_rest = {
        "mesh": {**mesh, "shared_mapping": {"heads": None}, "param_mapping": {"embed": "data", "vocab": "model"}}
    }
    result = lint_odd(both, "eval")
    finding = only(result.findings, "vocabulary")
    assert (finding.severity, finding.where) == ("warning", ("trainer.mesh.shared_mapping.vocab",))
    assert finding.text == (
        "vocab (50257) is not divisible by the 2 devices of model 2: Levanter rounds it up to 50258, and the "
        "added tokens take part in the softmax, which changes the losses"
    )
    # that it is sharded in computations is an error for another reason
    assert [finding.kind for finding in result.errors] == ["loss"] and result.plan is not None
    assert [finding.kind for finding in lint_odd(both, "train").errors] == ["loss"]
    assert not lint_odd(at_rest, "train").errors
    assert [finding.kind for finding in lint_odd(at_rest, "eval").errors] == ["indivisible"]


@pytest.mark.parametrize(
    ("trainer", "nearest", "mesh"),
    [
        ("{mesh: {axes: {model: 48}}}", 32, {"replica": 1, "data": 1, "model": 32}),
        ("{mesh: {axes: {model: 64, replica: 3}}}", 1, {"replica": 1, "data": 1, "model": 32}),
        ("{mesh: {axes: {data: 4, model: 4}}}", 8, {"replica": 1, "data": 8, "model": 4}),
        ("{mesh: {dcn_axes: {replica_dcn: 2}}}", 1, {"replica": 1, "data": 32, "model": 1}),
    ],
)
def test_lint_of_a_wrong_mesh_goes_on_with_the_nearest_size(lint_8b, trainer, nearest, mesh):
    result = lint_8b(trainer, "v4-64")
    replaced = [finding for finding in result.findings if finding.kind == "mesh size"]
    assert replaced[-1].severity == "error" and replaced[-1].remedy == f"the other findings assume {nearest}"
    assert result.subject.section.mesh == mesh


def test_message_of_a_wrong_mesh(lint_8b):
    finding = only(lint_8b("{mesh: {axes: {model: 12}}}", "v4-64").findings, "mesh size")
    assert finding.where == ("trainer.mesh.axes.model",)
    assert finding.text == "trainer.mesh.axes.model 12 does not divide the 32 devices; did you mean 8 or 16?"


@pytest.mark.parametrize(
    ("trainer", "text", "remedy"),
    [
        (
            "{train_batch_size: 12}",
            "12 sequences are not divisible by the 8 batch shards of replica 1 x data 8",
            "use 8 or 16 sequences, or a larger model axis",
        ),
        (
            "{train_batch_size: 6, mesh: {axes: {replica: 2}, compute_mapping: {batch: data}}}",
            "6 sequences are not divisible by the 4 batch shards of data 4",
            "use 4 or 8 sequences, or a larger model axis",
        ),
        (
            "{train_batch_size: 4, mesh: {axes: {replica: 2}}}",
            "4 sequences are not divisible by the 8 batch shards of replica 2 x data 4",
            "use 8 sequences, or a larger model axis",
        ),
    ],
)
def test_indivisible_batch(lint_8b, trainer, text, remedy):
    result = lint_8b(trainer)
    finding = only(result.findings, "batch")
    assert (finding.severity, finding.text, finding.remedy) == ("error", text, remedy)
    assert finding.where == ("trainer.train_batch_size", result.subject.size_key("model"))


def test_replicated_batch(lint_8b):
    finding = only(lint_8b("{mesh: {shared_mapping: {batch: model}}}").findings, "batch")
    assert (finding.severity, finding.where) == ("warning", ("trainer.mesh.shared_mapping.batch",))
    assert finding.text == "'batch' is replicated: every device computes all 16 sequences"


@pytest.mark.parametrize(
    ("trainer", "key"),
    [
        ("{mesh: {batch_axis_name: null}}", "trainer.mesh.batch_axis_name"),
        ("{mesh: {compute_mapping: {batch: null}}}", "trainer.mesh.compute_mapping.batch"),
    ],
)
def test_levanter_needs_a_mesh_axis_for_the_batch(lint_8b, trainer, key):
    """Its data loader divides by the number of devices along the batch, which Haliax says is None."""
    finding = only(lint_8b(trainer).findings, "batch")
    assert finding.severity == "error" and key in finding.where
    assert finding.text == "'batch' is mapped to no mesh axis, and Levanter's data loader fails"


def test_lists_of_mesh_axes(lint_8b):
    """Levanter takes a list for a logical axis, and shards it over all of them."""
    trainer = "{mesh: {axes: {model: 2}, shared_mapping: {kv_head: model}, param_mapping: {mlp: [model, data]}}}"
    result = lint_8b(trainer)
    assert result.errors == [] and result.plan is not None and "list" not in {each.kind for each in result.findings}
    assert result.plan.param_mapping["mlp"] == ["model", "data"]
    decoded = draccus.decode(TrainerConfig, yaml.safe_load(trainer))
    assert list(decoded.parameter_axis_mapping["mlp"]) == ["model", "data"]


def test_empty_lists(lint_8b):
    result = lint_8b("{mesh: {axes: {model: 2}, shared_mapping: {mlp: []}}}")
    finding = only(result.findings, "list")
    assert (finding.severity, finding.where) == ("error", ("trainer.mesh.shared_mapping.mlp",))
    assert finding.text == (
        "trainer.mesh.shared_mapping maps 'mlp' to an empty list, with which Levanter fails; null replicates it"
    )
    assert finding.remedy == "the other findings assume that mlp is replicated"
    assert "mlp" not in result.subject.section.compute_mapping


Q_HEADS = "{mesh: {axes: {model: 4}, shared_mapping: {mlp: model, heads: model, q_heads_per_group: model}}}"


def test_attention_requires_unsharded_heads(lint_8b):
    finding = only(lint_8b(Q_HEADS).findings, "attention")
    assert (finding.severity, finding.where) == ("error", ("trainer.mesh.shared_mapping.q_heads_per_group",))
    assert finding.text == (
        "computations shard q_heads_per_group: Levanter's splash attention, its default on TPUs, runs on each device "
        "alone and is silently wrong"
    )
    assert not lint_8b(Q_HEADS, backend="jax_flash").errors
    assert ("error", "attention") not in kinds(lint_8b(Q_HEADS, "cpu-8"))


@pytest.mark.parametrize("backend", ["splash", None])
def test_splash_attention_takes_sharded_positions(lint_8b, backend):
    trainer = "{mesh: {axes: {model: 2}, shared_mapping: {mlp: null, heads: null, position: model}}}"
    assert ("error", "attention") not in kinds(lint_8b(trainer, backend=backend))


@pytest.mark.parametrize("axis", ["vocab", "embed"])
def test_levanters_loss_needs_an_unsharded_vocabulary(lint_8b, axis):
    """tests/multidevice/test_levanter_loss.py shows that it is wrong."""
    trainer = f"{{mesh: {{axes: {{model: 2}}, compute_mapping: {{{axis}: model}}, param_mapping: {{}}}}}}"
    finding = only(lint_8b(trainer).findings, "loss")
    assert (finding.severity, finding.where) == ("error", (f"trainer.mesh.compute_mapping.{axis}",))
    assert finding.text == (
        f"computations shard {axis}: Levanter computes the loss on each device as if that had all of it, and is "
        "silently wrong"
    )
    assert finding.remedy == f"leave {axis} unsharded in computations, or call shardplan.patch_levanter() first"
    stored = f"{{mesh: {{axes: {{model: 2}}, param_mapping: {{{axis}: model}}}}}}"
    assert ("error", "loss") not in kinds(lint_8b(stored))


def test_a_batch_on_an_axis_of_one_device_is_mapped(lint_8b):
    """As plans are printed that do not shard it."""
    trainer = "{mesh: {axes: {model: 8}, dcn_axes: {replica_dcn: 1}, compute_mapping: {batch: replica_dcn}}}"
    assert "batch" not in {finding.kind for finding in lint_8b(trainer).findings}


@pytest.mark.parametrize(
    ("backend", "assumed", "remedy", "others"),
    [
        ("jax_flsh", "jax_flash", "did you mean 'jax_flash'?", set()),
        ("qqq", "its default", "valid: default, jax_flash, nvte, splash, vanilla", {"attention"}),
    ],
)
def test_unknown_attention_backend(lint_8b, backend, assumed, remedy, others):
    """The other findings are those of the backend that was meant."""
    result = lint_8b(Q_HEADS, backend=backend)
    finding = only(result.findings, "attention backend")
    assert (finding.severity, finding.where) == ("error", ("model.attn_backend",))
    assert finding.text == (
        f"Levanter has no attention backend {backend!r} and does not start; the other findings assume {assumed}"
    )
    assert finding.remedy == remedy
    assert {error.kind for error in result.errors} == {"attention backend", *others}
    assert not lint_8b(Q_HEADS, backend="JAX_FLASH").errors
    assert {backend.value for backend in AttentionBackend} == set(ATTENTION_BACKENDS)


@pytest.mark.parametrize(
    ("trainer", "where", "remedy", "corrected"),
    [
        ("{mehs: {axes: {model: 8}}}", "trainer.mehs", "did you mean 'mesh'?", {"mesh": {"axes": {"model": 8}}}),
        (
            "{mesh: {}, train_batchsize: 8}",
            "trainer.train_batchsize",
            "did you mean 'train_batch_size'?",
            {"mesh": {}, "train_batch_size": 8},
        ),
        ("{mesh: {axs: {data: 8}}}", "trainer.mesh.axs", "did you mean 'axes'?", {"mesh": {"axes": {"data": 8}}}),
        ("{qqq: 8}", "trainer.qqq", "remove it", {}),
        # keys of levanter 1.2, which a file is converted from before, are not suggested
        ("{model_axis_sise: 8}", "trainer.model_axis_sise", "remove it", {}),
        ("{1: 8}", "trainer.1", "remove it", {}),
        # not similar enough to rename it
        ("{per_device: 2}", "trainer.per_device", "remove it, or did you mean 'per_device_parallelism'?", {}),
        # a value of the wrong type, and a key that is there already
        ("{train_batchsize: big}", "trainer.train_batchsize", "remove it, or did you mean 'train_batch_size'?", {}),
        (
            "{train_batch_size: 16, train_batchsize: 8}",
            "trainer.train_batchsize",
            "remove it, or did you mean 'train_batch_size'?",
            {"train_batch_size": 16},
        ),
    ],
)
def test_levanter_does_not_start_with_an_unknown_key(lint_8b, trainer, where, remedy, corrected):
    result = lint_8b(trainer)
    finding = only(result.findings, "unknown key")
    assert (finding.severity, finding.where, finding.remedy) == ("error", (where,), remedy)
    assert result.subject.trainer == {"mp": "bf16", **corrected} and result.plan is not None
    section, _, key = where.rpartition(".")
    assert finding.text.startswith(f"Levanter has no key {1 if key == '1' else repr(key)} in {section} and does not st")


@pytest.mark.parametrize(
    ("trainer", "where", "text", "remedy", "mapping"),
    [
        (
            "{mesh: {axes: {model: 2}, shared_mapping: {mlp: modle, heads: model}}}",
            "trainer.mesh.shared_mapping.mlp",
            "trainer.mesh.shared_mapping maps 'mlp' to the unknown mesh axis 'modle'; did you mean 'model'?",
            "the other findings assume model",
            ["model"],
        ),
        (
            "{mesh: {axes: {model: 2}, compute_mapping: {mlp: [modle, replicas]}}}",
            "trainer.mesh.compute_mapping.mlp",
            "trainer.mesh.compute_mapping maps 'mlp' to the unknown mesh axis 'modle'; did you mean 'model'?",
            "the other findings assume model and replica",
            ["model", "replica"],
        ),
        (
            "{mesh: {axes: {model: 2}, shared_mapping: {mlp: xyz}}}",
            "trainer.mesh.shared_mapping.mlp",
            "trainer.mesh.shared_mapping maps 'mlp' to the unknown mesh axis 'xyz'; "
            "valid: data, model, replica, replica_dcn",
            "the other findings assume that mlp is replicated",
            None,
        ),
        (
            "{mesh: {axes: {modle: 2}}}",
            "trainer.mesh.axes.modle",
            "a plan's mesh is replica x data x model; not 'modle'; the other findings assume 'model'",
            "did you mean 'model'?",
            ["model"],
        ),
    ],
)
def test_misspelt_mesh_axis_is_one_finding_among_the_others(lint_8b, trainer, where, text, remedy, mapping):
    result = lint_8b(trainer)
    finding = only(result.findings, "unknown mesh axis")
    assert (finding.severity, finding.where, finding.text, finding.remedy) == ("error", (where,), text, remedy)
    assert result.subject.section.compute_mapping.get("mlp") == mapping
    assert len(result.findings) > 1


def test_every_key_of_levanter_is_known():
    assert {item.name for item in dataclasses.fields(TrainerConfig)} == {*TRAINER_KEYS}


def test_out_of_memory_names_the_largest_parts(lint_8b):
    result = lint_8b("{mesh: {param_mapping: {}}, mp: 'p=f32,c=bf16'}", "v5e-8")
    finding = only(result.findings, "memory")
    assert finding.severity == "error" and finding.where == (
        "trainer.mesh.shared_mapping",
        "trainer.mesh.param_mapping",
    )
    assert result.plan is not None
    peak = result.plan.memory.peak / 2**30
    assert finding.text.startswith(
        f"out of memory: {peak:.2f} GiB per device of 15.75, {peak - 15.75:.2f} too much; the "
    )
    # 8,030,261,248 parameters of 4 bytes
    assert "the largest parts: parameters 29.92, cast parameters 14.96, " in finding.text
    assert (
        "; the largest parameters: gate_proj.weight 7.00, up_proj.weight 7.00, down_proj.weight 7.00, " in finding.text
    )


@pytest.mark.parametrize(("host_gib", "is_full"), [(5, True), (7, False)])
def test_hosts_need_room_for_what_is_moved_there(host_gib, is_full):
    """The inputs of 32 layers, each 2 bytes x 4096 elements x 2048 tokens x 12 sequences of a device."""
    arguments = [f"--model.config={LLAMA}", "--hardware.slice=v5e-8", "--workload.kind=train"]
    arguments += ["--workload.gradient_checkpointing=offload_carries", "--workload.position=2048"]
    target = target_of(config.parse_config([*arguments, f"--hardware.host_gib={host_gib}"]))
    result = lint_trainer({"train_batch_size": 96, "mp": "p=f32,c=bfloat16"}, target)
    found = [finding for finding in result.findings if finding.text.startswith("out of the memory of the host: ")]
    assert [finding.severity for finding in found] == ["error"] * is_full
    if is_full:
        assert found[0].text.endswith(": 6.00 GiB of activations for each device, of 5.00")


def test_a_peak_within_the_error_of_its_estimate_may_fit():
    """Compiled for v5p-64 this step needs 32.29 GiB; for v4-64 the compiler recomputes, and 30.03 are enough."""
    arguments = [f"--model.config={LLAMA}", "--hardware.slice=v4-64", "--workload.kind=train"]
    target = target_of(config.parse_config([*arguments, "--workload.position=2048"]))
    result = lint_trainer({"train_batch_size": 1024, "mp": "p=f32,c=bfloat16"}, target)
    assert result.plan is not None and result.plan.memory.peak / 2**30 == pytest.approx(32.29, rel=0.03)
    finding = only(result.findings, "memory")
    assert finding.severity == "warning" and result.errors == []
    assert finding.text.startswith("may not fit: 32.18 GiB") and "the estimate errs by up to 2.46, and" in finding.text
    assert finding.remedy == "ask the compiler (shardplan verify --against), or shard more"


@pytest.mark.parametrize(
    ("types", "slice_name", "severity", "gib"),
    [("f32", "v5e-8", "error", "29."), ("bfloat16", "v5p-16", "warning", "14.")],
)
def test_large_replicated_parameters(lint_8b, types, slice_name, severity, gib):
    """They are an error if the step does not fit, because they are the reason."""
    trainer = f"{{mesh: {{shared_mapping: {{mlp: null, heads: null}}, param_mapping: {{}}}}, mp: {types}}}"
    finding = only(lint_8b(trainer, slice_name).findings, "replicated")
    assert finding.severity == severity
    assert finding.text.startswith(f"replicated on each of the 8 devices: {gib}")
    assert finding.remedy.startswith("shard the stored parameters over more mesh axes; unmapped among their axes: ")
    assert set(finding.remedy.split("axes: ")[1].split(", ")) >= {"embed", "vocab", "mlp", "kv_head", "head_size"}
    assert finding.parameters["lm_head.weight"] == 128256 * 4096 * (4 if types == "f32" else 2)
    assert not any("layernorm" in path for path in finding.parameters)


def test_barely_sharded_parameters(lint_8b):
    result = lint_8b("{mesh: {axes: {model: 2}, shared_mapping: {mlp: model, heads: null}, param_mapping: {}}}")
    finding = only(result.findings, "barely sharded")
    assert finding.severity == "warning"
    assert finding.text.startswith("2 shards on 8 devices: 5.25 GiB per device, of gate_proj.weight 1.75, ")


def test_levanters_own_loader(lint_8b):
    """It shards tensors over all mesh axes but replica."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 1, 2), ("replica", "data", "model"))
    assert best_effort_sharding((32, 4096), mesh=mesh).num_devices == 8
    assert best_effort_sharding((32, 4096), mesh=mesh).shard_shape((32, 4096)) == (32, 2048)
    mapping = "{mlp: model, heads: null, vocab: model, kv_head: model}"
    trainer = "{{mp: f32, mesh: {{axes: {{replica: {}, data: 1, model: {}}}, shared_mapping: {}}}}}"
    assert "loading" not in {each.kind for each in lint_8b(trainer.format(1, 8, mapping), "v5e-8").findings}
    finding = only(lint_8b(trainer.format(8, 1, mapping), "v5e-8").findings, "loading")
    assert finding.severity == "warning"
    assert finding.text == (
        "Levanter's own load_pretrained shards the tensors of the checkpoint over all mesh axes but replica (8): at "
        "least 29.92 GiB per device of 15.75"
    )


@pytest.mark.parametrize("trainer", ["{mesh: {batch_axis_name: 3}}", "null", "{mesh: {axes: {expert: 2}}}"])
def test_an_unreadable_section_raises(lint_8b, trainer):
    with pytest.raises(ConfigError):
        lint_8b(trainer)


def test_prediction_uses_the_file_and_levanters_default_types():
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-16", "--workload.kind=train", "--workload.batch=16"]
    base = config.parse_config(argv)
    target = target_of(base, parse_model_section({"model": {"gradient_checkpointing": "offload", "max_seq_len": 1024}}))
    result = lint_trainer({"train_batch_size": 32}, target)
    assert result.plan is not None
    work = result.plan.workload
    assert (work.batch, work.position, work.gradient_checkpointing) == (32, 1024, "offload")
    assert (work.param_dtype, work.compute_dtype) == ("float32", "float32")
    assert assumptions(result, target) == []

    target = target_of(base)
    assert assumptions(lint_trainer({}, target), target) == [
        "batch 16 (Levanter's default is 512)",
        "2048 tokens per sequence",
        "gradient checkpointing default (default in Levanter)",
    ]
    given = target_of(config.parse_config([*argv, "--workload.optimizer=lion"]))
    assert assumptions(lint_trainer({}, given), given)[-1] == "optimizer lion, whatever the section optimizer says"


EXPECTED_ERRORS = {
    "405b-everything-on-model": {"duplicate", "indivisible", "attention"},
    "405b-head-size": {"batch", "memory", "replicated", "barely sharded", "attention"},
    "405b-heads-mlp": {"heads", "memory", "replicated"},
    "405b-output-axes": set(),
    "405b-q-heads": {"attention"},
    "405b-sequence-share": set(),
    "405b-usual": set(),
}


@pytest.fixture(scope="module")
def target_405b():

    return target_of(config.parse_config(["--config", str(ROOT / "configs" / "405b.yaml")]))


def trainer_of(name):
    return read_levanter_file(str(ROOT / "configs" / "levanter" / f"{name}.yaml")).sections["trainer"]


@pytest.mark.parametrize("name", EXPECTED_ERRORS)
def test_configurations_of_the_repository(target_405b, name):
    """Each has exactly the errors it was kept for."""
    result = lint_trainer(trainer_of(name), target_405b)
    assert {finding.kind for finding in result.errors} == EXPECTED_ERRORS[name]


def test_heads_finding_of_the_405b_configuration(target_405b):
    """126 layers x 16384 x 16384 x 4 bytes: the stacked projection that is replicated on every device."""
    replicated = only(lint_trainer(trainer_of("405b-heads-mlp"), target_405b).findings, "heads").parameters
    assert replicated["transformer.layers.stacked.self_attn.q_proj.weight"] == 135_291_469_824


def schedule_of(*sizes):
    return [{"start": 100 * index, "value": size} for index, size in enumerate(sizes)]


SCHEDULES = [
    {"train_batch_size": schedule_of(128, 1024), "per_device_parallelism": 4},
    {"train_batch_size": schedule_of(256, 1024), "per_device_parallelism": 4},
    {"train_batch_size": schedule_of(64, 96)},
    {"train_batch_size": schedule_of(64, 128)},
    {"train_batch_size": schedule_of(64, 96), "allow_nondivisible_batch_size": True},
    {"train_batch_size": schedule_of(64, 96), "allow_nondivisible_batch_size": True, "per_device_parallelism": 1},
    {"train_batch_size": 96, "allow_nondivisible_batch_size": True},
    {"train_batch_size": 128, "per_device_parallelism": 2},
    {"train_batch_size": 128, "per_device_parallelism": 4},
]


@pytest.mark.parametrize("trainer", SCHEDULES, ids=str)
def test_levanter_refuses_the_batches_that_are_errors(trainer, monkeypatch):
    """Its trainer, and then its data loader, on 64 devices."""

    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-128", "--workload.kind=train", "--workload.position=512"]
    result = lint_trainer({"mp": "p=f32,c=bf16", **trainer}, target_of(config.parse_config(argv)))
    monkeypatch.setattr("jax.device_count", lambda: 64)
    levanter = draccus.decode(TrainerConfig, trainer)
    levanter.__dict__["num_slices"] = 1
    shards = levanter.data_axis_size
    loader = SimpleNamespace(_data_axis_size=shards, scheduler=BatchSchedule(levanter.train_batch_size))
    try:
        levanter._validate_and_set_defaults()
        if not levanter.allow_nondivisible_batch_size:
            DataLoader._check_batch_size_divisibility(loader)
        is_refused = False
    except ValueError:
        is_refused = True
    assert shards == 64 and is_refused == bool([each for each in result.errors if each.kind == "batch"])


def test_schedule_that_levanter_refuses(lint_8b):
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v5p-128", "--workload.kind=train"]
    target = target_of(config.parse_config(argv))
    trainer = {"per_device_parallelism": 4, "train_batch_size": schedule_of(128, 1024)}
    finding = only(lint_trainer(trainer, target).findings, "batch")
    assert finding.where[:2] == ("trainer.train_batch_size", "trainer.per_device_parallelism")
    assert finding.text == (
        "the 128 sequences from step 0 on are not divisible by 256 (per_device_parallelism 4 x 64 batch shards), and "
        "Levanter stops before the first step"
    )
    assert finding.remedy == "use multiples of 256 (256), or a smaller per_device_parallelism"
    unsorted = {"train_batch_size": [{"start": 10, "value": 64}, {"start": 5, "value": 128}]}
    finding = only(lint_trainer(unsorted, target).findings, "batch")
    assert (finding.severity, finding.remedy) == ("warning", "sort the stages, and start the first one at step 0")


def test_an_evaluation_has_the_batch_that_the_file_gives_per_device(lint_8b):
    """eval_lm takes per_device_eval_parallelism, or else per_device_parallelism, on each of 8 batch shards."""
    assert lint_8b("{train_batch_size: 64, per_device_eval_parallelism: 3}").subject.workload.batch == 24
    assert lint_8b("{train_batch_size: 64, per_device_parallelism: 2}").subject.workload.batch == 16
    assert lint_8b("{train_batch_size: 64}").subject.workload.batch == 64


@pytest.mark.parametrize("axis", ["context", "expert"])
def test_a_further_mesh_axis_of_one_device_changes_nothing(lint_8b, axis):
    plain = "{mesh: {axes: {model: 2}, shared_mapping: {kv_head: model}}}"
    further = f"{{mesh: {{axes: {{model: 2, {axis}: 1}}, shared_mapping: {{kv_head: [{axis}, model], x: {axis}}}}}}}"
    before, after = lint_8b(plain), lint_8b(further)
    assert after.plan is not None and before.plan is not None
    assert after.plan.mesh == before.plan.mesh and after.plan.memory == before.plan.memory
    assert after.plan.compute_mapping == before.plan.compute_mapping
    with pytest.raises(ConfigError, match=f"not '{axis}'"):
        lint_8b(further.replace(f"{axis}: 1", f"{axis}: 2"))


@pytest.fixture(scope="module")
def train_8b():
    """Lint the training of Llama-3.1-8B on eight devices, in float32, with some of `TrainingExtras`."""

    argv = [f"--model.config={LLAMA}", "--hardware.slice=v5p-16", "--workload.kind=train", "--workload.position=1024"]
    target = target_of(config.parse_config(argv))

    def run(**extras):
        changed = dataclasses.replace(target, extras=TrainingExtras(**extras))
        return lint_trainer({"mp": "p=f32,c=bf16", "train_batch_size": 8}, changed)

    run.model = target.model
    return run


PARAMETERS = 8_030_261_248
"""Parameters of Llama-3.1-8B."""
LORA_PARAMETERS = 20_971_520
"""Parameters of its adapters of rank 8 on all linear layers but the head, as PEFT counts them."""


def test_an_average_is_one_more_copy_of_the_parameters(train_8b):
    """Adam keeps two copies, an average is a third; `embed` is sharded over all eight devices."""
    plain, averaged = train_8b().plan.memory, train_8b(averages=True).plan.memory
    assert averaged.optimizer - plain.optimizer == pytest.approx(PARAMETERS * 4 / 8, rel=1e-3)
    assert averaged.peak - plain.peak == averaged.optimizer - plain.optimizer
    lion = train_8b(optimizer="lion").plan.memory
    assert lion.optimizer == pytest.approx(PARAMETERS * 4 / 8, rel=1e-3)


def test_only_adapters_have_gradients_and_optimizer_state(train_8b):
    result = train_8b(adapter_key="lora", lora={"r": 8})
    memory, plain = result.plan.memory, train_8b().plan.memory
    adapters = adapter_bytes(result.plan, train_8b.model, TrainingExtras(adapter_key="lora", lora={"r": 8}))
    assert LORA_PARAMETERS * 4 / 8 <= adapters <= LORA_PARAMETERS * 4
    assert memory.parameters == pytest.approx(PARAMETERS * 2 / 8 + adapters, rel=1e-3)  # frozen ones are in bfloat16
    assert memory.gradients == adapters and memory.optimizer == 2 * adapters and memory.cast_parameters == 0
    assert memory.peak < plain.peak - 2 * plain.parameters
    finding = only(result.findings, "not counted")
    assert (finding.severity, finding.where) == ("warning", ("lora",)) and "which is too high" in finding.text


def test_dpo_has_a_second_model_and_two_sequences_of_each_example(train_8b):
    plain = train_8b().plan.memory
    pairs = train_8b(is_preference=True).plan.memory
    reference = train_8b(is_preference=True, has_reference=True)
    assert reference.plan.memory.peak - pairs.peak == pytest.approx(PARAMETERS * 2 / 8, rel=1e-3)
    assert pairs.activations > plain.activations and pairs.optimizer == plain.optimizer
    assert only(reference.findings, "not counted").where == ("reference",)


@pytest.mark.parametrize(
    ("extras", "where", "words"),
    [
        ({"optimizer": "muon"}, "optimizer.type", "with that of adamw, which is too high"),
        ({"optimizer": "kron"}, "optimizer.type", "with that of adamw, which is too low"),
        ({"quantization": True}, "trainer.quantization", "quantized matrix products are not counted"),
    ],
)
def test_what_is_not_counted_is_said(train_8b, extras, where, words):
    finding = only(train_8b(**extras).findings, "not counted")
    assert finding.where == (where,) and words in finding.text


@pytest.mark.parametrize(
    ("sections", "program", "expected"),
    [
        ({"trainer": {"model_averaging": {"type": "ema"}}}, "train_lm", TrainingExtras(averages=True)),
        ({"lora": {"r": 4, "alpha": 8}}, "lora_lm", TrainingExtras(adapter_key="lora", lora={"r": 4})),
        (
            {"adapter": {"type": "lora"}},
            "train_lm",
            TrainingExtras(adapter_key="adapter", lora={}),
        ),
        ({"adapter": {"type": "none"}}, "train_lm", TrainingExtras()),
        ({"reference": {"type": "separate"}}, "train_dpo", TrainingExtras(is_preference=True, has_reference=True)),
        (
            {"reference": {"type": "adapter_base"}, "adapter": {"type": "lora", "r": 2}},
            "train_dpo",
            TrainingExtras(is_preference=True, adapter_key="adapter", lora={"r": 2}),
        ),
        ({"optimizer": {"type": "lion"}}, "train_lm", TrainingExtras(optimizer="lion")),
        ({"trainer": {"model_averaging": {"type": "ema"}}}, "eval_lm", TrainingExtras()),
    ],
)
def test_extras_of_a_file(sections, program, expected):
    (chosen,) = (each for each in PROGRAMS if each.name == program)
    assert parse_extras(sections, chosen) == expected
