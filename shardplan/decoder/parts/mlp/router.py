"""The router of a layer with experts, which chooses a few experts for each token and weighs their outputs.

Its parameters are stored and computed with in float32, whatever the rest of the model is: rounding them, or its scores,
to bfloat16 would give some tokens other experts. Sources:
https://arxiv.org/abs/2401.04088 (softmax of the best scores), https://arxiv.org/abs/2405.04434 (groups of experts),
https://arxiv.org/abs/2412.19437 (sigmoid, and a correction that balances the experts).
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call

from shardplan.decoder.parts.linear import INITIAL_SCALE
from shardplan.experts.statistics.recording import is_recording, record_router
from shardplan.model.dtypes.parameter_dtypes import Float32Module


class Scoring(Enum):
    """The function from router logits to scores."""

    SOFTMAX = "softmax over all experts"
    SOFTMAX_OF_CHOSEN = "softmax over the chosen experts"
    SIGMOID = "sigmoid of each product"


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of consecutive experts; a token may choose experts of a few groups only."""

    groups: int
    chosen: int
    """Number of groups that a token chooses experts from: those with the largest scores."""
    best: int
    """Number of best experts per group whose scores add up to the group's score."""


@dataclass(frozen=True)
class RouterConfig:
    """How a router scores, chooses and weighs experts."""

    experts: int
    experts_per_token: int
    scoring: Scoring = Scoring.SOFTMAX
    has_bias: bool = False
    """Whether the router logits have a bias."""
    has_correction: bool = False
    """Whether each expert has a correction, which is added to its score for the choice only."""
    groups: ExpertGroups | None = None
    is_normalised: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    min_sum: float = 0.0
    """Smallest divisor, which replaces a smaller sum."""
    scale: float = 1.0
    """Final factor of the routing weights."""

    @property
    def Scores(self) -> Axis:
        """The axis of experts in the router, separate because it does not follow the sharding of the experts."""
        return Axis("expert_score", self.experts)

    @property
    def Choices(self) -> Axis:
        """The axis of a token's chosen experts."""
        return Axis("expert_choice", self.experts_per_token)

    def init(self, Embed: Axis, key: jax.Array) -> "Router":
        """Make the router with random weights."""
        scores = self.Scores
        return Router(
            weight=hax.random.normal(key, (scores, Embed)) * INITIAL_SCALE,
            bias=hax.zeros(scores) if self.has_bias else None,
            correction=hax.zeros(scores) if self.has_correction else None,
            config=self,
        )


class Routing(NamedTuple):
    """The experts that a router chose for each token, and the weights of their outputs."""

    chosen: NamedArray
    """Indices of the chosen experts, int32{..., expert_choice}."""
    weights: NamedArray
    """Routing weights, the factors of the experts' outputs, float32{..., expert_choice}."""


class Router(Float32Module):
    """The weights of a router."""

    weight: NamedArray
    """Weight of the router, {expert_score, embed}."""
    bias: NamedArray | None
    """Bias of the router, {expert_score}; None without one."""
    correction: NamedArray | None
    """Number added to each expert's score for the choice only, {expert_score}; None without."""
    config: RouterConfig = eqx.field(static=True)

    @named_call  # for profiles and reports
    def __call__(self, x: NamedArray) -> Routing:
        """Choose the experts of tokens {..., embed}."""
        config, scores_axis = self.config, self.config.Scores
        embed = tuple(axis for axis in self.weight.axes if axis != scores_axis)
        wide, weight = x.astype(jnp.float32), self.weight.astype(jnp.float32)
        # TPUs multiply float32 as bfloat16 by default, which would give some tokens other experts
        products = hax.dot(wide, weight, axis=embed, precision=jax.lax.Precision.HIGHEST)
        if self.bias is not None:
            products = products + self.bias.astype(jnp.float32)
        match config.scoring:
            case Scoring.SOFTMAX:
                scores = hax.nn.softmax(products, scores_axis)
            case Scoring.SIGMOID:
                scores = hax.nn.sigmoid(products)
            case Scoring.SOFTMAX_OF_CHOSEN:
                scores = products
        chosen, weights = self._choose(_with_last(scores, scores_axis))
        if is_recording():
            record_router(_with_last(self._probabilities(products, scores), scores_axis), chosen)
        if config.scoring is Scoring.SOFTMAX_OF_CHOSEN:
            weights = hax.nn.softmax(weights, config.Choices)
        if config.is_normalised:
            weights = weights / hax.maximum(hax.sum(weights, config.Choices), config.min_sum)
        return Routing(chosen, weights if config.scale == 1.0 else weights * config.scale)

    def _probabilities(self, products: NamedArray, scores: NamedArray) -> NamedArray:
        """Return the router's probability of each expert, for statistics: scores scaled to sum to 1."""
        axis = self.config.Scores
        if self.config.scoring is Scoring.SIGMOID:
            return scores / hax.sum(scores, axis)
        return hax.nn.softmax(products, axis)

    def _choose(self, scores: NamedArray) -> Routing:
        """Choose the experts with the best scores from the best groups, and return them with their scores.

        Args:
            scores: float32{..., expert_score}.
        """
        config, values = self.config, scores.array
        if self.correction is not None:
            values = values + self.correction.array.astype(jnp.float32)
        if config.groups is not None:
            values = jnp.where(_is_in_best_groups(values, config.groups), values, -jnp.inf)
        best, chosen = jax.lax.top_k(values, config.experts_per_token)
        if self.correction is not None:
            # without a gather of single elements, which is slow on TPUs
            is_chosen = jax.nn.one_hot(chosen, config.experts, dtype=bool)
            best = jnp.where(is_chosen, scores.array[..., None, :], 0.0).sum(-1)
        axes = (*scores.axes[:-1], config.Choices)
        return Routing(hax.named(chosen, axes), hax.named(best, axes))


def _is_in_best_groups(scores: jax.Array, groups: ExpertGroups) -> jax.Array:
    """Return bool[..., experts]: whether each expert is in one of the groups with the best scores."""
    grouped = scores.reshape(*scores.shape[:-1], groups.groups, -1)
    of_groups = jax.lax.top_k(grouped, groups.best)[0].sum(-1)
    best = jax.lax.top_k(of_groups, groups.chosen)[1]
    is_best = jax.nn.one_hot(best, groups.groups, dtype=bool).any(-2)
    return jnp.broadcast_to(is_best[..., None], grouped.shape).reshape(scores.shape)


def _with_last(array: NamedArray, axis: Axis) -> NamedArray:
    return array.rearrange((..., axis))
