"""First arguments of the wrong type: every public function says in one sentence what to pass."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import shardplan
from shardplan.attention import with_sequence_parallel
from shardplan.config import load_config
from shardplan.errors import ConfigError
from shardplan.experts.levanter import with_expert_parallel

CONFIG = load_config(model={"ref": "x"})
A_PLAN = "pass a plan, from shardplan.make_plan(config) or shardplan.Plan.load('plan.json')"
A_CONFIG = "pass a configuration, such as shardplan.load_config('configs/8b.yaml')"
FILES = "pass paths of YAML files, and keys by name, such as workload={'batch': 4}"


def mesh():
    return Mesh(np.array(jax.devices()[:1]), ("model",))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shardplan.make_plan("file.yaml"), f"make_plan: config is 'file.yaml'; {A_CONFIG}"),
        (lambda: shardplan.make_plan({"model": 1}), f"make_plan: config is {{'model': 1}}; {A_CONFIG}"),
        (lambda: shardplan.what_if("file.yaml"), f"what_if: config is 'file.yaml'; {A_CONFIG}"),
        (lambda: shardplan.why_not(3, None, None), "why_not: choice is 3; pass a choice written like a pin, such as "),
        (lambda: shardplan.why_not("mlp=model", CONFIG, CONFIG), f"why_not: plan is PlanConfig; {A_PLAN}"),
        (lambda: shardplan.review(3, CONFIG), "review: path is 3; pass the path of a Levanter configuration"),
        (lambda: shardplan.review("a.yaml", None), f"review: config is None; {A_CONFIG}"),
        (lambda: shardplan.load_config(CONFIG), f"load_config: its argument is PlanConfig; {FILES}"),
        (lambda: shardplan.load_config({"model": 1}), f"load_config: its argument is {{'model': 1}}; {FILES}"),
        (lambda: shardplan.evaluate(3), f"evaluate: its argument is 3; {FILES}"),
        (lambda: shardplan.trainer_yaml("plan.json"), f"trainer_yaml: plan is 'plan.json'; {A_PLAN}"),
        (lambda: shardplan.make_mesh({"data": 8}), f"make_mesh: plan is {{'data': 8}}; {A_PLAN}"),
        (lambda: shardplan.verify_plan(CONFIG), f"verify_plan: plan is PlanConfig; {A_PLAN}"),
        (lambda: shardplan.audit(None, "plan.json"), f"audit: plan is 'plan.json'; {A_PLAN}"),
        (
            lambda: shardplan.load_pretrained("folder", dtype="bf61"),
            "load_pretrained: dtype is 'bf61'; it must be a floating-point type: bfloat16, float16, float32",
        ),
        (
            lambda: shardplan.load_pretrained("folder", dtype=int),
            "load_pretrained: dtype is <class 'int'>; it must be a floating-point type: bfloat16, float16, float32",
        ),
        (
            lambda: shardplan.load_pretrained("folder", dtype="float64"),
            "load_pretrained: dtype is float64, which JAX loads as float32; ask for float32, or set JAX_ENABLE_X64=1",
        ),
        (
            lambda: shardplan.load_pretrained(None),
            "load_pretrained: ref is None; pass a folder, org/model@revision or a",
        ),
        (
            lambda: shardplan.save_pretrained("out", "x", {}),
            "save_pretrained: model is 'out'; pass a Levanter model with",
        ),
        (lambda: shardplan.end_process(3), "end_process: problem is 3; pass the problem that shardplan.watch reports"),
        (
            lambda: shardplan.watch(3, 4).__enter__(),
            "watch: phase is 3; pass what the processes do, such as 'training'",
        ),
        (
            lambda: shardplan.best_effort_sharding(5, mesh()),
            "best_effort_sharding: shape is 5; pass the sizes of dimensions, such as (8, 4), or an array",
        ),
        (
            lambda: shardplan.best_effort_sharding("x", mesh()),
            "best_effort_sharding: shape is 'x'; it must be the sizes of dimensions, such as (8, 4), or an array",
        ),
        (
            lambda: shardplan.best_effort_sharding((4.0, 2), mesh()),
            "best_effort_sharding: shape is (4.0, 2); it must be the sizes of dimensions, such as (8, 4), or an array",
        ),
        (
            lambda: shardplan.best_effort_sharding((-1, 4), mesh()),
            "best_effort_sharding: shape is (-1, 4); it must be the sizes of dimensions, such as (8, 4), or an array",
        ),
        (
            lambda: shardplan.best_effort_sharding((4, 4), {"model": 2}),
            "best_effort_sharding: mesh is {'model': 2}; pass a jax.sharding.Mesh",
        ),
        (
            lambda: with_sequence_parallel(None, "ring"),
            "with_sequence_parallel: method is 'ring'; pass Method('ring'), or a plan",
        ),
        (
            lambda: with_expert_parallel(None, "gather_tokens"),
            "with_expert_parallel: method is 'gather_tokens'; pass ExpertMethod('gather_tokens'), or a plan",
        ),
        (
            lambda: shardplan.patch_levanter("gather_tokens"),
            "patch_levanter: experts is 'gather_tokens'; pass ExpertMethod('gather_tokens'), or a plan",
        ),
    ],
)
def test_arguments_of_another_type(call, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as error:
        call()
    assert "\n" not in str(error.value)
