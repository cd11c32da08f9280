"""Qwen3 MoE in NumPy and float64, which shares no code with shardplan: its logits, and how it routes tokens."""

import json

import numpy as np
from safetensors.numpy import load_file


def read_weights(folder):
    """Name without `.weight` -> float64 array, of all files of a checkpoint."""
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= {name.removesuffix(".weight"): a.astype(np.float64) for name, a in load_file(path).items()}
    return weights


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def run(folder, tokens):
    """Logits [position, vocab] of one sequence, and for each layer probabilities [position, expert] and chosen experts.

    Chosen experts are int[position, k].
    """
    config, w = json.loads((folder / "config.json").read_text()), read_weights(folder)
    size, per_key = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]
    length, routing = len(tokens), []

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[name]

    angles = np.arange(length)[:, None] / config["rope_theta"] ** (np.arange(0, size, 2) / size)
    cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))

    def rotate(x):
        return x * cos + np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin

    x = w["model.embed_tokens"][tokens]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        h = norm(x, f"{name}.input_layernorm")
        q, k, v = ((h @ w[f"{name}.self_attn.{p}_proj"].T).reshape(length, -1, size) for p in "qkv")
        q, k = rotate(norm(q, f"{name}.self_attn.q_norm")), rotate(norm(k, f"{name}.self_attn.k_norm"))
        k, v = (np.repeat(each, per_key, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        context = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(length, -1)
        x = x + context @ w[f"{name}.self_attn.o_proj"].T
        h = norm(x, f"{name}.post_attention_layernorm")
        probabilities = softmax(h @ w[f"{name}.mlp.gate"].T)
        chosen = np.argsort(-probabilities, -1)[:, : config["num_experts_per_tok"]]
        factors = np.take_along_axis(probabilities, chosen, -1)
        factors /= factors.sum(-1, keepdims=True)
        outputs = np.zeros_like(x)
        for token, choice in np.ndindex(chosen.shape):
            expert = f"{name}.mlp.experts.{chosen[token, choice]}"
            gate = w[f"{expert}.gate_proj"] @ h[token]
            hidden = gate / (1 + np.exp(-gate)) * (w[f"{expert}.up_proj"] @ h[token])
            outputs[token] += factors[token, choice] * (w[f"{expert}.down_proj"] @ hidden)
        x = x + outputs
        routing.append((probabilities, chosen))
    return norm(x, "model.norm") @ w["lm_head"].T, routing


def loads(chosen, experts):
    """int[expert]: how often each expert is chosen."""
    return np.bincount(np.asarray(chosen).reshape(-1), minlength=experts)


def entropies(probabilities):
    """Entropy in nats of each distribution of the last dimension."""
    return -(probabilities * np.log(probabilities)).sum(-1)
