"""LoRA adapters as tests make and merge them, by NumPy and safetensors alone."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

PREFIX = "base_model.model."
CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"],
    "bias": "none", "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "init_lora_weights": True,
    "lora_dropout": 0.05, "inference_mode": True, "base_model_name_or_path": "org/base", "revision": None,
}  # fmt: skip


def read_folder(folder):
    """Name -> array of all safetensors files of a folder."""
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def matrices(shapes, rank=4, seed=0, is_exact=False):
    """The tensors of an adapter of linear layers: module -> (outputs, inputs) and, if it is not `rank`, its own rank.

    Args:
        is_exact: all products and their sums are exact in float32, in any order.
    """
    random, tensors = np.random.default_rng(seed), {}
    for module, (outputs, inputs, *own) in shapes.items():
        size = own[0] if own else rank
        for part, shape in (("A", (size, inputs)), ("B", (outputs, size))):
            values = random.integers(-4, 5, shape) / 8 if is_exact else random.normal(size=shape) / 4
            tensors[f"{PREFIX}{module}.lora_{part}.weight"] = values.astype(np.float32)
    return tensors


def write_adapter(folder, tensors, **config):
    """Write an adapter in a new folder, and return the folder."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def merge(tensors, adapter, scaling, transposed=()):
    """The weights with the change by an adapter, in float64.

    Args:
        scaling: of a module.
        transposed: modules whose weights are stored as inputs x outputs.
    """
    result = {name: each.astype(np.float64) for name, each in tensors.items()}
    for name, b in adapter.items():
        if ".lora_B" in name:
            module = name.removeprefix(PREFIX).partition(".lora_B")[0]
            change = b.astype(np.float64) @ adapter[name.replace("lora_B", "lora_A")].astype(np.float64)
            result[f"{module}.weight"] += scaling(module) * (change.T if module in transposed else change)
    return result
