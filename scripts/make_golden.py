"""Makes a golden checkpoint of a model family: random weights under the released names, and transformers' logits.

    python scripts/make_golden.py config.json --to tests/golden/families/NAME

The config.json is that of a release with small sizes: every tensor should have another size than its neighbours, and
windows and original positions should be shorter than the tokens. It is copied as it is. `golden.npz` has tokens, their
logits in float32 and in float64, and `own_error`, the largest difference between the two, by which
`tests/golden/test_families.py` judges. Needs torch, and a transformers that knows the model type.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

EAGER = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
"""Arguments of models; torch's grouped matmuls of experts have no float64."""
SEQUENCES = 2
PRECISION = 2.0**-32
"""Logits in float64 are rounded to multiples of this, so that the file is small."""


def main() -> None:
    """Write the folder of a family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="new folder")
    parser.add_argument("--length", type=int, default=48, help="tokens of each of the two sequences")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    values = json.loads(arguments.config.read_text())
    config = AutoConfig.for_model(**values)
    model = AutoModelForCausalLM.from_config(config, **EAGER).eval()
    randomize(model)
    model.save_pretrained(arguments.to)
    shutil.copy(arguments.config, arguments.to / "config.json")
    (arguments.to / "generation_config.json").unlink(missing_ok=True)
    model = AutoModelForCausalLM.from_pretrained(arguments.to, **EAGER).eval()
    tokens = torch.randint(0, config.get_text_config().vocab_size, (SEQUENCES, arguments.length))
    with torch.no_grad():
        single = model(tokens).logits.numpy()
        with everything_in_float64():
            double = model.double()(tokens).logits.numpy()
    double = np.round(double / PRECISION) * PRECISION
    own_error = np.abs(single - double).max()
    logits = {"logits_float32": single, "logits_float64": double, "own_error": own_error}
    np.savez_compressed(arguments.to / "golden.npz", tokens=tokens.numpy().astype(np.int32), **logits)
    print(f"{arguments.to}: logits of {double.std():.2f} (standard deviation), own error {own_error:.1e}")


def randomize(model: torch.nn.Module) -> None:
    """Give parameters random values, norms and biases too, with which logits are about 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(mean=float(name.endswith("weight") and bool(parameter.mean() > 0.5)), std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of routers; transformers has it as no parameter
                buffer.normal_(std=0.2)


@contextmanager
def everything_in_float64() -> Iterator[None]:
    """Let modelling code that asks for float32 get float64."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


if __name__ == "__main__":
    main()
