"""Keys of a config.json about routed experts; most families have the names that DeepSeek gave them."""

from collections.abc import Sequence
from typing import NamedTuple

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.keys import ACTIVATIONS, read_gated_mlp
from shardplan.decoder.parts.mlp.experts import ExpertsConfig, GatedActivation
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.mlp.router import ExpertGroups, RouterConfig, Scoring

TRAINING_KEYS = (
    "aux_loss_alpha", "ep_size", "num_mtp_layers", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "seq_aux",
)  # fmt: skip
"""Keys about training, about where experts are computed, or about additional heads; none changes the results."""
MIN_SUM = 1e-20
"""Number that transformers adds to the sum by which it divides routing weights."""
DENSE, SPARSE = "dense", "sparse"
"""Kinds of layers in `mlp_layer_types`."""


class ExpertDefaults(NamedTuple):
    """A family's defaults for the keys of experts; None for a key that the file must have."""

    experts: int | None
    per_token: int | None
    size: int
    shared: int | None
    scale: float
    groups: int = 1
    chosen_groups: int = 1


def read_experts(keys: ConfigKeys, defaults: ExpertDefaults, router: RouterConfig) -> ExpertsConfig:
    """Read experts, and the shared experts beside them.

    >>> keys = ConfigKeys({"moe_intermediate_size": 1408, "n_shared_experts": 2}, "config.json")
    >>> experts = read_experts(keys, ExpertDefaults(64, 6, size=1407, shared=None, scale=1.0), RouterConfig(64, 6))
    >>> experts.size, experts.shared.size
    (1408, 2816)

    Args:
        router: the result of `read_router`.
    """
    size = keys.integer("moe_intermediate_size", default=defaults.size)
    shared = 0
    if not keys.is_null("n_shared_experts"):  # null says that there are none, whatever the default is
        shared = keys.integer("n_shared_experts", default=defaults.shared, least=0)
    return gated_experts(keys, router, size, shared)


def gated_experts(keys: ConfigKeys, router: RouterConfig, size: int, shared: int = 0) -> ExpertsConfig:
    """Return experts with the activation of `hidden_act`.

    >>> gated_experts(ConfigKeys({"hidden_act": "silu"}, "config.json"), RouterConfig(8, 2), size=1024, shared=2).shared
    MlpConfig(size=2048, activation='silu', has_bias=False, is_gated=True, axis='mlp')

    Args:
        size: elements of the hidden state of an expert.
        shared: number of shared experts, each of this size too.
    """
    keys.take(*TRAINING_KEYS)
    activation = keys.choice("hidden_act", choices=ACTIVATIONS, default="silu")
    return ExpertsConfig(
        router,
        size,
        GatedActivation(activation),
        shared=MlpConfig(size * shared, activation, is_gated=True) if shared else None,
    )


def read_counts(
    keys: ConfigKeys,
    experts: tuple[str, ...],
    per_token: tuple[str, ...],
    defaults: tuple[int | None, int | None],
) -> tuple[int, int]:
    """Read the number of experts, and the number that each token chooses.

    >>> keys = ConfigKeys({"num_local_experts": 8, "num_experts_per_tok": 2}, "config.json")
    >>> read_counts(keys, ("num_local_experts",), ("num_experts_per_tok",), (None, None))
    (8, 2)

    Args:
        experts, per_token: names of the two keys.

    Raises:
        ConfigError: a token would choose more experts than there are.
    """
    count = keys.integer(*experts, default=defaults[0])
    chosen = keys.integer(*per_token, default=defaults[1])
    if chosen > count:
        keys.refuse(per_token[0], chosen, f"at most {experts[0]}, {count}")
    return count, chosen


def read_router(
    keys: ConfigKeys,
    defaults: ExpertDefaults,
    scoring: Scoring,
    best_of_group: int | None,
    *,
    has_correction: bool = False,
    is_normalised: bool | None = None,
) -> RouterConfig:
    """Read how a router chooses and weighs experts.

    >>> keys = ConfigKeys({"n_group": 8, "topk_group": 3}, "config.json")
    >>> defaults = ExpertDefaults(experts=64, per_token=6, size=1408, shared=2, scale=1.0)
    >>> router = read_router(keys, defaults, Scoring.SOFTMAX, best_of_group=1)
    >>> router.experts, router.groups
    (64, ExpertGroups(groups=8, chosen=3, best=1))

    Args:
        best_of_group: number of best experts whose scores sum to the score of a group; None if the family has no
            groups.
        is_normalised: whether weights are divided by their sum; None to read `norm_topk_prob`.
    """
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    experts, per_token = read_counts(keys, names, ("num_experts_per_tok",), (defaults.experts, defaults.per_token))
    groups = None if best_of_group is None else _read_groups(keys, defaults, experts, per_token, best_of_group)
    return RouterConfig(
        experts,
        per_token,
        scoring,
        has_correction=has_correction,
        groups=groups,
        is_normalised=keys.flag("norm_topk_prob", default=True) if is_normalised is None else is_normalised,
        min_sum=MIN_SUM,
        scale=keys.number("routed_scaling_factor", default=defaults.scale),
    )


def _read_groups(
    keys: ConfigKeys, defaults: ExpertDefaults, experts: int, per_token: int, best: int
) -> ExpertGroups | None:
    """Read the groups of experts; None if a token may choose from all experts."""
    groups = 1 if keys.is_null("n_group") else keys.integer("n_group", default=defaults.groups)
    chosen = 1 if keys.is_null("topk_group") else keys.integer("topk_group", default=defaults.chosen_groups)
    if chosen >= groups:  # all groups are chosen, which excludes no expert
        return None
    if experts % groups or experts // groups < best:
        keys.refuse("n_group", groups, f"a divisor of the {experts} experts, with at least {best} in a group")
    if chosen * (experts // groups) < per_token:
        keys.refuse("topk_group", chosen, f"enough groups of {experts // groups} experts to choose {per_token} from")
    return ExpertGroups(groups, chosen, best)


def read_kinds_of_mlp(keys: ConfigKeys, first: int) -> list[bool]:
    """Read, for every layer, whether it has experts.

    It is read from `mlp_layer_types`. Without this key, layers with an index from `first_k_dense_replace` on have
    experts if the index is a multiple of `moe_layer_freq`.

    >>> read_kinds_of_mlp(ConfigKeys({"num_hidden_layers": 4}, "config.json"), first=1)
    [False, True, True, True]

    Args:
        first: default of `first_k_dense_replace`.
    """
    layers = keys.integer("num_hidden_layers")
    name = "first_k_dense_replace"
    first = 0 if keys.is_null(name) else keys.integer(name, default=first, least=0)
    period = keys.integer("moe_layer_freq", default=1)
    kinds = keys.take("mlp_layer_types")
    if kinds is None:
        return [i >= first and i % period == 0 for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (DENSE, SPARSE) for kind in kinds):
        keys.refuse("mlp_layer_types", kinds, f"a list of {layers} times {DENSE} or {SPARSE}")
    return [kind == SPARSE for kind in kinds]


def read_mlps(keys: ConfigKeys, experts: ExpertsConfig, kinds: Sequence[bool]) -> list[MlpConfig | ExpertsConfig]:
    """Return the MLP of every layer: experts if `kinds` says so, else a gated MLP.

    >>> keys = ConfigKeys({"intermediate_size": 10944}, "config.json")
    >>> mlps = read_mlps(keys, gated_experts(keys, RouterConfig(64, 6), size=1408), kinds=[False, True, True])
    >>> [(type(mlp).__name__, mlp.size) for mlp in mlps]
    [('MlpConfig', 10944), ('ExpertsConfig', 1408), ('ExpertsConfig', 1408)]
    """
    if all(kinds):
        keys.take("intermediate_size")  # releases give it all the same, and a key that is not taken is refused
        return [experts] * len(kinds)
    dense = read_gated_mlp(keys)
    return [experts if has_experts else dense for has_experts in kinds]
