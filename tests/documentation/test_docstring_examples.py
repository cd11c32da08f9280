"""Examples in docstrings print what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW = {
    "shardplan.attention.axes",
    "shardplan.attention.block_sparse",
    "shardplan.attention.dot_product",
    "shardplan.attention.sequence",
    "shardplan.decoder.parts.attention.sparse.branches.selection",
    "shardplan.decoder.parts.attention.sparse.gates",
    "shardplan.decoder.parts.attention.sparse.native_sparse_attention",
    "shardplan.experts.block",
    "shardplan.experts.expert_weights",
    "shardplan.experts.grouped_matmul",
    "shardplan.experts.levanter",
    "shardplan.experts.local_rounds",
    "shardplan.experts.sorting",
    "shardplan.experts.statistics.recording",
    "shardplan.experts.strategies.exchange_tokens",
    "shardplan.explain.rank_slices",
    "shardplan.model.attention.chunked_mask",
    "shardplan.search.make_plan",
    "shardplan.steps.forward",
}
"""Modules whose examples build models or compile programs."""


def modules_with_examples():
    for folder, base in ((ROOT / "shardplan", ROOT), (ROOT / "scripts", ROOT / "scripts")):
        for path in sorted(folder.rglob("*.py")):
            if ">>> " in path.read_text(encoding="utf-8"):
                name = ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
                yield pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())


@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_examples_print_what_they_say(name):
    module = import_module(name)
    results = doctest.testmod(module, globs={**vars(module)})
    assert results.attempted and not results.failed
