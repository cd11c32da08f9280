"""The messages on the page about troubleshooting are those of the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OF_OTHERS = (
    "The TPU is already in use", "could not determine TPU", "PyTorch was not found", "RESOURCE_EXHAUSTED",
    "DuplicateSpecError", "is partitioned", "Resource axis", "DEADLINE_EXCEEDED", "Timeout (", "IO callbacks",
    "Axis experts",
)  # fmt: skip
"""Beginnings of the messages of Python, JAX, Haliax, libtpu and transformers."""
MESSAGES = [message for message in re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE) if not message.startswith(OF_OTHERS)]


@cache
def texts():
    """Every text in the package, with ... for what is put into it."""
    found = set()
    for path in (ROOT / "shardplan").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_there_are_messages():
    assert len(MESSAGES) > 20


@pytest.mark.slow
@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_shardplan_are_in_the_code(message):
    parts = [part.strip() for part in message.split("...")]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    assert any(pattern.search(text) for text in texts()), message


def test_messages_of_jax():
    """Those that JAX raises without a TPU are its own words, in the installed version."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((4, 2), ("data", "model"))
    wrong = {
        "DuplicateSpecError": lambda: NamedSharding(mesh, PartitionSpec("model", "model")),
        "is partitioned": lambda: jax.device_put(np.zeros((3, 4)), NamedSharding(mesh, PartitionSpec("data"))),
        "Resource axis": lambda: NamedSharding(mesh, PartitionSpec("datta")),
    }
    for begin, make in wrong.items():
        (heading,) = re.findall(rf"^### `({begin}.+)`$", PAGE, re.MULTILINE)
        with pytest.raises(Exception) as raised:
            make()
        text = f"{type(raised.value).__name__}: {raised.value}"
        for part in heading.split("..."):
            assert part.strip() in text
