"""With experts over several devices, by every strategy, families with experts have the logits of transformers."""

import itertools

import numpy as np
import pytest
from test_logits import SHARDED_POSITIONS, TOLERANCE, UNSHARDED, deviation

from shardplan.experts.method import ExpertMethod, ExpertStrategy
from shardplan.model.model_class import LEVANTER
from shardplan.plan.attention_plan import AttentionPlan

EXPERTS = {
    "deepseek_v2": 8, "deepseek_v3": 12, "dots1": 8, "ernie4_5_moe": 8, "glm4_moe": 8, "glm4_moe_lite": 8, "gpt_oss": 6,
    "hunyuan_v1_moe": 8, "hy_v3": 8, "kimi_k2": 12, "llama4_text": 4, "minimax_m2": 8, "mistral4": 8, "olmoe": 8,
    "qwen3_moe": 8,
}  # fmt: skip
"""Golden checkpoint -> its experts."""
MESHES = {
    2: ((1, 4, 2), {"experts": ["model"]}),
    4: ((2, 4, 1), {"experts": ["data"], "expert_mlp": ["replica"]}),
    8: ((2, 4, 1), {"experts": ["replica", "data"]}),
}
"""Devices that share experts -> the mesh, and how experts and their hidden states are sharded in computations."""
RING = AttentionPlan("ring", 1, 4)
TOGETHER = {"position": ["model"], "experts": ["model"]}
"""Experts over the devices that share a sequence."""


def cases():
    """Each family once by each strategy; all families over 2, 4 and 8 devices where these divide the experts."""
    strategies = itertools.cycle(ExpertStrategy)
    for name, experts in EXPERTS.items():
        fitting = [devices for devices in MESHES if experts % devices == 0]
        for devices, strategy in zip(itertools.islice(itertools.cycle(fitting), 3), strategies, strict=False):
            is_quick = (len(name) + devices) % 3 == 0
            yield pytest.param(name, devices, strategy, marks=[] if is_quick else [pytest.mark.whole])


def tolerance(folder):
    """The tolerance of golden tests of families."""
    return 2 * float(np.load(folder / "golden.npz")["own_error"]) + 1e-6


@pytest.mark.parametrize(("name", "devices", "strategy"), [*cases()])
def test_logits_with_sharded_experts(golden, make_config, name, devices, strategy):
    if strategy is ExpertStrategy.EXCHANGE_TOKENS and devices == 2:
        strategy = ExpertStrategy.GATHER_TOKENS  # all devices along the axis model have the same tokens
    families, (mesh, sharded) = golden.parent / "families", MESHES[devices]
    changes = {"change_plan": {**UNSHARDED, "batch": ["replica", "data"], "position": [], **sharded}}
    found = deviation(families, make_config, name, mesh, experts=ExpertMethod(strategy, 0.5), **changes)
    assert found <= tolerance(families / name)


ODD = {
    "gpt_oss": "experts", "deepseek_v3": "experts", "kimi_k2": "experts", "ernie4_5_moe": "expert_mlp",
    "glm4_moe": "expert_mlp", "mistral4": "expert_mlp",
}  # fmt: skip
"""Golden checkpoint -> the logical axis that three devices along `data` share."""


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=[] if (i + j) % 3 == 0 and i < 3 else [pytest.mark.whole])
        for (i, name), (j, strategy) in itertools.product(enumerate(ODD), enumerate(ExpertStrategy))
    ],
)
def test_logits_on_odd_numbers_of_devices(golden, make_config, name, strategy):
    """Experts, or their hidden states, over three devices, which share sequences of three times 16 tokens."""
    families = golden.parent / "families"
    sharded = {**UNSHARDED, "batch": ["replica"], "position": ["data"], ODD[name]: ["data"]}
    method = {"attention": AttentionPlan("ring", 1, 3), "experts": ExpertMethod(strategy, 0.5)}
    found = deviation(families, make_config, name, (1, 3, 1), hardware_slice="cpu-3", change_plan=sharded, **method)
    assert found <= tolerance(families / name)


@pytest.mark.parametrize("strategy", ExpertStrategy)
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("deepseek_v2", marks=pytest.mark.whole)])
def test_logits_with_sharded_positions(golden, make_config, name, strategy):
    """Experts over the devices that share a sequence."""
    families = golden.parent / "families"
    changes = {"change_plan": {**SHARDED_POSITIONS, "experts": ["model"]}, "attention": RING}
    found = deviation(families, make_config, name, (1, 2, 4), experts=ExpertMethod(strategy), **changes)
    assert found <= tolerance(families / name)


@pytest.mark.parametrize(
    ("mesh", "sharded", "strategy", "attention"),
    [
        ((2, 4, 1), {"experts": ["data"], "mlp": ["replica"]}, ExpertStrategy.EXCHANGE_TOKENS, None),
        (
            (1, 2, 4),
            {"batch": ["data"], "position": ["model"], "experts": ["model"]},
            ExpertStrategy.GATHER_TOKENS,
            RING,
        ),
    ],
    ids=["sharded batch", "sharded positions"],
)
def test_logits_of_levanters_mixtral(golden, make_config, mesh, sharded, strategy, attention):
    """Its blocks are replaced, and its attention where positions are sharded, and nothing else is patched."""
    mapping = {**UNSHARDED, "batch": ["replica", "data"], "position": [], **sharded}
    found = deviation(
        golden, make_config, "mixtral", mesh, change_plan=mapping, attention=attention,
        experts=ExpertMethod(strategy, 0.5), model_levanter_class=LEVANTER, plans_experts=True,
    )  # fmt: skip
    assert found <= TOLERANCE
