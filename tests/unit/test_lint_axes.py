"""Findings about logical axes and mesh axes: misspelt, unused, mapped twice, or not divisible."""

import draccus
import pytest
import yaml
from levanter.trainer import TrainerConfig
from lint_trainers import USUAL, kinds, lint_8b, only

from shardplan import config
from shardplan.errors import ConfigError
from shardplan.lint.lint import lint_trainer, target_of


def test_usual_mapping_has_no_findings():
    result = lint_8b(USUAL)
    assert result.findings == () and result.plan is not None
    assert result.plan.mesh == {"replica": 1, "data": 4, "model": 2}


def test_misspelt_axis_that_leaves_parameters_replicated():
    trainer = "{mesh: {axes: {model: 8}, shared_mapping: {kv_heads: model}, param_mapping: {}}}"
    finding = only(lint_8b(trainer).findings, "unknown axis")
    assert finding.severity == "error" and finding.where == ("trainer.mesh.shared_mapping.kv_heads",)
    assert finding.text == (
        "the model has no axis 'kv_heads', so mapping it has no effect: Haliax silently replicates, on every device, "
        "q_proj.weight 1.00, k_proj.weight 0.25, v_proj.weight 0.25 GiB"
    )
    assert finding.remedy == "did you mean 'kv_head'?"
    assert finding.parameters["transformer.layers.stacked.self_attn.k_proj.weight"] == 32 * 8 * 128 * 4096 * 2


def test_misspelt_axis_of_parameters_sharded_over_another_axis():
    finding = only(lint_8b(USUAL.replace("vocab", "vocabs")).findings, "unknown axis")
    assert finding.severity == "warning"
    assert finding.text == (
        "the model has no axis 'vocabs', so mapping it has no effect: model does not shard "
        "token_embeddings.weight and lm_head.weight"
    )


def test_unknown_axis_without_a_similar_name():
    finding = only(lint_8b(USUAL.replace("vocab: model", "vocab: model, expert_42: data")).findings, "unknown axis")
    assert (finding.severity, finding.text) == (
        "warning",
        "the model has no axis 'expert_42', so mapping it has no effect",
    )
    assert finding.remedy.startswith("valid: batch, embed, head_size, heads, kv_head, ")


@pytest.mark.slow
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


def test_axis_along_which_layers_are_stacked():
    finding = only(lint_8b(USUAL.replace("kv_head: model", "kv_head: model, layer: data")).findings, "stacked axis")
    assert (finding.severity, finding.where) == ("warning", ("trainer.mesh.shared_mapping.layer",))
    assert finding.text.startswith(
        "layers are stacked along 'layer': sharded over data 4, every iteration of the loop over layers "
    )
    assert ("warning", "stacked axis") not in kinds(lint_8b("{mesh: {shared_mapping: {layer: model}}}"))
    # it is never suggested for a misspelt axis
    misspelt = lint_8b("{mesh: {shared_mapping: {layers: data}}}")
    assert "'layer'" not in only(misspelt.findings, "unknown axis").remedy


def test_positions_and_a_batch_axis_of_another_name_are_known():
    mapping = "{mlp: null, heads: null, position: model}"
    trainer = f"{{mesh: {{axes: {{model: 2}}, batch_axis_name: row, shared_mapping: {mapping}}}}}"
    result = lint_8b(trainer, backend="vanilla")
    assert kinds(result) == []
    assert result.plan is not None and result.plan.compute_mapping["batch"] == ["replica", "data"]


@pytest.mark.parametrize(
    ("params", "severity"), [("{vocab: model}", "error"), ("{embed: data, vocab: model}", "warning")]
)
def test_heads_is_not_an_axis_of_the_query_key_and_value_projections(params, severity):
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


def test_more_devices_than_key_heads():
    trainer = "{mesh: {axes: {model: 16}, shared_mapping: {mlp: model, heads: model}}}"
    assert only(lint_8b(trainer, "v4-64").findings, "heads").remedy == (
        "16 does not divide kv_head (8): make model 8, and map kv_head to it as well"
    )


def test_mesh_axes_without_a_logical_axis():
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
def test_duplicates_name_the_tensors(model):
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


def test_duplicates_are_where_the_mesh_axis_is_mapped():
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
def test_duplicates_of_activations_and_of_stored_parameters(trainer, text):
    assert any(finding.text.startswith(text) for finding in lint_8b(trainer).errors)


def test_indivisible():
    trainer = "{mesh: {axes: {model: 16}, shared_mapping: {mlp: model, heads: null, kv_head: model}}}"
    result = lint_8b(trainer, "v4-64")
    finding = only(result.findings, "indivisible")
    assert (finding.severity, finding.where) == ("error", ("trainer.mesh.shared_mapping.kv_head",))
    assert finding.text == "kv_head (8) is not divisible by the 16 devices of model 16 (IndivisibleError)"
    assert finding.remedy == "shard it over at most 8 of the 16 devices, or map another axis"
    assert result.plan is None
    both = lint_8b("{mesh: {axes: {model: 4}, param_mapping: {kv_head: [model, data]}}}", "v4-64")
    assert "by the 32 devices of model 4 x data 8 (" in only(both.findings, "indivisible").text


def test_lists_of_mesh_axes():
    """Levanter takes a list for a logical axis, and shards it over all of them."""
    trainer = "{mesh: {axes: {model: 2}, shared_mapping: {kv_head: model}, param_mapping: {mlp: [model, data]}}}"
    result = lint_8b(trainer)
    assert result.errors == [] and result.plan is not None and "list" not in {each.kind for each in result.findings}
    assert result.plan.param_mapping["mlp"] == ["model", "data"]
    decoded = draccus.decode(TrainerConfig, yaml.safe_load(trainer))
    assert list(decoded.parameter_axis_mapping["mlp"]) == ["model", "data"]


def test_empty_lists():
    result = lint_8b("{mesh: {axes: {model: 2}, shared_mapping: {mlp: []}}}")
    finding = only(result.findings, "list")
    assert (finding.severity, finding.where) == ("error", ("trainer.mesh.shared_mapping.mlp",))
    assert finding.text == (
        "trainer.mesh.shared_mapping maps 'mlp' to an empty list, with which Levanter fails; null replicates it"
    )
    assert finding.remedy == "the other findings assume that mlp is replicated"
    assert "mlp" not in result.subject.section.compute_mapping


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
            "a plan's mesh has no axis 'modle'; the other findings assume 'model'",
            "did you mean 'model'?",
            ["model"],
        ),
    ],
)
def test_misspelt_mesh_axis_is_one_finding_among_the_others(trainer, where, text, remedy, mapping):
    result = lint_8b(trainer)
    finding = only(result.findings, "unknown mesh axis")
    assert (finding.severity, finding.where, finding.text, finding.remedy) == ("error", (where,), text, remedy)
    assert result.subject.section.compute_mapping.get("mlp") == mapping
    assert len(result.findings) > 1


@pytest.mark.parametrize("axis", ["context", "expert"])
def test_a_further_mesh_axis_of_one_device_changes_nothing(axis, raises_message):
    plain = "{mesh: {axes: {model: 2}, shared_mapping: {kv_head: model}}}"
    further = f"{{mesh: {{axes: {{model: 2, {axis}: 1}}, shared_mapping: {{kv_head: [{axis}, model], x: {axis}}}}}}}"
    before, after = lint_8b(plain), lint_8b(further)
    assert after.plan is not None and before.plan is not None
    assert after.plan.mesh == before.plan.mesh and after.plan.memory == before.plan.memory
    assert after.plan.compute_mapping == before.plan.compute_mapping
    with raises_message(ConfigError):
        lint_8b(further.replace(f"{axis}: 1", f"{axis}: 2"))
