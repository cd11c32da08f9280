"""The recorded messages belong to tests, and are compared as a whole (tests/messages.py)."""

from pathlib import Path
from types import SimpleNamespace

import messages
import pytest
from messages import Messages

OWN_FILE = "tests/documentation/test_messages.py"
TEST = f"{OWN_FILE}::test_a_recorded_message[a b]"
TEXT = "c.yaml: key 'modle': did you mean 'model'? # x"


def test_each_entry_belongs_to_a_test(request):
    """Tests that are collected have their entries compared with their parameters, the others with their functions."""
    collected = request.config.stash[messages.COLLECTED]
    left_over = request.config.stash[messages.MESSAGES].obsolete(collected)
    files = {path for path in (test.partition("::")[0] for test in left_over) if (messages.ROOT / path).is_file()}
    assert not left_over, f"remove them: pytest --update-messages {' '.join(sorted(files | {OWN_FILE}))}"


def test_the_file_is_as_it_is_written():
    text = messages.FILE.read_text(encoding="utf-8")
    assert messages.render_messages(messages.parse_messages(text)) == text


def test_messages_are_read_as_they_were_raised():
    recorded = {"b.py::test_b": [TEXT], TEST: ["- one", "'two'", "3"]}
    assert messages.parse_messages(messages.render_messages(recorded)) == recorded


def test_a_recorded_message():
    """A message differs in a word, or is raised less often or more often than recorded, or has two lines."""
    raised = Messages({TEST: [TEXT, TEXT]})
    raised.check(TEST, TEXT)
    with pytest.raises(pytest.fail.Exception, match=r"message 2 of this test is recorded, and not raised"):
        raised.finish(TEST)
    raised.check(TEST, TEXT)
    raised.check(TEST, TEXT)
    with pytest.raises(pytest.fail.Exception, match=r"lacks message 3 of this test:\nc\.yaml.*\n.* --update-message"):
        raised.check(TEST, TEXT)
    with pytest.raises(pytest.fail.Exception, match=r"differs from .*:\n- c\.yaml.*\n\?.*\n\+ c\.yml"):
        Messages({TEST: [TEXT]}).check(TEST, TEXT.replace("yaml", "yml"))
    with pytest.raises(AssertionError, match="a message is one line"):
        raised.check(TEST, "one\ntwo")


def test_an_update_records_tests_that_ran():
    recorded = {TEST: ["old", "older"], "a.py::test_a": ["kept"], "a.py::test_b": ["no longer raised"]}
    raised = Messages(recorded, is_update=True)
    raised.check(TEST, TEXT)
    raised.finish(TEST)
    raised.finish("a.py::test_b")
    written = messages.render_messages(raised.recorded)
    assert messages.parse_messages(written) == {"a.py::test_a": ["kept"], TEST: [TEXT]}


def test_several_processes_do_not_write_the_file():
    options = {"update_messages": True, "numprocesses": 2}
    with pytest.raises(pytest.UsageError, match="leave out -n"):
        messages.pytest_configure(SimpleNamespace(getoption=lambda name, default=None: options[name]))


def test_entries_without_a_test():
    """A removed file, a removed function, and removed parameters of a function whose others are collected."""
    no_file, no_function, other = "tests/none.py::test_a", f"{OWN_FILE}::test_none", TEST.replace("[a b]", "[c]")
    recorded = Messages({test: [TEXT] for test in (no_file, no_function, TEST, other)})
    assert recorded.obsolete([]) == [no_file, no_function]
    assert recorded.obsolete([other]) == [no_file, no_function, TEST]


def test_folders_are_masked():
    base = Path("/tmp/pytest-of-me/pytest-3/popen-gw0")
    text = f"'{base}/test_x0/a.yaml': {messages.ROOT}/tests is no file; did you mean '{base}/test_x0'?"
    assert messages.mask_folders(text, base) == "'<tmp>/a.yaml': <root>/tests is no file; did you mean '<tmp>'?"
