"""Kinds of attention: each call is marked with its mask and sizes, priced by them, and gets a method of its own."""

import itertools
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import haliax as hax
import pytest
from levanter.layers.attention import AttentionMask

from shardplan import make_plan
from shardplan.attention import dot_product
from shardplan.cost.roofline import model_flops, model_flops_by_kind
from shardplan.decoder.config import DecoderConfig
from shardplan.decoder.parts.attention.grouped_attention import GroupedAttention
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.norm import NormConfig, NormKind
from shardplan.decoder.parts.segments import divide_layers
from shardplan.errors import ConfigError
from shardplan.execution import planned_attention
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import CLASS_KEY, DECODER, LEVANTER
from shardplan.model.registry import Model, abstract_module, build_model, transformers_config
from shardplan.plan.attention_plan import AttentionPlan, Strategy
from shardplan.plan.layer_numbers import layers_text
from shardplan.plan.plan import Plan
from shardplan.plan.workload.workload import Workload
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.program.step_trace import plan_step
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import model_from_config

GEMMA3_27B = {
    "model_type": "windowed", CLASS_KEY: "windowed_model:WindowedConfig", "vocab_size": 262208, "positions": 131072,
    "hidden_dim": 5376, "intermediate_dim": 21504, "num_heads": 32, "num_kv_heads": 16, "head_dim": 128,
    "window": 1024, "local": 5, "groups": 10, "tail": 2,
}  # fmt: skip
"""The layers of Gemma 3 27B: ten times five with a window and one without, then two with a window."""


@cache
def gemma3():
    """The decoder's model of Gemma 3 27B."""
    return build_model(read_config("gemma-3-27b", None), 131072)


def attended_pairs(length, window=None):
    """Pairs of query and key that a causal mask leaves, counted by hand."""
    if window is None:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


@pytest.mark.slow
@pytest.mark.parametrize(("source", "kind"), [("own", "eval"), ("own", "train"), ("decoder", "train")])
def test_flops_of_windows_in_some_layers_equal_a_hand_count(source, kind):
    """MFU counts of each layer the pairs of its own mask; the decoder's model has the same sizes."""
    c, length = GEMMA3_27B, 131072
    model = build_model(c, length) if source == "own" else gemma3()
    workload = Workload(kind, 2, length, "bfloat16", "bfloat16")
    heads, key_heads, head, embed = c["num_heads"], c["num_kv_heads"], c["head_dim"], c["hidden_dim"]
    weights = embed * head * (2 * heads + 2 * key_heads) + 3 * embed * c["intermediate_dim"]
    matmuls = 2 * length * (62 * weights + embed * c["vocab_size"])
    pairs = 10 * attended_pairs(length) + 52 * attended_pairs(length, 1024)
    attention = 2 * 2 * heads * head * pairs
    passes = 3 if kind == "train" else 1
    assert model_flops(model, workload) == pytest.approx(passes * 2 * (matmuls + attention), rel=1e-6)


def test_model_flops_are_divided_by_kind():
    """Beside the same model without windows: at 131,072 tokens it needs 1.84 times as many FLOPs."""
    c, length = GEMMA3_27B, 131072
    workload = Workload("eval", 1, length, "bfloat16", microbatches=1)
    flops = model_flops_by_kind(gemma3(), workload)
    pair = 4 * c["num_heads"] * c["head_dim"]
    by_window = {kind.pattern.window: value for kind, value in flops.items() if kind is not None}
    assert by_window[None] == pytest.approx(10 * pair * attended_pairs(length), rel=1e-6)
    assert by_window[1024] == pytest.approx(52 * pair * attended_pairs(length, 1024), rel=1e-6)
    full = build_model({**read_config("gemma-3-27b", None), "layer_types": ["full_attention"] * 62}, length)
    assert model_flops(full, workload) / sum(flops.values()) == pytest.approx(1.84, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, "eval") for family in ("gemma3_text", "olmo3", "cohere2", "exaone4", "smollm3")] + [("olmo3", "train")],
)
def test_layers_have_the_attention_that_transformers_gives_them(make_config, family, kind):
    """Their order and number come from the traced program alone, of which gradients are no part."""
    folder = Path(__file__).parents[1] / "golden" / "families" / family
    model = model_from_config(make_config(model_ref=folder, workload_position=32))
    expected = transformers_config(json.loads((folder / "config.json").read_text())).layer_types
    workload = Workload(kind, 2, 32, "bfloat16", microbatches=1)
    calls = plan_step(model, workload).attention_calls
    assert ["full_attention" if call.pattern.window is None else "sliding_attention" for call in calls] == expected


@pytest.mark.parametrize(
    ("numbers", "total", "text"),
    [
        (range(5, 62, 6), 62, "every 6th layer from 5 (10 of 62)"),
        ([i for i in range(62) if i % 6 != 5], 62, "all but every 6th layer from 5 (52 of 62)"),
        (range(0, 42, 2), 42, "every 2nd layer from 0 (21 of 42)"),
        (range(7), 7, "all 7 layers"),
        ([3], 5, "layer 3 (1 of 5)"),
        ([0, 1, 2, 4], 5, "layers 0-2, 4 (4 of 5)"),
        (range(1, 30, 3), 40, "layers 1, 4, 7, 10, ... (10 of 40)"),  # not up to the end
        (range(21, 92, 23), 92, "every 23rd layer from 21 (4 of 92)"),
        (range(11, 44, 11), 44, "every 11th layer from 11 (3 of 44)"),
    ],
)
def test_layers_in_words(numbers, total, text):
    assert layers_text(list(numbers), total) == text


def names(model, position, kind="eval", **workload):
    step = plan_step(model, Workload(kind, 2, position, "bfloat16", "bfloat16", **workload))
    return [kind.name for kind in step.attention_kinds]


@pytest.mark.slow
def test_kinds_are_named_by_mask_and_sizes(golden, make_config):
    """The kind with most work comes first, which is that without a window; windows that exclude nothing are none."""
    small = {**GEMMA3_27B, "groups": 1, "tail": 1, "hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    model = build_model(small, 65536)
    assert names(model, position=65536) == ["causal, head size 16", "causal, window 1024, head size 16"]
    plan_step.cache_clear()  # JAX keeps its own traces of functions: a kind is found in them as well
    assert names(model, position=65536) == ["causal, head size 16", "causal, window 1024, head size 16"]
    full, window = "causal, soft cap 50, head size 12", "causal, window 64, soft cap 50, head size 12"
    gemma2 = model_from_config(make_config(model_ref=golden / "gemma2", workload_position=128))
    assert names(gemma2, position=128) == [full, window] and names(gemma2, position=64) == [full]
    settings = {"model_ref": golden / "gemma2", "model_levanter_class": LEVANTER, "workload_position": 64}
    assert names(model_from_config(make_config(**settings)), position=64) == [full]


def composed(*attention, length, embed=64):
    """A model of the decoder with a layer for each of some kinds of attention."""
    norm = NormConfig(NormKind.RMS, 1e-6)
    layers = [LayerConfig(each, MlpConfig(128, "silu"), norm) for each in attention]
    fields = {"max_seq_len": length, "embed": embed, "segments": divide_layers(layers), "norm": norm, "is_tied": True}
    config = DecoderConfig(**fields, hf_config=json.dumps({"model_type": "llama"}))
    template = abstract_module(config, hax.Axis("vocab", 256))
    return Model("llama", DECODER, config, template, AttentionMask.causal(), None, length)


@pytest.mark.slow
def test_parts_of_the_decoder_are_kinds():
    """A layer with chunks and one without, as in Llama 4; sinks, as in gpt-oss; values of another size, as in MLA."""
    chunked, length = GroupedAttention(4, 2, 16, chunk=8192), 65536
    full = GroupedAttention(4, 2, 16, has_sinks=True, value_head_size=8)
    model = composed(chunked, chunked, full, length=length)
    full_name, chunked_name = "causal, sinks, head size 16/8", "causal, chunk 8192, head size 16"
    assert names(model, position=length) == [full_name, chunked_name]
    assert names(model, position=length, kind="score", window=1000) == [full_name, chunked_name]
    weights = 64 * 16 * (4 + 2 + 2 + 4) * 2 + 64 * (16 * (4 + 2) + 8 * (2 + 4)) + 3 * 2 * 64 * 128
    matmuls = 2 * length * (weights + 64 * 256)
    pairs = 2 * 32 * 8 * attended_pairs(8192) + (16 + 8) * attended_pairs(length)
    workload = Workload("eval", 1, length, "bfloat16", "bfloat16")
    assert model_flops(model, workload) == pytest.approx(matmuls + 2 * 4 * pairs, rel=1e-6)


@pytest.mark.slow
def test_each_kind_gets_the_method_that_is_best_for_it(make_config):
    """Beside every other pair of methods; layers with a window need one hop of a ring, and the others all of them."""
    c, length = {**GEMMA3_27B, "groups": 2, "tail": 0}, 131072
    model = build_model(c, length)
    settings = {"model_config": "llama-3.1-8b", "hardware_slice": "v5p-64", "workload_position": length}
    config = make_config(**settings, workload_batch=1, pin="position=data")
    plan = make_plan(config, model)
    full, window = (kind.name for kind in plan_step(model, config.workload.resolve()).attention_kinds)
    assert (full, window) == ("causal, head size 128", "causal, window 1024, head size 128")
    assert plan.attention.kinds.keys() == {window}
    devices = plan.mesh["data"]
    assert_costs_by_hand(plan, window, devices)
    seconds = {}
    for order in SequenceOrder:
        for strategies in itertools.product((Strategy.ALL_GATHER, Strategy.RING, Strategy.ULYSSES), repeat=2):
            if order == SequenceOrder.ZIGZAG and Strategy.ULYSSES in strategies:
                continue
            methods = {}
            for name, strategy in zip((full, window), strategies, strict=True):
                ulysses = devices if strategy == Strategy.ULYSSES else 1
                methods[name] = AttentionPlan(strategy, ulysses, devices // ulysses, order)
            attention = AttentionPlan.of_kinds(methods)
            other = plan_given_mappings(config, model, plan.mesh, plan.compute_mapping, plan.param_mapping, attention)
            seconds[order, *strategies] = other.cost.step_seconds
    chosen = (plan.attention.layout, plan.attention.of(full).strategy, plan.attention.of(window).strategy)
    assert seconds[chosen] == pytest.approx(plan.cost.step_seconds)
    assert seconds[chosen] <= 1.01 * min(seconds.values())  # plans within 1 % tie
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert "kinds" in plan.to_json()["attention"]


def assert_costs_by_hand(plan, window, devices):
    """Check what the plan says of ten layers with a window, whose keys pass along one hop of a ring.

    The model does not say how many layers it has, so that it is not known which they are.
    """
    full_cost, cost = plan.details.attention
    assert plan.attention.of(window).strategy == Strategy.RING and cost.kind == window
    assert (full_cost.layers, cost.layers) == (2, 10) and full_cost.layer_numbers == cost.layer_numbers == []
    keys = plan.workload.position // devices * GEMMA3_27B["num_kv_heads"] * GEMMA3_27B["head_dim"]
    assert cost.received_bytes == 10 * 2 * keys * 2
    # queries, keys, values and output, of bfloat16; three more copies of keys; the outputs of a hop, and in float32
    # these and the sum of all before
    queries = 2 * keys
    own = 2 * (2 * keys + 2 * queries)
    assert cost.live_bytes == own + 3 * keys * 2 + queries * 2 + 2 * queries * 4
    pair = 4 * GEMMA3_27B["num_heads"] * GEMMA3_27B["head_dim"]
    assert cost.model_flops == pytest.approx(10 * pair * attended_pairs(plan.workload.position, 1024), rel=1e-6)
    assert full_cost.model_flops == pytest.approx(2 * pair * attended_pairs(plan.workload.position), rel=1e-6)
    tasks = [task for task in plan.details.tasks if task.kind == "attention"]
    seconds = sum(task.compute_seconds + sum(each.exposed_seconds for each in task.transfers) for task in tasks)
    assert sum(each.compute_seconds + each.exposed_seconds for each in (full_cost, cost)) == pytest.approx(seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "passes"), [("eval", 1), ("train", 2)])
def test_live_bytes_of_attention_on_one_device(make_config, kind, passes):
    """Queries, keys, values and output, of bfloat16, and in training as many gradients."""
    model = composed(GroupedAttention(32, 8, 128), length=1024, embed=4096)
    settings = {"model_config": "llama-3.1-8b", "hardware_slice": "v5p-8", "workload_position": 1024}
    config = make_config(**settings, workload_batch=4, workload_kind=kind, pin="batch=data", mesh_data=4)
    (cost,) = make_plan(config, model).details.attention
    assert cost.live_bytes == passes * 2 * 1024 * 128 * (32 + 8 + 8 + 32)


@pytest.mark.slow
def test_kernels_of_the_decoder_take_values_of_another_size(make_config):
    """Also where positions are not sharded, and beside layers whose heads are too small for a kernel."""
    latent, small = GroupedAttention(32, 32, 192, value_head_size=128), GroupedAttention(8, 8, 32, chunk=512)
    model = composed(latent, small, length=1024, embed=2048)
    settings = {"model_config": "llama-3.1-8b", "hardware_slice": "v5p-8", "workload_position": 1024}
    attention = make_plan(make_config(**settings, workload_batch=8, pin="position="), model).attention
    kernels = [attention.of(name).kernel for name in names(model, position=1024)]
    assert (attention.strategy, kernels) == (Strategy.NONE, ["splash", "blockwise"])


def test_keys_of_other_chunks_are_not_sent(make_config):
    """Each of eight devices has a chunk, so that the ring has no hop, and nothing else is as fast."""
    length = 65536
    model = composed(*[GroupedAttention(32, 8, 128, chunk=8192)] * 2, length=length, embed=4096)
    settings = {"model_config": "llama-3.1-8b", "hardware_slice": "v5p-16", "workload_position": length}
    plan = make_plan(make_config(**settings, workload_batch=1, pin="position=data", mesh_data=8), model)
    assert (plan.attention.strategy, plan.attention.layout) == (Strategy.RING, SequenceOrder.CONTIGUOUS)
    assert not [each for each in plan.cost.collectives if "keys and values" in each.cause]
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_whose_kinds_have_several_orders_is_refused(make_config, raises_message):
    values = make_plan(make_config(model_config="llama-3.1-8b", hardware_slice="v5p-16", pin="position=data")).to_json()
    ring = values["mesh"]["data"]
    attention = {"strategy": "ring", "ulysses": 1, "ring": ring, "layout": "contiguous", "kernel": "splash"}
    values["attention"] = {**attention, "kinds": {"x": {**attention, "layout": "zigzag"}}}
    with raises_message(ConfigError):
        Plan.from_json(values)


def test_a_plan_replaces_only_the_choice_of_the_method(monkeypatch):
    """Documents and prefixes of a call say what is computed, so that they reach the planned attention."""
    received = {}
    monkeypatch.setattr(planned_attention, "sharded_attention", lambda **arguments: received.update(arguments))
    model, plan = SimpleNamespace(template=None), SimpleNamespace(attention=AttentionPlan("ring", 1, 4))
    query = hax.zeros({"heads": 2, "position": 8, "head": 4})
    key = query.rename({"position": "key_position"})
    with planned_attention.planned_attention(model, plan):
        dot_product.dot_product_attention(
            "position", "key_position", "head", query, key, key,
            documents=(3, 5), prefix=2, strategy="ulysses", block=128,
        )  # fmt: skip
    assert (received["documents"], received["prefix"]) == ((3, 5), 2)
    assert (received["strategy"], received["ulysses"]) == ("ring", 1) and "block" not in received
