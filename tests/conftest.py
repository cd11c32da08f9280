"""Eight virtual CPU devices for every test, and the golden checkpoints."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from pathlib import Path

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

GOLDEN = Path(__file__).parent / "golden" / "data"
MODEL_TYPES = sorted(path.name for path in GOLDEN.iterdir())


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of real Hugging Face checkpoints with float32 logits by transformers (golden.npz)."""
    return GOLDEN


@pytest.fixture
def make_config():
    """A `Config` from overrides with `_` for the first dot: make_config(workload_batch=4, model_ref="x")."""
    from shardplan import config

    def make(**overrides):
        argv = [f"--{key.replace('_', '.', 1)}={value}" for key, value in overrides.items()]
        return config.load(argv, "test")

    return make
