"""Kinds of attention: each call is marked with its mask and sizes, priced by them, and gets a method of its own."""

import itertools
import json
from types import SimpleNamespace

import haliax as hax
import pytest

from shardplan import make_plan
from shardplan.attention import dot_product
from shardplan.cost.roofline import model_flops
from shardplan.errors import ConfigError
from shardplan.execution import planned_attention
from shardplan.model.own_model import CLASS_KEY
from shardplan.model.registry import build_model
from shardplan.plan.attention_plan import AttentionPlan, Strategy
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


def attended_pairs(length, window=None):
    """Pairs of query and key that a causal mask leaves, counted by hand."""
    if window is None:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_flops_of_windows_in_some_layers_equal_a_hand_count(kind):
    c, length = GEMMA3_27B, 131072
    model = build_model(c, length)
    workload = Workload(kind, 2, length, "bfloat16", "bfloat16")
    heads, key_heads, head, embed = c["num_heads"], c["num_kv_heads"], c["head_dim"], c["hidden_dim"]
    weights = embed * head * (2 * heads + 2 * key_heads) + 3 * embed * c["intermediate_dim"]
    matmuls = 2 * length * (62 * weights + embed * c["vocab_size"])
    pairs = 10 * attended_pairs(length) + 52 * attended_pairs(length, 1024)
    attention = 2 * 2 * heads * head * pairs
    passes = 3 if kind == "train" else 1
    assert model_flops(model, workload) == pytest.approx(passes * 2 * (matmuls + attention), rel=1e-6)


def names(model, **workload):
    step = plan_step(model, Workload("eval", 2, workload.pop("position"), "bfloat16", "bfloat16", **workload))
    return [kind.name for kind in step.attention_kinds]


def test_kinds_are_named_by_mask_and_sizes(golden, make_config):
    """The kind with most work comes first, which is that without a window."""
    small = {**GEMMA3_27B, "groups": 1, "tail": 1, "hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    model = build_model(small, 65536)
    assert names(model, position=65536) == ["causal, head size 16", "causal, window 1024, head size 16"]
    plan_step.cache_clear()  # JAX keeps its own traces of functions: a kind is found in them as well
    assert names(model, position=65536) == ["causal, head size 16", "causal, window 1024, head size 16"]
    gemma2 = model_from_config(make_config(model_ref=golden / "gemma2", workload_position=32))
    assert names(gemma2, position=32) == ["causal, soft cap 50, head size 12"]


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


def test_a_plan_whose_kinds_have_several_orders_is_refused(make_config):
    values = make_plan(make_config(model_config="llama-3.1-8b", hardware_slice="v5p-16", pin="position=data")).to_json()
    ring = values["mesh"]["data"]
    attention = {"strategy": "ring", "ulysses": 1, "ring": ring, "layout": "contiguous", "kernel": "splash"}
    values["attention"] = {**attention, "kinds": {"x": {**attention, "layout": "zigzag"}}}
    with pytest.raises(ConfigError, match=r"attention\.kinds\.x has another order of positions than attention"):
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
