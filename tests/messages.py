"""A pytest plugin: messages of refused inputs are compared, as a whole, with those recorded in messages.yaml.

A test reads

    with raises_message(ConfigError):
        parse_slice("v4-7")

and messages.yaml has the message under the id of the test, numbered in the order in which they are raised if the test
raises several. `pytest --update-messages PATHS` records what the tests that it runs raise; entries of tests that do
not run, or fail, stay as they are. Temporary folders are recorded as <tmp>, this repository as <root>. A message with
what the machine or another package decides (ports, seconds, texts of libraries) is checked by `match=` instead.
"""

import ast
import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("messages.yaml")
HEADER = "# Written by `pytest --update-messages`, which CONTRIBUTING.md describes; see tests/messages.py.\n"


class Messages:
    """The recorded messages of each test, and the messages that the tests of this run raise."""

    def __init__(self, recorded: dict[str, list[str]], is_update: bool = False) -> None:
        self.recorded, self.is_update = recorded, is_update
        self.raised: dict[str, list[str]] = {}

    def check(self, test: str, text: str) -> None:
        """Compare the next message that a test raises with the recorded one; an update only remembers it."""
        __tracebackhide__ = True
        assert text == text.strip() and len(text.splitlines()) == 1, f"a message is one line; this is {text!r}"
        raised = self.raised.setdefault(test, [])
        raised.append(text)
        recorded = self.recorded.get(test, [])[len(raised) - 1 : len(raised)]
        if self.is_update or recorded == [text]:
            return
        if recorded:
            difference = "\n".join(line.rstrip() for line in difflib.ndiff(recorded, [text]))
            pytest.fail(f"the message differs from the recorded one (-):\n{difference}\n{advise(test)}")
        pytest.fail(f"{FILE.name} lacks message {len(raised)} of this test:\n{text}\n{advise(test)}")

    def finish(self, test: str) -> None:
        """Compare the number of messages of a test that has passed with the recorded number, or record them."""
        __tracebackhide__ = True
        raised, recorded = self.raised.pop(test, []), self.recorded.get(test, [])
        if not self.is_update and len(raised) < len(recorded):
            missing = recorded[len(raised)]
            pytest.fail(
                f"message {len(raised) + 1} of this test is recorded, and not raised:\n{missing}\n{advise(test)}"
            )
        if self.is_update:
            self.recorded[test] = raised

    def obsolete(self, collected: Iterable[str]) -> list[str]:
        """List the tests with entries that do not exist, or not with these parameters if theirs are collected."""
        ids = set(collected)
        complete = {test.partition("[")[0] for test in ids}
        return [
            test
            for test in self.recorded
            if not exists(test) or (test.partition("[")[0] in complete and test not in ids)
        ]


def advise(test: str) -> str:
    """The command that records the messages of a test."""
    return f"if it is as it should be, record it: pytest --update-messages {shlex.quote(test)}"


def exists(test: str) -> bool:
    """Whether the file of a test has its function."""
    path, _, name = test.partition("::")
    return name.partition("[")[0] in functions_of(ROOT / path)


@cache
def functions_of(path: Path) -> frozenset[str]:
    """The names of the functions of a file; none if there is no such file."""
    if not path.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def mask_folders(text: str, base: Path) -> str:
    """Replace temporary folders of tests, which are in `base`, by <tmp>, and the path of the repository by <root>."""
    return re.sub(re.escape(str(base)) + r"/[\w-]+", "<tmp>", text).replace(str(ROOT), "<root>")


def parse_messages(text: str) -> dict[str, list[str]]:
    """Read the content of messages.yaml; the inverse of `render_messages`."""
    entries = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
    return {test: [entry] if isinstance(entry, str) else [*entry.values()] for test, entry in entries.items()}


def render_messages(recorded: dict[str, list[str]]) -> str:
    """Write the content of messages.yaml: tests in order, each message on a line of its own, as it is shown."""
    lines = []
    for test, texts in sorted(recorded.items()):
        if len(texts) == 1:
            lines += [f"{json.dumps(test)}: |-", f"  {texts[0]}"]
        elif texts:
            lines.append(f"{json.dumps(test)}:")
            for number, text in enumerate(texts, 1):
                lines += [f"  {number}: |-", f"    {text}"]
    return HEADER + "".join(f"{line}\n" for line in lines)


MESSAGES = pytest.StashKey[Messages]()
COLLECTED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-messages", action="store_true", help=f"record the messages of tests in {FILE.name}")


def pytest_configure(config: pytest.Config) -> None:
    is_update = config.getoption("update_messages")
    if is_update and config.getoption("numprocesses", None):
        raise pytest.UsageError("--update-messages: one process writes the file; leave out -n")
    config.stash[MESSAGES] = Messages(parse_messages(FILE.read_text(encoding="utf-8")), is_update)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remember all tests of the collected files, unless the command line selects parameters."""
    selects_parameters = any("[" in argument for argument in config.args)
    config.stash[COLLECTED] = [] if selects_parameters else [item.nodeid for item in items]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    result = yield  # raises what the test raises
    item.config.stash[MESSAGES].finish(item.nodeid)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    messages = session.config.stash[MESSAGES]
    if messages.is_update:
        for test in messages.obsolete(session.config.stash.get(COLLECTED, [])):
            del messages.recorded[test]
        FILE.write_text(render_messages(messages.recorded), encoding="utf-8")


class RaisedMessage:
    """A `with` block that must raise; a class, because a failure in it is shown at the line of the test."""

    def __init__(self, expected: type[Exception], check: Callable[[str], None]) -> None:
        self._raises, self._check = pytest.raises(expected), check

    def __enter__(self) -> pytest.ExceptionInfo:
        self._error = self._raises.__enter__()
        return self._error

    def __exit__(self, *error) -> bool:
        __tracebackhide__ = True
        is_expected = self._raises.__exit__(*error)
        if is_expected:
            self._check(str(self._error.value))
        return is_expected


@pytest.fixture
def raises_message(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[type[Exception]], RaisedMessage]:
    """`pytest.raises`, with the whole text of the message as messages.yaml has it for this test."""
    messages, test = request.config.stash[MESSAGES], request.node.nodeid
    messages.raised[test] = []

    def check(text: str) -> None:
        __tracebackhide__ = True
        messages.check(test, mask_folders(text, tmp_path_factory.getbasetemp()))

    return lambda expected: RaisedMessage(expected, check)
