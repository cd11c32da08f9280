"""What benchmarks have in common: their arguments, and the page that they write."""

import argparse
from pathlib import Path


def page_parser(description: str | None, *, compiles: bool = False) -> argparse.ArgumentParser:
    """A parser of `--output`, and of `--jobs` for a benchmark that compiles; its help is the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: stdout")
    if compiles:
        parser.add_argument("--jobs", type=int, help="compiles at a time")
    return parser


def write_page(text: str, output: Path | None) -> None:
    """Write the page to the file `output`, or print it if there is none."""
    if output is None:
        print(text)
    else:
        output.write_text(text, encoding="utf-8")
