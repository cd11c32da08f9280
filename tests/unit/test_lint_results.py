"""Findings about mappings with which Levanter computes another result: of attention, loss and vocabulary."""

import json

import pytest
from levanter.layers.attention import AttentionBackend
from lint_trainers import LLAMA, kinds, lint_8b, only

from shardplan import config
from shardplan.levanter_config.model_section import ATTENTION_BACKENDS
from shardplan.lint.lint import lint_trainer, target_of
from shardplan.model.huggingface.hf_config import read_config


@pytest.mark.slow
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


Q_HEADS = "{mesh: {axes: {model: 4}, shared_mapping: {mlp: model, heads: model, q_heads_per_group: model}}}"


def test_attention_requires_unsharded_heads():
    finding = only(lint_8b(Q_HEADS).findings, "attention")
    assert (finding.severity, finding.where) == ("error", ("trainer.mesh.shared_mapping.q_heads_per_group",))
    assert finding.text == (
        "computations shard q_heads_per_group: Levanter's splash attention, its default on TPUs, runs on each device "
        "alone and is silently wrong"
    )
    assert not lint_8b(Q_HEADS, backend="jax_flash").errors
    assert ("error", "attention") not in kinds(lint_8b(Q_HEADS, "cpu-8"))


@pytest.mark.parametrize("backend", ["splash", None])
def test_splash_attention_takes_sharded_positions(backend):
    trainer = "{mesh: {axes: {model: 2}, shared_mapping: {mlp: null, heads: null, position: model}}}"
    assert ("error", "attention") not in kinds(lint_8b(trainer, backend=backend))


@pytest.mark.parametrize("axis", ["vocab", "embed"])
def test_levanters_loss_needs_an_unsharded_vocabulary(axis):
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


@pytest.mark.parametrize(
    ("backend", "assumed", "remedy", "others"),
    [
        ("jax_flsh", "jax_flash", "did you mean 'jax_flash'?", set()),
        ("qqq", "its default", "valid: default, jax_flash, nvte, splash, vanilla", {"attention"}),
    ],
)
def test_unknown_attention_backend(backend, assumed, remedy, others):
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
