"""Checkpoints of models of images and text, as tests make them from checkpoints of their text models alone."""

import json
from dataclasses import dataclass

import numpy as np
from coded_checkpoints import read_stored, write_stored


@dataclass(frozen=True)
class Wrapper:
    """How a model of images and text names its configuration and its tensors."""

    type: str
    key: str | None
    """Where config.json has the keys of the text model; None for beside its own."""
    body: str
    """What stands in the names of tensors for `model.` of the text model."""
    head: str
    """What precedes `lm_head.` in the names of tensors."""
    images: tuple[str, ...]
    """Names of tensors that the text model does not have."""


LLAVA_IMAGES = (
    "vision_tower.vision_model.embeddings.class_embedding",
    "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
    "vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias",
    "vision_tower.vision_model.encoder.layers.1.mlp.fc1.bias",
    "multi_modal_projector.linear_1.weight", "multi_modal_projector.linear_1.bias", "image_newline",
)  # fmt: skip
INTERNVL_IMAGES = (
    "vision_model.embeddings.class_embedding", "vision_model.encoder.layers.0.attn.qkv.weight",
    "vision_model.encoder.layers.0.ls1", "mlp1.0.weight", "mlp1.0.bias", "mlp1.1.weight",
)  # fmt: skip
KIMI_IMAGES = (
    "vision_tower.patch_embed.proj.weight", "vision_tower.encoder.blocks.0.wqkv.weight",
    "vision_tower.encoder.blocks.0.mlp.fc0.bias", "mm_projector.pre_norm.weight", "mm_projector.proj.0.weight",
)  # fmt: skip
QWEN_IMAGES = (
    "visual.patch_embed.proj.weight", "visual.blocks.0.attn.qkv.bias", "visual.blocks.0.mlp.gate_proj.weight",
    "visual.blocks.1.mlp.down_proj.weight", "visual.merger.mlp.0.weight",
)  # fmt: skip


def in_model(names):
    """The names as transformers 5 writes them."""
    return tuple(f"model.{name}" for name in names)


WRAPPERS = {
    "llava": Wrapper("llava", "text_config", "language_model.model.", "language_model.", LLAVA_IMAGES),
    "llava of transformers 5": Wrapper("llava", "text_config", "model.language_model.", "", in_model(LLAVA_IMAGES)),
    "llava_next": Wrapper("llava_next", "text_config", "language_model.model.", "language_model.", LLAVA_IMAGES),
    "llava_onevision": Wrapper("llava_onevision", "text_config", "model.language_model.", "", in_model(LLAVA_IMAGES)),
    "internvl": Wrapper("internvl", "text_config", "language_model.model.", "language_model.", LLAVA_IMAGES),
    "internvl_chat": Wrapper(
        "internvl_chat", "llm_config", "language_model.model.", "language_model.", INTERNVL_IMAGES
    ),
    "kimi_k25": Wrapper("kimi_k25", "text_config", "language_model.model.", "language_model.", KIMI_IMAGES),
    "qwen2_vl": Wrapper("qwen2_vl", None, "model.", "", QWEN_IMAGES),
    "qwen2_5_vl": Wrapper("qwen2_5_vl", "text_config", "model.language_model.", "", in_model(QWEN_IMAGES)),
    "glm4v": Wrapper("glm4v", "text_config", "model.language_model.", "", in_model(QWEN_IMAGES)),
    "qwen3_vl": Wrapper("qwen3_vl", "text_config", "model.language_model.", "", in_model(QWEN_IMAGES)),
    "glm4v_moe": Wrapper("glm4v_moe", "text_config", "model.language_model.", "", in_model(QWEN_IMAGES)),
}


def wrapped_config(wrapper, text, **outer):
    """The config.json of a wrapper, with further keys of its own."""
    inner = {name: value for name, value in text.items() if name not in ("architectures", "transformers_version")}
    own = {"model_type": wrapper.type, "vision_config": {"hidden_size": 7, "num_experts": 8}, **outer}
    return {**inner, "image_token_id": 3, **own} if wrapper.key is None else {**own, wrapper.key: inner}


def wrapped_tensors(wrapper, tensors):
    """The tensors of a text model by the names of the wrapper, with some of images beside them."""
    result = {}
    for name, value in tensors.items():
        is_head = name.startswith("lm_head.")
        result[wrapper.head + name if is_head else name.replace("model.", wrapper.body, 1)] = value
    random = np.random.default_rng(0)
    return result | {name: random.standard_normal((5, 3)).astype(np.float32) for name in wrapper.images}


def read_checkpoint(golden):
    """The tensors of a checkpoint, and its config.json."""
    stored = {name: each for file in sorted(golden.glob("*.safetensors")) for name, each in read_stored(file).items()}
    return stored, json.loads((golden / "config.json").read_text())


def write_wrapped(folder, wrapper, golden, *, text=None, change=None, **outer):
    """Write a checkpoint with the text model of another one, and return its folder.

    Args:
        text: keys of the text model to change; None removes one.
        change: a function that changes the tensors.
        outer: keys of the wrapper itself.
    """
    stored, config = read_checkpoint(golden)
    config = {name: value for name, value in {**config, **(text or {})}.items() if value is not None}
    tensors = wrapped_tensors(wrapper, stored)
    if change is not None:
        change(tensors)
    return write_stored(folder, tensors, wrapped_config(wrapper, config, **outer))
