"""README and the pages in docs: links resolve, commands parse, snippets compile, and lists are those of the code.

Commands are not run here: what they do is tested command by command.
"""

import ast
import doctest
import re
import shlex
import textwrap
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import shardplan
import shardplan.attention
from shardplan import __version__
from shardplan.__main__ import COMMANDS
from shardplan.catalogue.names import find_model
from shardplan.config import command_flags, parse_config
from shardplan.config.help import LOGGING_FLAGS
from shardplan.config.keys import keys_of
from shardplan.config.levanter_keys import is_levanters
from shardplan.errors import ShardplanError
from shardplan.model.bundled_configs import BUNDLED
from shardplan.model.huggingface.model_types import SUPPORTED_TYPES
from shardplan.runtime.exit_codes import INTERRUPTED
from shardplan.verify.compiler.libtpu import INSTALL_LIBTPU

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*((?:python3?|shardplan|pytest|pip) .+)")
FILE = re.compile(r"[\w./-]+\.(?:yaml|jsonl?|txt|py)")
NOT_IN_THE_CLONE = ("build/", "results/", "wheels/", "layouts/")
"""Folders that the demo and other commands of the documentation write, and those of a reader."""
FILES_OF_THE_USER = {"texts.jsonl", "job.py", "launch.yaml", "lucid.json"}
OUTPUT_FLAGS = {"--json", "--to", "--output"}


def blocks(page, language):
    return [textwrap.dedent(text) for _, found, text in FENCE.findall(PAGES[page]) if found == language]


(LAUNCH_FILE,) = blocks("docs/howto/launching.md", "yaml")
"""What a reader writes into launch.yaml."""


def prose(page):
    return FENCE.sub("", PAGES[page])


def code_in_prose(page):
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(page))]


def commands(page):
    """The words of every command on a page, without variables, comments, pipes and the file that gets its output."""
    shown = [line for text in blocks(page, "") for line in text.splitlines()]
    steps = [line for text in blocks(page, "yaml") for line in re.findall(r"^ *- run: (.+)$", text, re.MULTILINE)]
    for line in [*shown, *steps, *code_in_prose(page)]:
        match = COMMAND.fullmatch(line)
        if match and "..." not in line and line not in map("shardplan {}".format, COMMANDS):
            for part in re.split(r" (?:\||&&) ", match[1].partition("  #")[0]):
                yield shlex.split(re.sub(r" > \S+$", "", part.rstrip()))


def shardplan_arguments(words):
    """The arguments of `shardplan`, the command first; None for another program."""
    if words[0] == "shardplan":
        return words[1:]
    is_module = words[0].startswith("python") and words[1] == "-m" and words[2].startswith("shardplan.")
    return [words[2].removeprefix("shardplan."), *words[3:]] if is_module else None


EVERY = [(page, words) for page in PAGES for words in commands(page)]
OF_SHARDPLAN = [(page, arguments) for page, words in EVERY if (arguments := shardplan_arguments(words)) is not None]
PARSED = [(page, arguments) for page, arguments in OF_SHARDPLAN if not page.startswith("docs/tutorial/")]
"""Without those of the tutorial, which `tests/documentation/test_tutorial.py` runs on the files that it makes."""


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page):
    for target in LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(str(file.resolve().relative_to(ROOT))), target


def test_the_front_pages_link_every_page():
    """README links the pages beside it, and that of docs all others."""
    beside = {page for page in PAGES if "/" not in page} - {"README.md"}
    assert {*beside, "docs/index.md"} <= set(LINK.findall(prose("README.md")))
    linked = {f"docs/{path}" for path in LINK.findall(prose("docs/index.md"))}
    assert {page for page in PAGES if page.startswith("docs/")} - {"docs/index.md"} <= linked


def test_the_site_lists_every_page():
    listed = {
        f"docs/{name}.md" for text in blocks("docs/index.md", "{toctree}") for name in text.split("\n\n")[1].split()
    }
    assert {page for page in PAGES if page.startswith("docs/")} - {"docs/index.md"} == listed


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "pycon")])
def test_what_python_prints(page):
    examples = doctest.DocTestParser().get_doctest("".join(blocks(page, "pycon")), {}, page, page, 0)
    assert examples.examples and doctest.DocTestRunner().run(examples).failed == 0


def test_every_public_name_is_in_the_reference():
    for module in (shardplan, shardplan.attention):
        for name in module.__all__:
            assert re.search(rf"^\.\. auto\w+:: {name}$", PAGES["docs/reference/python.md"], re.MULTILINE), name


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository, with the file that a reader writes."""
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "launch.yaml").write_text(LAUNCH_FILE)
    return folder


@pytest.mark.parametrize(("page", "arguments"), PARSED, ids=lambda value: value if isinstance(value, str) else "")
def test_commands_parse(page, arguments, clone, monkeypatch):
    monkeypatch.chdir(clone)
    if arguments in (["--version"], ["--help"]):
        return
    count = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    command, rest = " ".join(arguments[:count]), arguments[count:]
    assert command in COMMANDS
    if command in command_flags.COMMANDS:
        try:
            parse_config(rest, command_flags.COMMANDS[command])
        except ShardplanError as error:
            pytest.fail(f"{page}: shardplan {' '.join(arguments)}: {error}")
    elif command == "lm_eval":  # lm_eval's own arguments
        arguments = dict(zip(rest[::2], rest[1::2], strict=True))
        assert arguments["--model"] == "shardplan" and all(name.startswith("--") for name in arguments)
        config, *overrides = [item.split("=") for item in arguments["--model_args"].split(",")]
        keys = {*keys_of(command_flags.LoadingConfig), "max_length"}
        assert config[0] == "config" and Path(config[1]).is_file() and {name for name, _ in overrides} <= keys
    elif command == "models":
        for name in rest:
            find_model(name)
    else:
        assert (command == "plan diff" and len(rest) == 2) or (command == "eval compare" and len(rest) >= 2)


def test_every_command_is_documented():
    documented = {" ".join(arguments[:count]) for _, arguments in OF_SHARDPLAN for count in (1, 2)}
    assert COMMANDS.keys() <= documented


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page):
    """Flags named in sentences, as in `--workload.kind prefill`."""
    known = {name for cls in command_flags.COMMANDS.values() for name in keys_of(cls)}
    known |= {*LOGGING_FLAGS, "config", "model", "help", "version"}
    for code in code_in_prose(page):
        if code.startswith("--"):
            flags = [word[2:].partition("=")[0] for word in code.split() if word.startswith("--")]
            assert {flag for flag in flags if not is_levanters(flag)} <= known, code


def test_files_in_commands_exist():
    written = {words[i + 1] for _, words in EVERY for i, word in enumerate(words[:-1]) if word in OUTPUT_FLAGS}
    for page, words in EVERY:
        for word in words:
            path, _, test = word.partition("::")
            if not FILE.fullmatch(path) or path.startswith(NOT_IN_THE_CLONE) or path in written | FILES_OF_THE_USER:
                continue
            assert (ROOT / path).is_file(), f"{page}: {path}"
            assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{page}: {word}"


@pytest.mark.parametrize("page", PAGES)
def test_paths_in_sentences_exist(page):
    for code in code_in_prose(page):
        if re.fullmatch(r"(shardplan|scripts|tests|configs|docs|notebooks)/[\w./-]*", code) and "NAME" not in code:
            assert (ROOT / code).exists(), code


IMPLEMENTED = re.compile(r"-> implemented in\s((?:`[\w/]+\.py`\s\((?:`\w+`(?:,\s)?)+\)(?:,\s)?)+)")
"""Behind a formula of the design: modules, each with the names that implement the formula there."""


def test_formulas_of_the_design_are_implemented_where_it_says():
    text = " ".join(prose("docs/explanation/design.md").split())
    implementations = IMPLEMENTED.findall(text)
    assert len(implementations) == text.count("-> implemented in") > 20
    for path, names in re.findall(r"`([\w/]+\.py)`\s\(([^)]+)\)", "".join(implementations)):
        source = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(def |class )?{name}\b", source, re.MULTILINE), f"{path}: {name}"


def test_modules_of_the_design_exist():
    """Also those that it names without their folder."""
    files = {path.name for folder in ("shardplan", "scripts") for path in (ROOT / folder).rglob("*.*")}
    named = code_in_prose("docs/explanation/design.md")
    bare = [code for code in named if re.fullmatch(r"[a-z_]+\.(py|html|json)", code)]
    assert bare and files.issuperset(bare)


def test_names_in_the_contributing_guide_are_where_it_says():
    for item in prose("CONTRIBUTING.md").split("\n- ")[1:]:
        sources = [(ROOT / path).read_text(encoding="utf-8") for path in re.findall(r"[\w/]+/[a-z_]+\.py", item)]
        for name in re.findall(r"`([A-Z]\w+)`", item):
            assert any(re.search(rf"^(class )?{name}\b", source, re.MULTILINE) for source in sources), name


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_snippets(page):
    """Snippets compile, and what they import is there."""
    for source in blocks(page, "python"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                module = import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    import_module(alias.name)


def rows_of_folders():
    """The cells of both tables of docs/folders.md: those of the package, and those beside it."""
    tables = [part for part in PAGES["docs/folders.md"].split("\n\n") if part.startswith("|")]
    return [[[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]] for table in tables]


def test_folders_are_listed_in_the_order_of_imports_with_their_docstrings():
    package, expected = ROOT / "shardplan", []
    for name in reversed(PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]):
        files = sorted((package / name).rglob("__init__.py"))
        if files:
            docstring = ast.get_docstring(ast.parse((package / name / "__init__.py").read_text(encoding="utf-8")))
            inner = [
                path.parent.relative_to(package / name).as_posix() for path in files if path.parent != package / name
            ]
            sentence = " ".join((docstring or "").partition("\n\n")[0].split())
            expected.append([f"`{name}`", sentence, ", ".join(inner)])
    assert rows_of_folders()[0] == expected
    assert {path.parent.name for path in package.glob("*/__init__.py")} == {row[0].strip("`") for row in expected}


def test_folders_beside_the_package_are_listed():
    listed = {row[0].strip("`") for row in rows_of_folders()[1]}
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8")
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert listed == {
        name for name in folders if f"{name}/" not in ignored and not name.endswith(".egg-info") and name != "shardplan"
    }


def test_exit_codes_are_those_of_the_errors():
    codes = re.findall(r"^\| (\d+) \|", PAGES["docs/reference/exit-codes.md"], re.MULTILINE)
    assert list(map(int, codes)) == [
        0,
        1,
        *sorted(cls.exit_code for cls in ShardplanError.__subclasses__()),
        INTERRUPTED,
    ]


def test_model_types_are_those_of_the_registry():
    listed = re.search(r"Model types: ([^.]+)\.", PAGES["docs/reference/commands.md"])
    assert listed and re.split(r",\s", listed[1]) == sorted(SUPPORTED_TYPES)


def test_the_table_of_models_has_every_type():
    table = PAGES["README.md"].partition("| models | `model_type` | parameters |\n")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[1:] for name in row.split("|")[2].strip().split(", ")]
    assert sorted(listed) == sorted(SUPPORTED_TYPES)


def test_advice_to_install_works():
    """shardplan is on no package index: what is advised names a clone, a wheel built from it, or libtpu itself."""
    requirements = map(Requirement, PROJECT["project"]["optional-dependencies"]["verify"])
    (libtpu,) = requirements
    assert f"pip install '{libtpu.name}{libtpu.specifier}'" == INSTALL_LIBTPU
    assert f"build/shardplan-{__version__}-py3-none-any.whl" in PAGES["docs/install.md"]
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "shardplan" / "verify").rglob("*.py")]
    for text in (*PAGES.values(), *sources):
        assert "pip install 'shardplan[" not in text


def test_the_licence_is_declared_and_there():
    assert PROJECT["project"]["license"] == "Apache-2.0"
    (name,) = PROJECT["project"]["license-files"]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_the_bundled_models_are_listed():
    (names,) = re.findall(r"is\spart\sof\sthe\spackage:\s([^:]+?)\.\n", PAGES["docs/reference/commands.md"])
    assert {name.strip() for name in names.split(",")} == BUNDLED.keys()
