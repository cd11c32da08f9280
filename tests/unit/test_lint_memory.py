"""Findings about memory: of devices and of hosts, and parameters that are replicated."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from levanter.utils.jax_utils import best_effort_sharding
from lint_trainers import LLAMA, lint_8b, only

from shardplan import config
from shardplan.lint.lint import lint_trainer, target_of


def test_out_of_memory_names_the_largest_parts():
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


@pytest.mark.slow
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


@pytest.mark.slow
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
def test_large_replicated_parameters(types, slice_name, severity, gib):
    """They are an error if the step does not fit, because they are the reason."""
    trainer = f"{{mesh: {{shared_mapping: {{mlp: null, heads: null}}, param_mapping: {{}}}}, mp: {types}}}"
    finding = only(lint_8b(trainer, slice_name).findings, "replicated")
    assert finding.severity == severity
    assert finding.text.startswith(f"replicated on each of the 8 devices: {gib}")
    assert finding.remedy.startswith("shard the stored parameters over more mesh axes; unmapped among their axes: ")
    assert set(finding.remedy.split("axes: ")[1].split(", ")) >= {"embed", "vocab", "mlp", "kv_head", "head_size"}
    assert finding.parameters["lm_head.weight"] == 128256 * 4096 * (4 if types == "f32" else 2)
    assert not any("layernorm" in path for path in finding.parameters)


def test_barely_sharded_parameters():
    result = lint_8b("{mesh: {axes: {model: 2}, shared_mapping: {mlp: model, heads: null}, param_mapping: {}}}")
    finding = only(result.findings, "barely sharded")
    assert finding.severity == "warning"
    assert finding.text.startswith("2 shards on 8 devices: 5.25 GiB per device, of gate_proj.weight 1.75, ")


def test_levanters_own_loader():
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
