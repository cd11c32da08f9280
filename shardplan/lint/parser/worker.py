"""Parses configurations with Levanter's own classes: reads requests from stdin, and answers each with one line.

A request is a line of JSON: the text of a YAML file, the keys under which Levanter's configuration lies in it, and the
program with its configuration class. The parser (draccus) stops at its first error, so the key that it names is taken
out and the rest is parsed again, until nothing is left to complain about.
"""

import copy
import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from shardplan.lint.parser.import_levanter import import_levanter
from shardplan.lint.parser.problem import ParserVerdict, Problem, ProblemKind
from shardplan.runtime.processes.watch.parent import end_with_parent

MAX_PROBLEMS = 50
"""Maximum number of problems of a file; parsing ends after so many."""
MAX_TEXT = 300
"""Maximum characters of the parser's message that are kept."""
FIELDS = re.compile(r"`([^`]*)`")
"""Pattern for a name in the parser's list of fields."""
CLASS_NAME = re.compile(r"<class '([\w.]+)\.(\w+)'>")
"""Pattern for a class in the parser's message."""
CHOICE = re.compile(r"Couldn't find a choice class for '(.*?)' in ")
"""Pattern for a `type` that is not registered."""
UNION = "Could not decode the value into any of the given types"
"""Pattern for the message of a parser that tried several types, and lists the error of each."""
MEMBER = re.compile(r"^    (\S[^:]*): (.*)$", re.MULTILINE)
"""Pattern for one tried type and its error, in a message that begins with `UNION`."""
NESTED = re.compile(r"`([^`]+)`: (.*)$", re.DOTALL)
"""Pattern for an error within a value, with the keys down to it."""
UNDERLYING = re.compile(r'Underlying error is "(\w+): (.*)"$', re.DOTALL)
"""Pattern for the error within a value that the parser wraps."""


def main() -> None:
    """Answer every request until stdin ends; what Levanter prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    end_with_parent()
    import_levanter()
    for line in sys.stdin:
        request = json.loads(line)
        verdict = parse(request["text"], request["inside"], request["module"], request["config_class"])
        print(json.dumps(verdict.to_json()), file=answers, flush=True)


def parse(text: str, inside: Sequence[str], module: str, config_class: str) -> ParserVerdict:
    """Parse the text of a YAML file into the configuration class of one of Levanter's programs.

    Args:
        inside: keys of the section that holds Levanter's configuration, from the top of the file down.
    """
    from draccus.cfgparsing import load_config

    try:
        target = getattr(importlib.import_module(module), config_class)
    except ModuleNotFoundError as error:
        if error.name != module:
            return ParserVerdict((Problem(ProblemKind.NOT_INSTALLED, (), f"{module}: {error}"),))
        return ParserVerdict((), is_program_installed=False)
    values = load_config(text) or {}
    for key in inside:
        values = values[key]
    return ParserVerdict(tuple(find_problems(values, target)))


def find_problems(values: Any, target: type) -> Iterator[Problem]:
    """Yield every problem of sections that are parsed into the configuration class `target`."""
    values = copy.deepcopy(values)
    for _ in range(MAX_PROBLEMS):
        error = _error(values, target)
        if error is None:
            return
        found = list(_describe(error, values, target))
        yield from found
        removed = [_remove(values, problem.path) for problem in found]
        if not any(removed):
            return


def _error(values: Any, target: type) -> Exception | None:
    """Return the error that parsing `values` raises; None without one."""
    import draccus

    try:
        draccus.decode(target, copy.deepcopy(values))
    except Exception as error:  # classes of the configuration raise anything
        return error
    return None


def _describe(error: Exception, values: Any, target: type) -> Iterator[Problem]:
    """Yield the problems in one error of the parser, which may name several unknown keys."""
    path, text = tuple(getattr(error, "key_path", ())), str(getattr(error, "message", error))
    if text.startswith(UNION):
        path, text = _member_of_union(path, text, _get(values, path))
    culprit = next((each for each in _causes(error) if isinstance(each, ImportError)), None)
    if culprit is not None:
        yield Problem(ProblemKind.NOT_INSTALLED, path or _locate(error, values, target), _words(str(culprit)))
        return
    if text.startswith("The fields "):
        names = FIELDS.findall(text.rpartition(" are not valid for ")[0])
        for name in names:
            yield Problem(ProblemKind.UNKNOWN_KEY, (*path, name), _words(text), _keys_beside(path, values, target))
        return
    if text.startswith("Missing required field"):
        for name in FIELDS.findall(text.rpartition(" for ")[0]):
            yield Problem(ProblemKind.MISSING_KEY, (*path, name), _words(text))
        return
    path = path or _locate(error, values, target)
    if text.startswith("Expected a dict with a 'type' key"):
        yield Problem(ProblemKind.MISSING_KEY, (*path, "type"), "a section of this kind needs a type", _choices(text))
        return
    choice = CHOICE.search(text)
    if choice:
        yield Problem(ProblemKind.UNKNOWN_TYPE, path, f"there is no type '{choice[1]}'", _choices(text))
        return
    yield Problem(ProblemKind.VALUE, path, _words(_value_text(error, text)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of its cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def _member_of_union(path: tuple[str, ...], text: str, value: Any) -> tuple[tuple[str, ...], str]:
    """Return the path and the message of the error that fits `value`, among the errors of several tried types.

    The parser lists every type with its error. For a section or a list, the error that names keys is the one that fits.
    """
    tried = MEMBER.findall(text)
    if not isinstance(value, dict | list) or not tried:
        return path, "; or ".join(reason for _, reason in tried) or text
    of_lists = [reason for name, reason in tried if name.lower().startswith(("list", "tuple", "sequence"))]
    of_sections = [reason for name, reason in tried if reason not in of_lists]
    reasons = (of_lists if isinstance(value, list) else of_sections) or [reason for _, reason in tried]
    reason = next((each for each in reasons if "fields `" in each or each.startswith("`")), reasons[0])
    nested = NESTED.match(reason)
    return ((*path, *nested[1].split(".")), nested[2]) if nested else (path, reason)


def _value_text(error: Exception, text: str) -> str:
    """Return the reason why a value is wrong, without the parser's call chain."""
    underlying = UNDERLYING.search(text)
    if underlying:
        name, message = underlying.groups()
        is_no_section = name == "AttributeError" and "has no attribute" in message
        return "it must be a section with keys" if is_no_section else message
    if text.startswith("Expected a dict for a choice class"):
        return "it must be a section with keys"
    if text.startswith("Couldn't instantiate class") and error.__cause__ is not None:
        return str(error.__cause__)
    return text


def _choices(text: str) -> tuple[str, ...]:
    """Return the registered types of the class that the parser's message names."""
    found = CLASS_NAME.search(text)
    if found is None:
        return ()
    registry = getattr(importlib.import_module(found[1]), found[2])
    return tuple(sorted(registry.get_known_choices()))


def _keys_beside(path: tuple[str, ...], values: Any, target: type) -> tuple[str, ...]:
    """Return the keys that Levanter's section at `path` has for its `type`."""
    import draccus

    try:
        parsed: Any = draccus.decode(target, _types_along(path, values)) if path else target
        for key in path:
            parsed = _child(parsed, key)
    except Exception:  # the section needs one of its keys: then there is no list
        return ()
    return tuple(sorted(field.name for field in dataclasses.fields(parsed))) if dataclasses.is_dataclass(parsed) else ()


def _types_along(path: tuple[str, ...], values: Any) -> Any:
    """Return the sections on the way to `path`, with only the key `type` of each."""
    if isinstance(values, list):
        return [_types_along(path[1:], values[int(path[0])])]
    types = {"type": values["type"]} if "type" in values else {}
    return {**types, path[0]: _types_along(path[1:], values[_key(values, path[0])])} if path else types


def _child(parsed: Any, key: str) -> Any:
    if isinstance(parsed, list | tuple):
        return parsed[0]  # the others were left out
    return parsed[key] if isinstance(parsed, dict) else getattr(parsed, key)


def _locate(error: Exception, values: Any, target: type) -> tuple[str, ...]:
    """Return the most deeply nested key without which the error disappears."""
    path: tuple[str, ...] = ()
    while isinstance(section := _get(values, path), dict | list) and section:
        names = section if isinstance(section, dict) else range(len(section))
        for name in names:
            rest = copy.deepcopy(values)
            _remove(rest, (*path, str(name)))
            other = _error(rest, target)
            if other is None or _gist(other) != _gist(error):
                path = (*path, str(name))
                break
        else:
            break
    return path


def _gist(error: Exception) -> str:
    """Return the message of an error without the value that it repeats."""
    return str(error).partition(", got ")[0]


def _get(values: Any, path: Sequence[str]) -> Any:
    for key in path:
        values = values[_key(values, key)]
    return values


def _key(section: Any, name: str) -> Any:
    """Return the key of `section` that the parser writes as `name`; the parser writes numbers as text."""
    if isinstance(section, list):
        return int(name)
    return next((key for key in section if str(key) == name), name)


def _remove(values: Any, path: Sequence[str]) -> bool:
    """Remove the key at `path`, or its nearest existing ancestor; return whether there was one."""
    path = list(path)
    while path:
        try:
            section = _get(values, path[:-1])
            del section[_key(section, path[-1])]
        except (KeyError, IndexError, TypeError, ValueError):
            path.pop()
            continue
        return True
    return False


def _words(text: str) -> str:
    return " ".join(text.split())[:MAX_TEXT]
