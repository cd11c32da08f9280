"""python scripts/measure_code.py [REVISION]

Prints how readable the package is, per folder and in total: comments, comprehensions and examples. With a revision of
git, the same of that revision, so that a change is measured by two calls.

Lines of code are those with code on them: no blank lines, comments or docstrings. A comprehension is dense if it has
more than one `for` or `if`, or takes more than three lines. A public function is one of a module (no method) without
an underscore; it has an example if its docstring has a `>>>` (tests/documentation/test_docstring_examples.py).
Then the lines of some parts and of their tests (docs/explanation/parts.md); of templates those that are not blank.
"""

import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITH_EXAMPLES = ("plan", "search", "checkpoint", "attention", "experts", "steps", "decoder", "verify", "eval")
"""Folders whose public functions have examples."""
LONG_FILE = 400
FULL_FOLDER = 12
CODE = ("shardplan", "tests")
TEMPLATES = (".html", ".jinja", ".css", ".js")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
PARTS = {
    "flags and YAML": ("config/**", "unit/test_config.py unit/test_arguments.py cli/test_command_errors.py"),
    "supervision of processes": (
        "runtime/processes/** runtime/signals/**",
        "hub_runs.py unit/test_activity.py unit/test_frozen.py unit/test_hosts.py unit/test_hub*.py "
        "unit/test_process_*.py unit/test_stacks.py multiprocess/test_faults.py multiprocess/test_many_processes.py",
    ),
    "records of runs": ("monitoring/**", "unit/test_monitoring.py cli/test_monitoring_of_runs.py"),
    "launchers": ("launch/** commands/launch/**", "cli/test_launch_command.py cli/launchers/* */test_launchers.py"),
    "doctor": ("doctor/** report/doctor.py commands/doctor.py", "doctor_checks.py unit/test_doctor*.py"),
    "lint": (
        "lint/** report/plan/lint.py report/page/panels/repair.py",
        "lint_trainers.py unit/test_lint*.py unit/test_levanter_parser.py unit/test_repair.py",
    ),
    "of it, the smallest edit": ("lint/smallest_edit.py lint/edits.py", "unit/test_repair.py unit/test_lint_edits.py"),
    "Levanter's files": (
        "levanter_config/**",
        "levanter_sections.py unit/test_levanter_config.py unit/test_model_section.py "
        "unit/test_trainer_*.py unit/test_training_files.py",
    ),
    "extraction": ("eval/extraction/**", "unit/test_extraction.py multiprocess/test_extraction_runs.py"),
    "pictures of extraction": (
        "eval/extraction/pictures.py report/extraction/** report/templates/extraction_*",
        "unit/test_extraction_pictures.py",
    ),
    "report": ("report/page/** report/templates/plan*", "report_plans.py unit/test_page*.py browser/*"),
    "catalogue": ("catalogue/** report/catalogue.py commands/models.py", "cli/test_models_command.py"),
}  # fmt: skip
"""Part -> patterns of its files in the package, and of those of its tests."""
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


@dataclass
class Measures:
    """What is counted in one module, or in all of a folder."""

    lines: int = 0
    comments: int = 0
    comprehensions: int = 0
    dense: int = 0
    functions: int = 0
    examples: int = 0

    def add(self, other: "Measures") -> None:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


def main() -> None:
    if len(sys.argv) > 1:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", sys.argv[1]], cwd=ROOT, check=True, capture_output=True).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(folder, filter="data")
            print_measures(Path(folder))
    else:
        print_measures(ROOT)


def print_measures(root: Path) -> None:
    """Print the table of a checkout's folders, and what is too long in it."""
    modules = sorted((root / "shardplan").rglob("*.py"))
    folders: dict[str, Measures] = {}
    for path in modules:
        folder = path.relative_to(root / "shardplan").parts[0]
        folders.setdefault(folder, Measures()).add(measure(path.read_text(encoding="utf-8")))
    total = Measures()
    print(f"{'folder':20} {'lines':>6} {'comments':>9} {'comprehensions':>15} {'dense':>6} {'examples':>14}")
    print(f"{'':20} {'':6} {'per 100':>9} {'per 100':>15} {'':6} {'of functions':>14}")
    for folder, measures in folders.items():
        total.add(measures)
        print_row(folder, measures)
    print_row("total", total)
    examples = sum(folders[folder].examples for folder in WITH_EXAMPLES)
    functions = sum(folders[folder].functions for folder in WITH_EXAMPLES)
    print(f"\nexamples of public functions in {', '.join(WITH_EXAMPLES)}: {examples} of {functions}")
    print_list(f"modules over {LONG_FILE} lines", long_files(modules))
    sizes = Counter(path.parent for path in modules if path.name != "__init__.py")
    full = {str(folder.relative_to(root)): size for folder, size in sizes.items() if size > FULL_FOLDER}
    print_list(f"folders of more than {FULL_FOLDER} modules", full)
    print_list(f"test files over {LONG_FILE} lines", long_files((root / "tests").rglob("*.py")))
    print(f"\n{'part':26} {'lines':>6} {'of tests':>9}")
    for part, patterns in PARTS.items():
        own, tests = (lines_of(root / each, *files.split()) for each, files in zip(CODE, patterns, strict=True))
        print(f"{part:26} {own:6} {tests:9}")
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    print(f"words of docs: {sum(len(page.read_text(encoding='utf-8').split()) for page in pages)}")


def measure(source: str) -> Measures:
    """Count in the source of one module.

    >>> vars(measure("a = [x for x in y if x]  # no zeros"))
    {'lines': 1, 'comments': 1, 'comprehensions': 1, 'dense': 1, 'functions': 0, 'examples': 0}
    """
    tree, measures, code = ast.parse(source), Measures(), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        measures.comments += token.type == tokenize.COMMENT
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            measures.comprehensions += 1
            measures.dense += is_dense(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # docstrings, those of names too
            code.difference_update(range(node.lineno, node.end_lineno + 1))
    measures.lines = len(code)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            measures.functions += 1
            measures.examples += ">>> " in (ast.get_docstring(node) or "")
    return measures


def lines_of(root: Path, *patterns: str) -> int:
    """Count the lines of the files that match patterns: of code, or of templates without blank ones."""
    files = {path for pattern in patterns for path in root.glob(f"{pattern}/*" if pattern.endswith("**") else pattern)}
    total = 0
    for path in files:
        if path.suffix == ".py":
            total += measure(path.read_text(encoding="utf-8")).lines
        elif path.suffix in TEMPLATES:
            total += sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())
    return total


def is_dense(node: ast.AST) -> bool:
    clauses = sum(1 + len(clause.ifs) for clause in node.generators)
    return clauses > 1 or node.end_lineno - node.lineno >= 3


def print_row(name: str, measures: Measures) -> None:
    per_100 = 100 / max(1, measures.lines)
    comments, comprehensions, dense = (
        f"{count * per_100:.1f}" for count in (measures.comments, measures.comprehensions, measures.dense)
    )
    examples = f"{measures.examples} of {measures.functions}"
    print(f"{name:20} {measures.lines:6} {comments:>9} {comprehensions:>15} {dense:>6} {examples:>14}")


def long_files(paths: Iterable[Path]) -> dict[str, int]:
    lengths = {f"{path.parent.name}/{path.name}": len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    return {name: length for name, length in lengths.items() if length > LONG_FILE}


def print_list(title: str, sizes: dict[str, int]) -> None:
    print(f"{title}: {len(sizes)}", *(f"  {name} {size}" for name, size in sizes.items()), sep="\n")


if __name__ == "__main__":
    main()
