"""Loading rules that families share: the parameters of each part, under the tensor names of most checkpoints."""

from collections.abc import Mapping

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.names import Concatenated, Reshaped, Rule, Shape, Sliced, StoredTensor, Transposed
from shardplan.decoder.parts.attention.grouped_attention import GroupedAttention, NormExtent
from shardplan.decoder.parts.block import LayerConfig, Wiring
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.norm import NormConfig

Rules = dict[str, Rule]
"""Path of a parameter -> the rule that makes it from checkpoint tensors."""

NORM_NAMES: Mapping[Wiring, Mapping[str, str]] = {
    Wiring.PRE: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    Wiring.PARALLEL: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    Wiring.PARALLEL_SHARED: {"attention_norm": "input_layernorm"},
    Wiring.POST: {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    Wiring.SANDWICH: {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}
"""Wiring of a layer -> norm of the layer -> its name in most checkpoints."""


def top_rules(
    config: Architecture, vocab: int, model: str = "model", embedding: str = "embed_tokens", norm: str = "norm"
) -> Rules:
    """Return the loading rules of the embedding, the last norm and the output head.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> tied = DecoderConfig.from_hf_config(read_config("llama-3.2-1b", None))
    >>> untied = DecoderConfig.from_hf_config(read_config("llama-3.1-8b", None))
    >>> list(top_rules(tied, vocab=128256)), list(top_rules(untied, vocab=128256))
    (['embedding', 'norm.weight'], ['embedding', 'norm.weight', 'lm_head.weight'])

    Args:
        model: prefix of all tensors except the output head.
        embedding, norm: names after the prefix.
    """
    size = config.TokenEmbed.size
    found: Rules = {"embedding": StoredTensor(f"{model}.{embedding}.weight", (vocab, size))}
    if config.norm is not None:
        found |= norm_rules("norm", f"{model}.{norm}", config.norm, config.embed)
    if not config.is_tied:
        found["lm_head.weight"] = StoredTensor("lm_head.weight", (vocab, size))
    if config.has_head_bias:
        found["lm_head.bias"] = StoredTensor("lm_head.bias", (vocab,))
    return found


def standard_layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the loading rules of a layer whose tensors have Llama's names, with the norms of its wiring.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("llama-3.1-8b", None))
    >>> standard_layer_rules(config, config.segments[0].layers[0], 31)["self_attn.k_proj.weight"]
    StoredTensor(name='model.layers.31.self_attn.k_proj.weight', shape=(1024, 4096))
    """
    at, embed = f"model.layers.{index}", config.embed
    return {
        **attention_rules(layer.grouped_attention, f"{at}.self_attn", embed),
        **mlp_rules(layer.dense_mlp, f"{at}.mlp", embed),
        **layer_norm_rules(layer, at, embed),
    }


def interleaved_layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the loading rules of a layer with Llama's names, if the checkpoint rotates neighbouring channels.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("command-r", None))
    >>> rules = interleaved_layer_rules(config, config.segments[0].layers[0], 0)
    >>> [type(rules[f"self_attn.{part}_proj.weight"]).__name__ for part in "qkvo"]
    ['Reshaped', 'Reshaped', 'StoredTensor', 'StoredTensor']
    """
    found = standard_layer_rules(config, layer, index)
    return {**found, **in_halves(found, layer.grouped_attention, config.embed)}


def layer_norm_rules(layer: LayerConfig, at: str, embed: int, names: Mapping[str, str] | None = None) -> Rules:
    """Return the loading rules of the norms of a layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("olmo2-7b", None))
    >>> rules = layer_norm_rules(config.segments[0].layers[0], "layers.0", config.embed)
    >>> [rule.name for rule in rules.values()]
    ['layers.0.post_attention_layernorm.weight', 'layers.0.post_feedforward_layernorm.weight']

    Args:
        at: prefix of the layer.
        names: norm -> its name after the prefix; default: `NORM_NAMES` of the wiring.
    """
    found: Rules = {}
    for path, name in (NORM_NAMES[layer.wiring] if names is None else names).items():
        found |= norm_rules(path, f"{at}.{name}", layer.norm, embed)
    return found


def attention_rules(
    attention: GroupedAttention,
    name: str,
    embed: int,
    projections: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    norms: tuple[str, str] = ("q_norm", "k_norm"),
) -> Rules:
    """Return the loading rules of attention, if every projection has a separate tensor.

    >>> rules = attention_rules(GroupedAttention(heads=8, kv_heads=2, head_size=64), "self_attn", embed=256)
    >>> [(path.split(".")[1], rule.shape) for path, rule in rules.items()]
    [('q_proj', (512, 256)), ('k_proj', (128, 256)), ('v_proj', (128, 256)), ('o_proj', (256, 512))]

    Args:
        name: prefix of the attention.
        projections: names of the query, key, value and output projections after the prefix.
        norms: names of the norms of queries and of keys after the prefix.
    """
    queries, keys = attention.heads * attention.head_size, attention.kv_heads * attention.head_size
    value_size = attention.ValueHeadSize.size
    query, key, value, output = (f"{name}.{each}" for each in projections)
    return {
        **linear_rules("self_attn.q_proj", query, queries, embed, attention.has_bias),
        **linear_rules("self_attn.k_proj", key, keys, embed, attention.has_bias),
        **linear_rules("self_attn.v_proj", value, attention.kv_heads * value_size, embed, attention.has_bias),
        **linear_rules("self_attn.o_proj", output, embed, attention.heads * value_size, attention.has_output_bias),
        **({"self_attn.sinks": StoredTensor(f"{name}.sinks", (attention.heads,))} if attention.has_sinks else {}),
        **_head_norm_rules(attention, "self_attn.q_norm", f"{name}.{norms[0]}", attention.heads),
        **_head_norm_rules(attention, "self_attn.k_norm", f"{name}.{norms[1]}", attention.kv_heads),
    }


def _head_norm_rules(attention: GroupedAttention, path: str, name: str, heads: int) -> Rules:
    """Return the loading rules of the norm of queries or keys; none if there is no norm, or it has no weight."""
    if attention.head_norm is None or not attention.head_norm.norm.has_weight:
        return {}
    size = attention.head_size
    shapes: dict[NormExtent, Shape] = {
        NormExtent.HEAD: (size,), NormExtent.EACH_HEAD: (heads, size), NormExtent.ALL_HEADS: (heads * size,)
    }  # fmt: skip
    shape = shapes[attention.head_norm.extent]
    found: Rules = {f"{path}.weight": StoredTensor(f"{name}.weight", shape)}
    if attention.head_norm.norm.has_bias:
        found[f"{path}.bias"] = StoredTensor(f"{name}.bias", shape)
    return found


def mlp_rules(
    mlp: MlpConfig, name: str, embed: int, projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Rules:
    """Return the loading rules of an MLP, if every projection has a separate tensor.

    >>> mlp = MlpConfig(size=128, activation="silu", is_gated=True)
    >>> [(rule.name, rule.shape) for rule in mlp_rules(mlp, "mlp", embed=64).values()]
    [('mlp.gate_proj.weight', (128, 64)), ('mlp.up_proj.weight', (128, 64)), ('mlp.down_proj.weight', (64, 128))]

    Args:
        name: prefix of the MLP.
        projections: names of the gate, up and down projections after the prefix.
    """
    gate, up, down = (f"{name}.{each}" for each in projections)
    found = linear_rules("mlp.gate_proj", gate, mlp.size, embed, mlp.has_bias) if mlp.is_gated else {}
    found |= linear_rules("mlp.up_proj", up, mlp.size, embed, mlp.has_bias)
    return found | linear_rules("mlp.down_proj", down, embed, mlp.size, mlp.has_bias)


def gate_and_up_rules(mlp: MlpConfig, name: str, embed: int) -> Rules:
    """Return the loading rules of gate and up projections, if one tensor holds both, the gate first.

    >>> mlp = MlpConfig(size=128, activation="silu", is_gated=True)
    >>> rules = gate_and_up_rules(mlp, "mlp.gate_up_proj", embed=64)
    >>> [(path, rule.start, rule.stop) for path, rule in rules.items()]
    [('mlp.gate_proj.weight', 0, 128), ('mlp.up_proj.weight', 128, 256)]
    """
    both = StoredTensor(f"{name}.weight", (2 * mlp.size, embed))
    return {
        "mlp.gate_proj.weight": Sliced(both, 0, 0, mlp.size),
        "mlp.up_proj.weight": Sliced(both, 0, mlp.size, 2 * mlp.size),
    }


def linear_rules(path: str, name: str, outputs: int, inputs: int, has_bias: bool) -> Rules:
    """Return the loading rules of a projection's weight and bias.

    >>> linear_rules("mlp.up_proj", "mlp.fc", 8, 4, True)["mlp.up_proj.bias"]
    StoredTensor(name='mlp.fc.bias', shape=(8,))
    """
    found: Rules = {f"{path}.weight": StoredTensor(f"{name}.weight", (outputs, inputs))}
    if has_bias:
        found[f"{path}.bias"] = StoredTensor(f"{name}.bias", (outputs,))
    return found


def norm_rules(path: str, name: str, norm: NormConfig, size: int) -> Rules:
    """Return the loading rules of a norm over the residual stream.

    >>> from shardplan.decoder.parts.norm import NormKind
    >>> norm_rules("norm", "model.norm", NormConfig(NormKind.RMS, 1e-5), 64)
    {'norm.weight': StoredTensor(name='model.norm.weight', shape=(64,))}
    """
    found: Rules = {f"{path}.weight": StoredTensor(f"{name}.weight", (size,))}
    if norm.has_bias:
        found[f"{path}.bias"] = StoredTensor(f"{name}.bias", (size,))
    return found


def in_halves(rules: Rules, attention: GroupedAttention, embed: int) -> Rules:
    """Change the rules of queries, keys and their norms to reorder rotated channels from pairs to halves.

    The checkpoint rotates pairs of neighbouring channels. The rules put the first channels of all pairs before the
    second channels, as `shardplan.decoder.parts.attention.rotary` rotates them. Scores do not depend on the order of
    channels.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("llama-4-scout", None))
    >>> attention = config.segments[0].layers[0].attention
    >>> rules = attention_rules(attention, "self_attn", config.embed)
    >>> list(in_halves(rules, attention, config.embed))
    ['self_attn.q_proj.weight', 'self_attn.k_proj.weight']

    Args:
        rules: the rules of a layer, for channels in the order of the checkpoint.
    """
    if attention.rotary is None:
        return {}
    rotated, size = 2 * attention.rotary.frequencies.pairs, attention.head_size
    found: Rules = {}
    for path, rule in rules.items():
        part, _, kind = path.removeprefix("self_attn.").partition(".")
        if part not in ("q_proj", "k_proj", "q_norm", "k_norm"):
            continue
        each_head = part.endswith("proj") or (
            attention.head_norm is not None and attention.head_norm.extent is not NormExtent.HEAD
        )
        heads = (attention.heads if part.startswith("q") else attention.kv_heads) if each_head else 1
        inputs = (embed,) if part.endswith("proj") and kind == "weight" else ()
        found[path] = _halves_of_heads(rule, heads, size, rotated, inputs)
    return found


def _halves_of_heads(rule: Rule, heads: int, size: int, rotated: int, inputs: Shape) -> Rule:
    """Reorder the rotated channels of each head, from pairs to halves, in an array {heads * size, inputs}."""
    by_head = Reshaped(rule, (heads, size, *inputs))
    halves = pairs_to_halves(Sliced(by_head, 1, 0, rotated), (heads, rotated, *inputs))
    return halves if rotated == size else Concatenated((halves, Sliced(by_head, 1, rotated, size)), 1)


def pairs_to_halves(rule: Rule, shape: Shape) -> Rule:
    """Reorder channels from neighbouring pairs (0, 1), (2, 3), ... to halves: 0, 2, ..., 1, 3, ...

    >>> from shardplan.decoder.names import StoredTensor
    >>> rule = pairs_to_halves(StoredTensor("q_proj.bias", (2, 4)), (2, 4))
    >>> rule.rule.permutation, rule.rule.rule.shape
    ((0, 2, 1), (2, 2, 2))

    Args:
        rule: makes an array of `shape`.
        shape: {heads, channels, inputs}; a bias has no inputs.
    """
    heads, channels, *inputs = shape
    pairs = Reshaped(rule, (heads, channels // 2, 2, *inputs))
    permutation = (0, 2, 1, *range(3, 3 + len(inputs)))
    return Reshaped(Transposed(pairs, permutation), shape)
