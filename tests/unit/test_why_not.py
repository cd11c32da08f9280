"""Why a plan does not make a choice."""

import pytest

from shardplan.errors import ConfigError
from shardplan.explain.why_not import why_not
from shardplan.plan.file.sections import Caveat
from shardplan.search.make_plan import make_plan
from shardplan.search.reasons import CAVEATS

pytestmark = pytest.mark.slow


def test_choices_that_are_no_pins(llama_model, llama_config):
    settings = llama_config()
    plan = make_plan(settings, llama_model)
    for choice, message in (
        ("foo", "why 'foo': the model has no axis 'foo'; valid: "),
        ("mlp", "why 'mlp' has no '=' after mlp: write mlp=model to shard it"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            why_not(choice, plan, settings, llama_model)


def test_why_not(llama_model, llama_config):
    settings = llama_config()
    plan = make_plan(settings, llama_model)
    slower = why_not("position=", plan, settings, llama_model)
    assert slower.plan.cost.step_seconds > plan.cost.step_seconds and not slower.obstacle
    assert next(iter(slower.seconds)).startswith("all-reduce, partial sums of ") and slower.seconds["compute"] > 0
    assert why_not("kv_head=data", plan, llama_config(pin=("head_size=data", "batch=")), llama_model).plan is None
    assert not why_not("position=replica", plan, settings, llama_model).obstacle
    without_kernel = why_not("q_heads_per_group=replica", plan, settings, llama_model)
    assert without_kernel.plan.search.caveats == [Caveat.NO_ATTENTION_KERNEL] and not plan.search.caveats
    assert without_kernel.obstacle == CAVEATS[Caveat.NO_ATTENTION_KERNEL]
    # the choice replaces the user's own pin
    pinned = llama_config(pin=("mlp=model",))
    answer = why_not("mlp=", make_plan(pinned, llama_model), pinned, llama_model)
    assert answer.replaced_pins == ["mlp=model"] and "mlp" not in answer.plan.compute_mapping
