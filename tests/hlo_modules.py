"""Compiled modules of tests/unit/hlo, as text and parsed."""

from pathlib import Path

from shardplan.verify.hlo.module import Module
from shardplan.verify.hlo.parser import parse

FIXTURES = Path(__file__).parent / "unit" / "hlo"


def read_text(name: str) -> str:
    """The text of a compiled module, or a report of it, that scripts/make_hlo_fixtures.py has written."""
    return (FIXTURES / f"{name}.txt").read_text(encoding="utf-8")


def read_module(name: str) -> Module:
    """The parsed module of that text."""
    return parse(read_text(name))
