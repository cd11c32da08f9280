"""Writes the logits that transformers computes where keys of a config.json differ from those of a golden checkpoint.

The weights are those of `tests/golden/data`; `tests/golden/config_variants.json` says which keys are changed, and
`tests/golden/test_config_variants.py` compares the logits. Needs torch: python scripts/make_config_variants.py
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
POSITIONS = (0, 5, 31, 63)
"""Positions whose logits are kept: near the start, and where windows and scaled frequencies change most."""


def main() -> None:
    """Compute the logits of every variant, and write those at `POSITIONS`."""
    variants = json.loads((GOLDEN / "config_variants.json").read_text())
    logits = {}
    for name, variant in variants.items():
        source = GOLDEN / "data" / variant["checkpoint"]
        with tempfile.TemporaryDirectory() as copy:
            for path in source.glob("*.safetensors*"):
                shutil.copy(path, copy)
            values = {**json.loads((source / "config.json").read_text()), **variant["changes"]}
            values = {key: value for key, value in values.items() if value != "absent"}
            Path(copy, "config.json").write_text(json.dumps(values))
            model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()
        tokens = torch.tensor(np.load(source / "golden.npz")["tokens"][:1].astype(np.int64))
        with torch.no_grad():
            logits[name] = model(tokens).logits[0, POSITIONS, :].numpy()
        base = np.load(source / "golden.npz")["logits"][0, POSITIONS, :]
        print(f"{name:32s} differs from its checkpoint by {np.abs(logits[name] - base).max():.2g}")
    np.savez_compressed(GOLDEN / "config_variants.npz", positions=POSITIONS, **logits)


if __name__ == "__main__":
    main()
