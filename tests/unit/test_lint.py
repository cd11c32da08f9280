"""Every kind of finding: on which layout, with which words, and which not."""

import dataclasses
import json
from pathlib import Path

import draccus
import pytest
import yaml
from levanter.layers.attention import AttentionBackend
from levanter.trainer import TrainerConfig

from shardplan.errors import ConfigError
from shardplan.levanter_config.model_section import ATTENTION_BACKENDS, ModelSection, model_section
from shardplan.levanter_config.trainer_section import FLAT_KEYS, OTHER_KEYS, read_file
from shardplan.lint.lint import assumptions, lint, target_of

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "configs" / "models" / "llama-3.1-8b.json"


@pytest.fixture(scope="module")
def lint_8b():
    """Lints a trainer section, given as YAML, for Llama-3.1-8B: 32 layers, 8 key heads of 4 query heads, mlp 14336.

    In bfloat16, unless it says otherwise.
    """
    from shardplan import config

    targets = {}

    def run(trainer, slice_name="v4-16", backend=None):
        if (slice_name, backend) not in targets:
            argv = [f"--model.config={LLAMA}", f"--hardware.slice={slice_name}", "--workload.batch=16"]
            targets[slice_name, backend] = target_of(config.load(argv, "test"), ModelSection(attention_backend=backend))
        values = yaml.safe_load(trainer)
        if isinstance(values, dict):
            values.setdefault("mp", "bf16")
        return lint(values, targets[slice_name, backend])

    return run


def only(findings, kind):
    (found,) = [finding for finding in findings if finding.kind == kind]
    return found


def kinds(result):
    return [(finding.severity, finding.kind) for finding in result.findings]


USUAL = "{model_axis_size: 2, axis_resources: {mlp: model, heads: model, kv_head: model, vocab: model}}"
USUAL_MESH = """
mesh:
  axes: {model: 2}
  shared_mapping: {kv_head: model, vocab: model}
"""


@pytest.mark.parametrize("trainer", [USUAL, USUAL_MESH])
def test_nothing_is_wrong_with_the_usual_layout_in_either_schema(lint_8b, trainer):
    result = lint_8b(trainer)
    assert result.findings == () and result.plan is not None
    assert result.plan.mesh == {"replica": 1, "data": 4, "model": 2}


def test_a_misspelt_axis_that_leaves_parameters_whole(lint_8b):
    trainer = "{model_axis_size: 8, fsdp_axis: null, axis_resources: {mlp: model, heads: model, kv_heads: model}}"
    found = only(lint_8b(trainer).findings, "unknown axis")
    assert found.severity == "error" and found.where == ("trainer.axis_resources.kv_heads",)
    assert found.text == (
        "the model has no axis 'kv_heads', so that mapping it does nothing: Haliax replicates in silence, on every "
        "device, q_proj.weight 1.00, k_proj.weight 0.25, v_proj.weight 0.25 GiB"
    )
    assert found.remedy == "did you mean 'kv_head'?"
    assert found.parameters["transformer.layers.stacked.self_attn.k_proj.weight"] == 32 * 8 * 128 * 4096 * 2


def test_a_misspelt_axis_of_parameters_that_are_cut_otherwise(lint_8b):
    found = only(lint_8b(USUAL.replace("vocab", "vocabs")).findings, "unknown axis")
    assert found.severity == "warning"
    assert found.text == (
        "the model has no axis 'vocabs', so that mapping it does nothing: model does not cut "
        "token_embeddings.weight and lm_head.weight"
    )


def test_an_axis_that_is_like_none(lint_8b):
    found = only(lint_8b(USUAL.replace("vocab: model", "vocab: model, expert_42: data")).findings, "unknown axis")
    assert (found.severity, found.text) == (
        "warning",
        "the model has no axis 'expert_42', so that mapping it does nothing",
    )
    assert found.remedy.startswith("valid: batch, embed, head_size, heads, kv_head, ")


@pytest.mark.parametrize(
    ("model", "axis", "what"),
    [
        ("mixtral-8x7b", "token", "not predicted, and in models whose tokens choose experts it gave wrong logits"),
        ("mixtral-8x7b", "token_repeat", "not predicted, and in models whose tokens choose experts it gave wrong "),
        ("llama-3.1-8b", "key_position", "data 8 does is not predicted"),
        ("llama-3.1-8b", "token", None),
    ],
)
def test_axes_that_there_are_only_while_the_model_runs(model, axis, what):
    from shardplan import config

    argv = [f"--model.config={ROOT}/configs/models/{model}.json", "--hardware.slice=v4-16"]
    result = lint({"mp": "bf16", "axis_resources": {axis: "data"}}, target_of(config.load(argv, "test")))
    if what is None:
        assert only(result.findings, "unknown axis").text.endswith("so that mapping it does nothing")
        return
    found = only(result.findings, "running axis")
    assert (found.severity, found.where) == ("warning", (f"trainer.axis_resources.{axis}",))
    assert what in found.text and "unknown axis" not in {finding.kind for finding in result.findings}


def test_the_axis_that_layers_are_stacked_along(lint_8b):
    found = only(lint_8b(USUAL.replace("vocab: model", "vocab: model, layer: data")).findings, "stacked axis")
    assert (found.severity, found.where) == ("warning", ("trainer.axis_resources.layer",))
    assert found.text.startswith("layers are stacked along 'layer': cut by data 4, every trip of the loop over them ")
    assert ("warning", "stacked axis") not in kinds(lint_8b("{axis_resources: {layer: model}}"))
    # it is not what a misspelt axis was meant to be
    assert "'layer'" not in only(lint_8b("{axis_resources: {layers: data}}").findings, "unknown axis").remedy


def test_positions_and_a_batch_of_another_name_are_known(lint_8b):
    result = lint_8b("{model_axis_size: 2, batch_axis: row, axis_resources: {position: model}}", backend="vanilla")
    assert kinds(result) == []
    assert result.plan is not None and result.plan.compute_mapping["batch"] == ["replica", "data"]


@pytest.mark.parametrize(("fsdp", "severity"), [("null", "error"), ("embed", "warning")])
def test_heads_are_no_axis_of_the_projections_of_attention(lint_8b, fsdp, severity):
    trainer = f"{{model_axis_size: 4, fsdp_axis: {fsdp}, axis_resources: {{mlp: model, heads: model, vocab: model}}}}"
    found = only(lint_8b(trainer).findings, "heads")
    assert found.severity == severity and found.where == ("trainer.axis_resources.heads",)
    assert found.text.startswith(
        "'heads' is no axis of q_proj.weight, k_proj.weight and v_proj.weight, which have kv_head, q_heads_per_group "
        "and head_size and so "
    )
    consequence = {
        "error": "are replicated in silence, on every device: q_proj.weight 1.00, k_proj.weight 0.25, ",
        "warning": "are not cut by model 4",
    }
    assert consequence[severity] in found.text
    assert found.remedy == "map kv_head to model as well"


def test_more_devices_than_key_heads(lint_8b):
    trainer = "{model_axis_size: 16, axis_resources: {mlp: model, heads: model}}"
    assert only(lint_8b(trainer, "v4-64").findings, "heads").remedy == (
        "16 does not divide kv_head (8): make model 8, and map kv_head to it as well"
    )


def test_mesh_axes_that_nothing_is_on(lint_8b):
    found = only(lint_8b("{model_axis_size: 4}").findings, "unused mesh axis")
    assert (found.severity, found.where) == ("warning", ("trainer.model_axis_size",))
    assert found.text == "no logical axis is on model (4 devices): they all hold and compute the same"
    assert found.remedy == "map a logical axis to model in trainer.axis_resources, or make it 1"
    trainer = "{model_axis_size: 4, axis_resources: {mlps: model}, parameter_axis_resources: {vocab: model}}"
    found = only(lint_8b(trainer).findings, "unused mesh axis")
    assert found.text.endswith("(4 devices) while computing, only vocab at rest: they all do the same work")
    mesh = "{mesh: {axes: {replica: 2}, compute_mapping: {batch: data}}}"
    assert only(lint_8b(mesh).findings, "unused mesh axis").where == ("trainer.mesh.axes.replica",)


def test_fsdp_axis_wins_over_a_tensor_parallel_axis(lint_8b):
    found = only(lint_8b(USUAL.replace("{model", "{fsdp_axis: mlp, model", 1)).findings, "overridden")
    assert (found.severity, found.where) == ("warning", ("trainer.axis_resources.mlp", "trainer.fsdp_axis"))
    assert found.text == (
        "trainer.fsdp_axis wins: mlp is cut by model while computing and by data alone at rest, so that its weights "
        "move between the two at every use"
    )
    assert found.remedy == "take mlp out of one of the two, or name another axis in fsdp_axis"


def test_the_default_fsdp_axis_wins_over_parameter_axis_resources(lint_8b):
    found = only(lint_8b(USUAL.replace("}}", "}, parameter_axis_resources: {embed: model}}")).findings, "overridden")
    assert found.where == ("trainer.parameter_axis_resources.embed", "trainer.fsdp_axis")
    assert found.text == "trainer.fsdp_axis (its default) wins: embed is cut by data, and this entry has no effect"


def test_batch_axis_and_tensor_parallel_axes_win_over_axis_resources(lint_8b):
    trainer = "{model_axis_size: 2, tensor_parallel_axes: [mlp], axis_resources: {mlp: data, batch: data}}"
    texts = [finding.text for finding in lint_8b(trainer).findings if finding.kind == "overridden"]
    assert texts == [
        "trainer.tensor_parallel_axes wins: mlp is cut by model, and this entry has no effect",
        "trainer.batch_axis (its default) wins: batch is cut by replica and data, and this entry has no effect",
    ]


@pytest.mark.parametrize("model", [4, 1])
def test_duplicates_name_the_tensors(lint_8b, model):
    """JAX refuses a mesh axis on two dimensions of an array even where it has one device."""
    trainer = f"{{model_axis_size: {model}, axis_resources: {{kv_head: model, head_size: model}}}}"
    result = lint_8b(trainer)
    found = only(result.findings, "duplicate")
    assert found.severity == "error"
    assert found.where == ("trainer.axis_resources.kv_head", "trainer.axis_resources.head_size")
    assert found.text == (
        "kv_head and head_size together on model in one array (DuplicateSpecError): q_proj.weight, k_proj.weight, "
        "v_proj.weight, the result of q_proj.weight and the result of k_proj.weight"
    )
    assert found.remedy == "let model cut one dimension of an array: keep it for one of kv_head and head_size"
    assert result.plan is None


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        ("{axis_resources: {embed: data}, fsdp_axis: null}", "batch and embed together on data in one array ("),
        ("{mesh: {param_mapping: {mlp: [data, data]}}}", "mlp twice on data in one array (DuplicateSpecError): gate"),
        ("{parameter_axis_resources: {mlp: data}}", "mlp and embed together on data in one array (DuplicateSpec"),
    ],
)
def test_duplicates_of_activations_and_at_rest(lint_8b, trainer, text):
    assert any(finding.text.startswith(text) for finding in lint_8b(trainer).errors)


def test_indivisible(lint_8b):
    trainer = "{model_axis_size: 16, axis_resources: {mlp: model, kv_head: model}}"
    result = lint_8b(trainer, "v4-64")
    found = only(result.findings, "indivisible")
    assert (found.severity, found.where) == ("error", ("trainer.axis_resources.kv_head",))
    assert found.text == "kv_head (8) is not divisible by the 16 devices of model 16 (IndivisibleError)"
    assert found.remedy == "at most 8 of the 16 can cut it: use fewer, or map another axis"
    assert result.plan is None
    both = lint_8b("{mesh: {axes: {model: 4}, param_mapping: {kv_head: [model, data]}}}", "v4-64")
    assert "by the 32 devices of model 4 x data 8 (" in only(both.findings, "indivisible").text


def test_levanter_rounds_the_vocabulary_up(tmp_path):
    """GPT-2's 50257 tokens, which nothing divides; eval_lm rounds by the mapping for computing alone."""
    from shardplan import config

    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(LLAMA.read_text()), "vocab_size": 50257}))

    def lint_odd(trainer, kind):
        argv = [f"--model.config={path}", "--hardware.slice=v4-16", "--workload.batch=16"]
        return lint({"mp": "bf16", **trainer}, target_of(config.load([*argv, f"--workload.kind={kind}"], "test")))

    both = {"model_axis_size": 2, "axis_resources": {"vocab": "model"}}
    at_rest = {"model_axis_size": 2, "axis_resources": {"mlp": "model"}, "parameter_axis_resources": {"vocab": "model"}}
    result = lint_odd(both, "eval")
    found = only(result.findings, "vocabulary")
    assert (found.severity, found.where) == ("warning", ("trainer.axis_resources.vocab",))
    assert found.text == (
        "vocab (50257) is not divisible by the 2 devices of model 2: Levanter rounds it up to 50258, and what it "
        "adds takes part in the softmax, so that the losses are others"
    )
    assert not result.errors and result.plan is not None
    assert not lint_odd(both, "train").errors and not lint_odd(at_rest, "train").errors
    assert [finding.kind for finding in lint_odd(at_rest, "eval").errors] == ["indivisible"]


@pytest.mark.parametrize(
    ("trainer", "nearest", "mesh"),
    [
        ("{model_axis_size: 48}", 32, {"replica": 1, "data": 1, "model": 32}),
        ("{model_axis_size: 64, replica_ici_axis_size: 3}", 1, {"replica": 1, "data": 1, "model": 32}),
        ("{mesh: {axes: {data: 4, model: 4}}}", 8, {"replica": 1, "data": 8, "model": 4}),
        ("{mesh: {dcn_axes: {replica_dcn: 2}}}", 1, {"replica": 1, "data": 32, "model": 1}),
    ],
)
def test_a_wrong_mesh_is_linted_on_with_the_nearest_size(lint_8b, trainer, nearest, mesh):
    result = lint_8b(trainer, "v4-64")
    found = [finding for finding in result.findings if finding.kind == "mesh size"]
    assert found[-1].severity == "error" and found[-1].remedy == f"what follows is said of {nearest}"
    assert result.subject.layout.mesh == mesh


def test_a_wrong_mesh_in_words(lint_8b):
    found = only(lint_8b("{model_axis_size: 12}", "v4-64").findings, "mesh size")
    assert found.where == ("trainer.model_axis_size",)
    assert found.text == "trainer.model_axis_size 12 does not divide the 32 devices; did you mean 8 or 16?"


@pytest.mark.parametrize(
    ("trainer", "text", "remedy"),
    [
        (
            "{train_batch_size: 12}",
            "12 sequences are not divisible by the 8 groups of devices that replica 1 x data 8 make",
            "use 8 or 16 sequences, or a larger model axis",
        ),
        (
            "{train_batch_size: 4, batch_axis: null, axis_resources: {batch: data}, replica_ici_axis_size: 2}",
            "4 sequences are not divisible by the 8 groups of devices that Levanter's trainer counts (replica x data)",
            "use 8 sequences, or a larger model axis",
        ),
    ],
)
def test_a_batch_that_does_not_divide(lint_8b, trainer, text, remedy):
    found = only(lint_8b(trainer).findings, "batch")
    assert (found.severity, found.text, found.remedy) == ("error", text, remedy)
    assert found.where == ("trainer.train_batch_size", "trainer.model_axis_size")


def test_a_batch_that_is_not_cut(lint_8b):
    found = only(lint_8b("{batch_axis: null}").findings, "batch")
    assert (found.severity, found.where) == ("warning", ("trainer.batch_axis",))
    assert found.text == "'batch' is cut by nothing: every device computes all 16 sequences"


def test_lists_are_for_the_mesh_schema(lint_8b):
    """Levanter declares its flat mappings as tuples of one text, as which draccus then reads a longer list."""
    trainer = "{model_axis_size: 2, fsdp_axis: null, parameter_axis_resources: {mlp: [model, data]}}"
    found = only(lint_8b(trainer).findings, "list")
    assert (found.severity, found.where) == ("error", ("trainer.parameter_axis_resources.mlp",))
    assert found.text == "Levanter reads the list [model, data] as one text, which names no mesh axis (ValueError)"
    assert found.remedy == "name one of model and data, or give Levanter the list in Python"
    assert draccus.decode(TrainerConfig, yaml.safe_load(trainer)).parameter_axis_resources["mlp"] == "['model', 'data']"
    later = lint_8b("{mesh: {axes: {model: 2}, param_mapping: {mlp: [model, data]}}}")
    assert ("error", "list") not in kinds(later)


def test_attention_needs_whole_heads(lint_8b):
    trainer = "{model_axis_size: 4, axis_resources: {mlp: model, heads: model, q_heads_per_group: model}}"
    found = only(lint_8b(trainer).findings, "attention")
    assert (found.severity, found.where) == ("error", ("trainer.axis_resources.q_heads_per_group",))
    assert found.text == (
        "q_heads_per_group cut while computing: Levanter's splash attention, its default on TPUs, runs on each device "
        "alone and is wrong in silence"
    )
    assert not lint_8b(trainer, backend="jax_flash").errors
    assert ("error", "attention") not in kinds(lint_8b(trainer, "cpu-8"))


def test_an_attention_backend_that_there_is_not(lint_8b):
    """It switches off nothing: what it was to be is not known."""
    trainer = "{model_axis_size: 4, axis_resources: {mlp: model, heads: model, q_heads_per_group: model}}"
    result = lint_8b(trainer, backend="jax_flsh")
    found = only(result.findings, "attention backend")
    assert (found.severity, found.where) == ("warning", ("model.attn_backend",))
    assert found.remedy == "did you mean 'jax_flash'?"
    assert ("error", "attention") in kinds(result)
    assert not lint_8b(trainer, backend="JAX_FLASH").errors
    assert {backend.value for backend in AttentionBackend} == set(ATTENTION_BACKENDS)


@pytest.mark.parametrize(
    ("trainer", "where", "remedy"),
    [
        ("{model_axis_sise: 8}", "trainer.model_axis_sise", "did you mean 'model_axis_size'?"),
        ("{mehs: {axes: {model: 8}}}", "trainer.mehs", "did you mean 'mesh'?"),
        ("{mesh: {}, train_batchsize: 8}", "trainer.train_batchsize", "did you mean 'train_batch_size'?"),
        ("{qqq: 8}", "trainer.qqq", "take it out"),
        ("{1: 8}", "trainer.1", "take it out"),
    ],
)
def test_keys_that_there_are_not(lint_8b, trainer, where, remedy):
    found = only(lint_8b(trainer).findings, "unknown key")
    assert (found.severity, found.where, found.remedy) == ("warning", (where,), remedy)


def test_every_key_of_levanter_is_known():
    ours = {*FLAT_KEYS, *OTHER_KEYS} - {"mesh", "use_explicit_mesh_axes"}
    assert {item.name for item in dataclasses.fields(TrainerConfig)} == ours


def test_out_of_memory_names_the_largest_parts(lint_8b):
    result = lint_8b("{fsdp_axis: null, mp: 'p=f32,c=bf16'}", "v5e-8")
    found = only(result.findings, "memory")
    assert found.severity == "error" and found.where == ("trainer.axis_resources", "trainer.parameter_axis_resources")
    assert result.plan is not None
    peak = result.plan.memory.peak / 2**30
    assert found.text.startswith(
        f"out of memory: {peak:.2f} GiB per device of 15.75, {peak - 15.75:.2f} too much; the "
    )
    # 8,030,261,248 parameters of 4 bytes
    assert "the largest parts: parameters 29.92, cast parameters 14.96, " in found.text
    assert "; the largest parameters: gate_proj.weight 7.00, up_proj.weight 7.00, down_proj.weight 7.00, " in found.text


@pytest.mark.parametrize(("slice_name", "severity"), [("v5e-8", "error"), ("v5p-16", "warning")])
def test_replicated_giants(lint_8b, slice_name, severity):
    """An error where the layout does not fit: they are the reason."""
    found = only(lint_8b("{fsdp_axis: null}", slice_name).findings, "replicated")
    assert found.severity == severity
    assert found.text.startswith("whole on each of the 8 devices: 14.")
    assert found.remedy.startswith("let them rest cut by more mesh axes; of their axes nothing maps ")
    assert set(found.remedy.split("maps ")[1].split(", ")) >= {"embed", "vocab", "mlp", "kv_head", "head_size"}
    assert found.parameters["lm_head.weight"] == 128256 * 4096 * 2
    assert not any("layernorm" in path for path in found.parameters)


def test_parameters_that_are_hardly_cut(lint_8b):
    result = lint_8b("{model_axis_size: 2, fsdp_axis: null, axis_resources: {mlp: model}}")
    found = only(result.findings, "hardly cut")
    assert found.severity == "warning"
    assert found.text.startswith("cut into 2 parts for 8 devices: 5.25 GiB per device, of gate_proj.weight 1.75, ")


def test_levanters_own_loader(lint_8b):
    trainer = "{model_axis_size: 8, mp: f32, axis_resources: {mlp: model, vocab: model, kv_head: model}}"
    found = only(lint_8b(trainer, "v5e-8").findings, "loading")
    assert found.severity == "warning"
    assert found.text == (
        "Levanter's own load_pretrained cuts every tensor of the checkpoint by data (1) alone: at least 29.92 GiB per "
        "device of 15.75"
    )


@pytest.mark.parametrize("trainer", ["{axis_resources: {mlp: modle}}", "{fsdp_axis: 3}", "null"])
def test_what_cannot_be_read_is_no_finding(lint_8b, trainer):
    with pytest.raises(ConfigError):
        lint_8b(trainer)


def test_what_the_file_says_is_measured_and_levanters_types_are_float32():
    from shardplan import config

    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-16", "--workload.kind=train", "--workload.batch=16"]
    asked = config.load(argv, "test")
    target = target_of(asked, model_section({"model": {"gradient_checkpointing": "offload", "max_seq_len": 1024}}))
    found = lint({"train_batch_size": 32}, target)
    assert found.plan is not None
    work = found.plan.workload
    assert (work.batch, work.position, work.gradient_checkpointing) == (32, 1024, "offload")
    assert (work.param_dtype, work.compute_dtype) == ("float32", "float32")
    assert assumptions(found, target) == ["optimizer adamw, whatever the section optimizer says"]

    target = target_of(asked)
    assert assumptions(lint({}, target), target) == [
        "batch 16 (Levanter's default is 512)",
        "2048 tokens per sequence",
        "gradient checkpointing default (default in Levanter)",
        "optimizer adamw, whatever the section optimizer says",
    ]


STORIES = {
    "405b-everything-on-model": {"duplicate", "indivisible", "attention"},
    "405b-head-size": {"memory", "replicated", "hardly cut", "attention"},
    "405b-heads-mlp": {"heads", "memory", "replicated"},
    "405b-output-axes": {"list"},
    "405b-q-heads": {"attention"},
    "405b-sequence-share": {"list", "batch", "attention"},
    "405b-usual": set(),
}


@pytest.fixture(scope="module")
def target_405b():
    from shardplan import config

    return target_of(config.load(["--config", str(ROOT / "configs" / "405b.yaml")], "test"))


def trainer_of(name):
    return read_file(str(ROOT / "configs" / "levanter" / f"{name}.yaml"))["trainer"]


@pytest.mark.parametrize("name", STORIES)
def test_the_configurations_of_the_repository(target_405b, name):
    """What each of them was kept for is found; all of them are too large for Levanter's own loader."""
    result = lint(trainer_of(name), target_405b)
    assert {finding.kind for finding in result.errors} == STORIES[name]
    assert "loading" in {finding.kind for finding in result.findings}


def test_the_story_of_heads(target_405b):
    """126 layers x 16384 x 16384 x 4 bytes: the stacked projection that is whole on every device."""
    whole = only(lint(trainer_of("405b-heads-mlp"), target_405b).findings, "heads").parameters
    assert whole["transformer.layers.stacked.self_attn.q_proj.weight"] == 135_291_469_824
