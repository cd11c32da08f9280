"""Writes the gradients that transformers computes in float64 for golden checkpoints of families of the decoder.

They are of the mean loss of every next token of the golden tokens, by all parameters, under the names of the
checkpoint. `own_error` is the largest relative error of transformers' own gradients in float32: of each parameter the
largest difference, over its largest gradient. `tests/golden/test_gradients.py` compares the decoder's gradients.
Needs torch: python scripts/make_gradient_reference.py
"""

from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).parents[1] / "tests" / "golden" / "families"
FAMILIES = ("cohere2", "gemma3_text", "gpt_neox", "olmo3", "phi")
"""They have windows in some layers, norms of heads, norms before branches and behind them, parallel branches, tied
heads, pairs of neighbouring channels, fused projections, and a bias of the output head."""
MEMORY_NAMES = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""Family -> name in memory -> name in the checkpoint, where they differ."""


def main() -> None:
    """Compute and write the gradients of every family."""
    for family in FAMILIES:
        expected = compute_gradients(family, torch.float64)
        found = compute_gradients(family, torch.float32)
        errors = {name: np.abs(found[name] - value).max() / np.abs(value).max() for name, value in expected.items()}
        stored = {name: value.astype(np.float32) for name, value in expected.items()}
        np.savez_compressed(FOLDER / family / "gradients.npz", own_error=max(errors.values()), **stored)
        print(f"{family:12s} {len(stored)} parameters, own error {max(errors.values()):.2g}")


def compute_gradients(family: str, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """Return name in the checkpoint -> gradient, float64, computed in `dtype`."""
    golden = np.load(FOLDER / family / "golden.npz")
    tokens = torch.tensor(golden["tokens"].astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(FOLDER / family, dtype=dtype, attn_implementation="eager").eval()
    model.get_input_embeddings().padding_idx = None  # it would leave these tokens out of the gradient
    # models compute norms and softmax in float32, whatever the type of the weights: here in `dtype` as well
    as_dtype = mock.patch.object(torch.Tensor, "float", lambda tensor: tensor.to(dtype))
    with mock.patch.object(torch, "float32", dtype), as_dtype:
        logits = model(tokens).logits
    # rotary frequencies stay float32, as in the decoder
    assert np.abs(logits.detach().numpy() - golden["logits_float64"]).max() <= golden["own_error"]
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    names = MEMORY_NAMES.get(family, {})
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[names.get(name, name)] = parameter.grad.double().numpy()
    stored = load_file(FOLDER / family / "model.safetensors")
    assert all(stored[name].shape == gradient.shape for name, gradient in gradients.items())
    return gradients


if __name__ == "__main__":
    main()
