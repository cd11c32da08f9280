"""Rules that make parameters of routed experts from checkpoint tensors, separate ones per expert or shared ones."""

from typing import NamedTuple

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.families.common.rules import Rules, attention_rules, layer_norm_rules, mlp_rules
from shardplan.decoder.names import Rule, Sliced, Stacked, StoredTensor, Transposed
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.experts import ExpertsConfig
from shardplan.decoder.parts.mlp.mlp import MlpConfig

Mlp = MlpConfig | ExpertsConfig
"""The MLP or the experts of a layer."""


class ExpertNames(NamedTuple):
    """Tensor names of a layer with experts, after the prefix of its MLP."""

    router: str = "gate.weight"
    correction: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down projections."""
    shared: str = "shared_experts"


DEEPSEEK_NAMES = ExpertNames()
"""Names in the checkpoints of DeepSeek and most others."""


def expert_layer_rules(
    config: Architecture,
    layer: LayerConfig,
    index: int,
    names: ExpertNames = DEEPSEEK_NAMES,
    mlp: str = "mlp",
) -> Rules:
    """Return the loading rules of a layer with Llama's tensor names, with experts or an MLP.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("qwen3-30b-a3b", None))
    >>> rules = expert_layer_rules(config, config.segments[0].layers[0], 47)
    >>> rules["self_attn.q_norm.weight"].name, rules["mlp.router.weight"].name
    ('model.layers.47.self_attn.q_norm.weight', 'model.layers.47.mlp.gate.weight')

    Args:
        mlp: name of the MLP behind the prefix of the layer.
    """
    at, embed = f"model.layers.{index}", config.embed
    return {
        **attention_rules(layer.grouped_attention, f"{at}.self_attn", embed),
        **layer_norm_rules(layer, at, embed),
        **separate_expert_rules(layer.mlp, f"{at}.{mlp}", embed, names),
    }


def separate_expert_rules(mlp: Mlp, name: str, embed: int, names: ExpertNames = DEEPSEEK_NAMES) -> Rules:
    """Return the loading rules of experts with a tensor per projection and expert, or of a layer's MLP without experts.

    >>> from shardplan.decoder.parts.mlp.experts import GatedActivation
    >>> from shardplan.decoder.parts.mlp.router import RouterConfig
    >>> experts = ExpertsConfig(RouterConfig(experts=2, experts_per_token=1), 16, GatedActivation("silu"))
    >>> rules = separate_expert_rules(experts, "mlp", embed=64)
    >>> [(each.rule.name, each.rule.shape) for each in rules["mlp.experts.down"].rules]
    [('mlp.experts.0.down_proj.weight', (64, 16)), ('mlp.experts.1.down_proj.weight', (64, 16))]

    Args:
        name: prefix of the MLP.
    """
    if isinstance(mlp, MlpConfig):
        return mlp_rules(mlp, name, embed)
    found = _router_rules(mlp, name, embed, names)
    for parameter, projection in zip(("gate", "up", "down"), names.projections, strict=True):
        shape = (embed, mlp.size) if parameter == "down" else (mlp.size, embed)
        each: list[Rule] = []
        for expert in range(mlp.router.experts):
            # files have outputs first, as Linear does; grouped matmuls take experts' weights with inputs first
            stored = StoredTensor(f"{name}.{names.experts}.{expert}.{projection}.weight", shape)
            each.append(Transposed(stored, (1, 0)))
        found[f"mlp.experts.{parameter}"] = Stacked(tuple(each))
    return found


def stacked_expert_rules(mlp: Mlp, name: str, embed: int) -> Rules:
    """Return the loading rules of experts stacked in two tensors, or of the MLP of a layer without experts.

    The tensors are `gate_up_proj` {experts, gate then up, embed}, and `down_proj` {experts, embed, mlp}.

    >>> from shardplan.decoder.parts.mlp.experts import GatedActivation
    >>> from shardplan.decoder.parts.mlp.router import RouterConfig
    >>> experts = ExpertsConfig(RouterConfig(experts=2, experts_per_token=1), 16, GatedActivation("silu"))
    >>> up = stacked_expert_rules(experts, "mlp", embed=64)["mlp.experts.up"]
    >>> up.start, up.stop, up.rule.rule
    (16, 32, StoredTensor(name='mlp.experts.gate_up_proj', shape=(2, 32, 64)))

    Args:
        name: prefix of the MLP.
    """
    if isinstance(mlp, MlpConfig):
        return mlp_rules(mlp, name, embed)
    count, size = mlp.router.experts, mlp.size
    experts = f"{name}.{DEEPSEEK_NAMES.experts}"
    both = Transposed(StoredTensor(f"{experts}.gate_up_proj", (count, 2 * size, embed)), (0, 2, 1))
    down = StoredTensor(f"{experts}.down_proj", (count, embed, size))
    return {
        **_router_rules(mlp, name, embed, DEEPSEEK_NAMES),
        "mlp.experts.gate": Sliced(both, 2, 0, size),
        "mlp.experts.up": Sliced(both, 2, size, 2 * size),
        "mlp.experts.down": Transposed(down, (0, 2, 1)),
    }


def _router_rules(mlp: ExpertsConfig, name: str, embed: int, names: ExpertNames) -> Rules:
    """Return the loading rules of the router, and of the shared experts if there are any.

    Args:
        name: prefix of the MLP.
    """
    experts = mlp.router.experts
    found: Rules = {"mlp.router.weight": StoredTensor(f"{name}.{names.router}", (experts, embed))}
    if mlp.router.has_correction:
        found["mlp.router.correction"] = StoredTensor(f"{name}.{names.correction}", (experts,))
    if mlp.shared is not None:
        for path, rule in mlp_rules(mlp.shared, f"{name}.{names.shared}", embed).items():
            found[path.replace("mlp.", "mlp.shared.", 1)] = rule
    return found
