"""The decoder: an embedding, segments of layers, a norm, and an output head.

Each segment is a loop over a block of layers (Haliax's `Stacked`). The rules of the family say which elements of a
checkpoint a parameter holds: reading evaluates them, and writing evaluates the transpose of this linear map.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call
from haliax.nn.scan import Stacked
from haliax.state_dict import ModuleWithStateDictSerialization, StateDict
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.models.loss import maybe_fused_next_token_loss

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.kept_parameters import keep_weights
from shardplan.decoder.layers.expert_layers import training_metrics
from shardplan.decoder.layers.recorded_layers import fold_layers
from shardplan.decoder.layers.selection_metrics import selection_metrics
from shardplan.decoder.layers.sparse_layers import sparse_attentions
from shardplan.decoder.names import Rule, Shape, StoredTensor, evaluate, stored_tensors
from shardplan.decoder.parameter_rules import parameter_rules, stored_constants
from shardplan.decoder.parts.attention.grouped_attention import POSITION
from shardplan.decoder.parts.attention.rotary import Positions
from shardplan.decoder.parts.attention.selection_recording import record_selection
from shardplan.decoder.parts.block import RepeatedLayers
from shardplan.decoder.parts.linear import INITIAL_SCALE, Linear
from shardplan.decoder.parts.norm import Norm
from shardplan.errors import CheckpointError
from shardplan.experts.statistics.recording import record_routing
from shardplan.model.attention.chunked_mask import indices_in_documents
from shardplan.model.dtypes.parameter_dtypes import check_has_numbers
from shardplan.model.gradient_checkpointing.kept_selection import keep_selected_blocks
from shardplan.model.logits.logit_blocks import prepare_head, project_to_vocab


class Decoder(ModuleWithStateDictSerialization, LmHeadModel[Architecture]):
    """A language model of any family in `shardplan.decoder.families`."""

    embedding: NamedArray
    """{vocab, token_embed}, or {vocab, embed} if both have one size."""
    position_embedding: NamedArray | None
    """{position_row, embed}; None for models without a table of positions."""
    project_in: Linear | None
    """Projects token_embed to embed; None if both have one size."""
    segments: tuple[Stacked, ...]
    norm: Norm | None
    project_out: Linear | None
    """Projects embed to token_embed; None if both have one size."""
    lm_head: Linear | None
    """The output head, whose weight has the axes of the embedding; None if it is tied to the embedding."""
    settings: Architecture = eqx.field(static=True)

    @property
    def config(self) -> Architecture:
        """The configuration of the decoder."""
        return self.settings

    @property
    def Vocab(self) -> Axis:
        """The axis of the vocabulary."""
        return self.embedding.axes[0]

    @property
    def Embed(self) -> Axis:
        """The axis that the output head contracts."""
        return self.settings.TokenEmbed

    @classmethod
    def init(cls, Vocab: Axis, config: Architecture, *, key: jax.Array) -> "Decoder":
        """Make the model with random weights."""
        table, head, rows, first, last, layers = jax.random.split(key, 6)
        stacks = []
        for i, segment in enumerate(config.segments):
            keys = jax.random.split(jax.random.fold_in(layers, i), segment.repeats)
            policy, selects = config.gradient_checkpointing, any(sparse_attentions([segment]))
            # rounding may select other blocks when a layer is computed again, and its gradients would be wrong
            policy = keep_selected_blocks(policy) if selects else policy
            make = Stacked.init(config.Layers[i], RepeatedLayers, gradient_checkpointing=policy)
            stacks.append(make(segment.layers, config.Embed, key=keys))

        def random(key: jax.Array, *axes: Axis) -> NamedArray:
            return hax.random.normal(key, axes) * INITIAL_SCALE

        def project(outputs: Axis, inputs: Axis, key: jax.Array) -> Linear | None:
            return None if config.token_embed is None else Linear.init((outputs,), (inputs,), False, key)

        positions, token = config.position_table, config.TokenEmbed
        model = cls(
            embedding=random(table, Vocab, token),
            position_embedding=None if positions is None else random(rows, positions.Rows, config.Embed),
            project_in=project(config.Embed, token, first),
            segments=tuple(stacks),
            norm=None if config.norm is None else config.norm.init(config.Embed),
            project_out=project(token, config.Embed, last),
            lm_head=None if config.is_tied else Linear.init((Vocab,), (token,), config.has_head_bias, head),
            settings=config,
        )
        return model if config.kept is None else keep_weights(model, config.kept)

    @named_call(name="Decoder")  # for profiles and reports
    def activations(
        self,
        input_ids: NamedArray,
        attn_mask: AttentionMask | NamedArray | None = None,
        *,
        key: Any = None,
        pos_ids: NamedArray | None = None,
    ) -> NamedArray:
        """Compute the input {..., position, embed} of the output head from int32[..., position] tokens.

        Args:
            attn_mask: which keys a query may attend to; default: keys up to its own position.
            pos_ids: int32[..., position], the index of each token in its text; default: its index in its document
                if the mask has segment ids, else its index in the array.

        Raises:
            ConfigError: more positions than the model's indexer chooses for a query.
        """
        del key  # nothing is random
        config = self.settings
        config.check_length(input_ids.axis_size(POSITION), "the number of positions")
        mask = AttentionMask.causal() if attn_mask is None else attn_mask
        if isinstance(mask, NamedArray):
            mask = AttentionMask.explicit(mask)  # layers can add a window or chunks to it
        indices = _indices_in_text(mask, input_ids.resolve_axis(POSITION)) if pos_ids is None else pos_ids
        x = hax.auto_sharded(self._embed(input_ids, indices))
        positions = Positions.of(indices)
        for segment in self.segments:
            x = fold_layers(segment, x, mask, positions, config.kernel)
        if self.norm is not None:
            x = self.norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        return x if config.logit_multiplier == 1.0 else x * config.logit_multiplier

    @named_call(name="embed")
    def _embed(self, tokens: NamedArray, indices: NamedArray) -> NamedArray:
        """Return the residual stream {..., position, embed} before the first layer."""
        config = self.settings
        x = self.embedding.take(self.Vocab, tokens)
        if config.embedding_multiplier != 1.0:
            x = x * config.embedding_multiplier
        if self.project_in is not None:
            x = self.project_in(x)
        if self.position_embedding is None or config.position_table is None:
            return x
        table = config.position_table
        return x + self.position_embedding.take(table.Rows, indices + table.first)

    def get_lm_head(self) -> NamedArray:
        """Return the weight {vocab, embed} of the output head, without its bias."""
        return self.embedding if self.lm_head is None else self.lm_head.weight

    @property
    def lm_head_bias(self) -> NamedArray | None:
        """The bias {vocab} of the output head; None for most models."""
        return None if self.lm_head is None else self.lm_head.bias

    def __call__(
        self,
        input_ids: NamedArray,
        attn_mask: AttentionMask | NamedArray | None = None,
        *,
        key: Any = None,
        pos_ids: NamedArray | None = None,
    ) -> NamedArray:
        """Compute float32[..., position, vocab] logits of int32[..., position] tokens; see `activations`."""
        activations = self.activations(input_ids, attn_mask, key=key, pos_ids=pos_ids)
        return project_to_vocab(activations, prepare_head(self, self.settings.logit_soft_cap), self.Embed)

    def compute_next_token_loss(
        self, example: LmExample, **settings: Any
    ) -> jax.Array | NamedArray | tuple[jax.Array | NamedArray, dict[str, Any]]:
        """Compute the loss of every next token as Levanter's models do, with the bias and the soft cap of the head.

        The result is (loss, metrics) if `expert_statistics` or `selection_statistics` is set and the loss is the mean
        over all tokens, as Levanter's Trainer asks for; otherwise it is the loss alone.

        Args:
            settings: keyword arguments of Levanter's `LmHeadModel.compute_next_token_loss`.
        """
        is_mean = settings.get("reduction", hax.mean) is hax.mean and settings.get("reduction_axis") is None
        config = self.settings
        if not is_mean or not (config.expert_statistics or config.selection_statistics):
            return self._next_token_loss(example, settings)
        with ExitStack() as stack:
            routing = stack.enter_context(record_routing()) if config.expert_statistics else None
            selection = stack.enter_context(record_selection()) if config.selection_statistics else None
            loss = self._next_token_loss(example, settings)
        metrics: dict[str, Any] = {}
        if routing is not None:
            metrics |= training_metrics(config.segments, routing.segments)
        if selection is not None:
            metrics |= selection_metrics(config.segments, selection.segments)
        return loss, metrics

    def _next_token_loss(self, example: LmExample, settings: dict[str, Any]) -> jax.Array | NamedArray:
        settings["logit_soft_cap"] = self.settings.logit_soft_cap
        bias = self.lm_head_bias
        if bias is None:
            return super().compute_next_token_loss(example, **settings)
        settings.pop("key", None)  # nothing is random
        settings["dtype"] = settings.pop("loss_dtype", jnp.float32)
        activations = self.activations(example.tokens, example.attn_mask)
        head = hax.auto_sharded(self.get_lm_head())
        # Levanter's loss, which is computed in blocks of the vocabulary, takes no bias: activations get one more
        # element, which is 1, and the head's weight gets the bias as the matching column
        inputs = f"{self.Embed.name}_and_one"
        ones = hax.ones_like(activations[self.Embed, 0])
        widened = [
            hax.concatenate(inputs, [x.rename({self.Embed: inputs}), last.broadcast_axis(Axis(inputs, 1))])
            for x, last in ((activations, ones), (head, bias))
        ]
        arrays = (*widened, example.tokens)
        return maybe_fused_next_token_loss(
            self.Pos, inputs, self.Vocab, *arrays, loss_weight=example.loss_weight, **settings
        )

    def resize_vocab(self, new_size: int, key: jax.Array | None = None) -> "Decoder":
        """Return the model with `new_size` tokens; new rows are random, or without a key the mean of the old ones."""
        name = self.Vocab.name

        def resize(leaf: Any) -> Any:
            has_vocab = _is_named(leaf) and any(axis.name == name for axis in leaf.axes)
            return hax.tree_util.resize_axis(leaf, name, new_size, key=key) if has_vocab else leaf

        resized: Decoder = jax.tree.map(resize, self, is_leaf=_is_named)
        return resized

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> "Decoder":
        """Return the model with the parameters of a checkpoint, read by the rules of its family.

        Raises:
            CheckpointError: a tensor holds one-byte codes, which have no meaning without their scales.
        """

        def read(stored: StoredTensor) -> jax.Array:
            array = jnp.asarray(state_dict[_with_prefix(prefix, stored.name)])
            if array.dtype.itemsize == 1:
                raise CheckpointError(
                    f"{stored.name} is stored as {array.dtype}, and this loader does not read its scales; load it by "
                    "shardplan, which does (patch_levanter, or shardplan's HFCheckpointConverter)"
                )
            return array

        rules = parameter_rules(self.settings, self.Vocab.size)

        def fill(path: Any, leaf: Any) -> Any:
            if not _is_named(leaf):
                return leaf
            value = evaluate(rules[_path_text(path)], read, ARRAYS)
            return hax.named(value.reshape(leaf.array.shape), leaf.axes)

        return jax.tree_util.tree_map_with_path(fill, self, is_leaf=_is_named)

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """Return the tensors of a checkpoint, including constants; elements that belong to no parameter are 0.

        Rules move every element to one place in one parameter, so the transposed linear map moves it back.

        Raises:
            CheckpointError: the model holds weights as one-byte codes.
        """
        check_has_numbers(self)
        rules = parameter_rules(self.settings, self.Vocab.size)
        leaves = jax.tree_util.tree_flatten_with_path(self, is_leaf=_is_named)[0]
        parameters = {_path_text(path): leaf.array for path, leaf in leaves if _is_named(leaf)}
        dtype = jnp.result_type(*parameters.values())

        def read_all(tensors: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            values = {}
            for path, rule in rules.items():
                value = evaluate(rule, lambda stored: tensors[stored.name], ARRAYS)
                values[path] = value.reshape(parameters[path].shape)
            return values

        tensors = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in _stored_shapes(rules).items()}
        wide = {path: parameter.astype(dtype) for path, parameter in parameters.items()}
        (stored,) = jax.linear_transpose(read_all, tensors)(wide)
        stored.update((name, jnp.asarray(value, dtype)) for name, value in stored_constants(self.settings).items())
        return {_with_prefix(prefix, name): tensor for name, tensor in stored.items()}


class _Arrays:
    """Applies loading rules to arrays: reshape, transpose, slice, concatenate and stack."""

    def reshape(self, value: jax.Array, shape: Shape) -> jax.Array:
        return jnp.reshape(value, shape)

    def transpose(self, value: jax.Array, permutation: Sequence[int]) -> jax.Array:
        return jnp.transpose(value, permutation)

    def slice(self, value: jax.Array, dimension: int, start: int, stop: int) -> jax.Array:
        return jax.lax.slice_in_dim(value, start, stop, axis=dimension)

    def concatenate(self, values: Sequence[jax.Array], dimension: int) -> jax.Array:
        return jnp.concatenate(values, dimension)

    def stack(self, values: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack(values)


ARRAYS = _Arrays()


def expected_shapes(model: Decoder) -> dict[str, Shape]:
    """Return name -> shape of the tensors in a checkpoint of `model`, whose arrays may be abstract."""
    return _stored_shapes(parameter_rules(model.settings, model.Vocab.size))


def _stored_shapes(rules: Mapping[str, Rule]) -> dict[str, Shape]:
    """Return name -> shape of the tensors that loading rules read."""
    shapes: dict[str, Shape] = {}
    for rule in rules.values():
        shapes.update((stored.name, stored.shape) for stored in stored_tensors(rule))
    return shapes


def _indices_in_text(mask: AttentionMask, Pos: Axis) -> NamedArray:
    """Return each token's index in its document, int32[..., position]; without documents, in the sequence."""
    return hax.arange(Pos) if mask.segment_ids is None else indices_in_documents(mask.segment_ids[0], Pos)


def _is_named(node: Any) -> bool:
    return isinstance(node, NamedArray)


def _path_text(path: Any) -> str:
    return jax.tree_util.keystr(path).lstrip(".")


def _with_prefix(prefix: str | None, name: str) -> str:
    return name if prefix is None else f"{prefix}.{name}"
