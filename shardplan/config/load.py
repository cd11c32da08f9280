"""Reads configurations from YAML files and command-line arguments."""

import dataclasses
import os
import re
from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from draccus.utils import deflatten

from shardplan.config.command_flags import COMMANDS
from shardplan.config.help import LOGGING_FLAGS, add_config, add_key, add_keys, make_parser
from shardplan.config.key_names import nearest_key, synonym_of
from shardplan.config.keys import Key, keys_of
from shardplan.config.levanter_keys import check_undecided, closest_value, split_arguments, split_sections
from shardplan.config.plan_config import PlanConfig
from shardplan.config.reading.python_values import plain_value
from shardplan.config.reading.variables import check_variables
from shardplan.config.reading.yaml_file import read_yaml
from shardplan.errors import ConfigError, check_argument, missing_path
from shardplan.plan.serialization import decode, flatten, value_kind

SHELL_SECTION = "launch."
"""Section whose texts are shell commands, in which the shell expands variables."""
YAML_FILES = "paths of YAML files, and keys by name, such as workload={'batch': 4}"
EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")
"""Pattern for numbers such as 1e3, which YAML 1.1 parses as text because they have no point."""


def load_config(*files: str, **sections: Any) -> PlanConfig:
    """Read a configuration from YAML files, where later files win, and from keys that override them.

    An example is `load_config("configs/8b.yaml", workload={"batch": 4}, pin=["mlp=model"])`. Keys that only a command
    has are checked and left out. `model="x"`, also in a file, means the same as `--model x` on the command line.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a value has the wrong type.
    """
    return load_command(PlanConfig, files, sections, "load_config")


def load_command[C: PlanConfig](cls: type[C], files: Sequence[str], sections: Mapping[str, Any], function: str) -> C:
    """Read the configuration `cls` of a command from files and keys, as `load_config` takes them.

    Args:
        function: name of the public function that received the arguments, for messages.
    """
    for file in files:
        check_argument(function, "its argument", file, (str, os.PathLike), YAML_FILES)
    files, keys = [os.fspath(file) for file in files], keys_of(cls)
    values, levanter = _read_files(files, cls)
    given = {name: plain_value(value) for name, value in flatten(sections).items()}
    overrides = {name: _interpret(keys.get(name), value) for name, value in _spell_out_model(given).items()}
    _check(overrides, keys, where="keyword arguments")
    return _build(cls, {**values, **overrides}, files, levanter)


def parse_config[C: PlanConfig](argv: Sequence[str], cls: type[C] = PlanConfig) -> C:  # type: ignore[assignment]
    """Parse the configuration `cls` of a command from command-line arguments.

    `--config FILE` may be given several times (later files win, key by key), as `--config x`, `--config=x` or
    `--config_path x`; every other `--a.b value` overrides one key, with `-` for `_` if preferred. `--model x` means
    `--model.config x` for a .json file or the name of a bundled model, and `--model.ref x` for a checkpoint. A file may
    also hold keys of other commands, which are checked and left out.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a key of another command among the arguments, or a
            value of the wrong type.
        SystemExit: after printing help.
    """
    command, keys = command_of(cls), keys_of(cls)
    parser = make_parser(command)
    add_keys(parser, cls, keys)
    known, rest = parser.parse_known_args([_normalize(token) for token in argv])
    levanter: dict[str, Any] = {}
    if cls.has_levanter_keys:
        levanter, rest = split_arguments(rest)
        check_undecided(levanter, "command line")
    if rest:
        _refuse(rest[0], keys, command)
    arguments = {name: value for name, value in vars(known).items() if value is not None and name not in LOGGING_FLAGS}
    files, model, ref = arguments.pop("config", []), arguments.pop("model", None), arguments.pop("ref", None)
    if model is not None:
        arguments[_model_key(model)] = model
    if ref is not None and arguments.setdefault("model.ref", ref) != ref:
        raise ConfigError(f"command line: it names two checkpoints, {ref} and {arguments['model.ref']}; leave one out")
    overrides = {name: _interpret(keys[name], _value(keys[name], text)) for name, text in arguments.items()}
    _check(overrides, keys, where="command line")
    values, of_files = _read_files(files, cls)
    return _build(cls, {**values, **overrides}, files, {**of_files, **levanter})


def other_arguments(argv: Sequence[str], cls: type[PlanConfig], own: Container[str]) -> list[str]:
    """Return the arguments of the command `cls` as written, without `--config` and without the keys `own`."""
    parser = make_parser(command_of(cls))
    add_config(parser)
    for name, key in keys_of(cls).items():
        if name in own:
            add_key(parser, name, key)
    return parser.parse_known_args([_normalize(token) for token in argv])[1]


def command_of(cls: type[PlanConfig]) -> str:
    """Return the name of the command that `cls` configures; empty if there is none."""
    return next((name for name, each in COMMANDS.items() if each is cls), "")


def _build[C: PlanConfig](
    cls: type[C], values: Mapping[str, Any], files: Sequence[str], levanter: Mapping[str, Any]
) -> C:
    """Make the configuration object from values by dotted name.

    Args:
        levanter: Levanter's keys, for a command that has them.
    """
    decoded = decode(cls, deflatten({**cls.own_defaults, **values}, sep="."))
    keys: dict[str, Any] = {"levanter": dict(levanter)} if cls.has_levanter_keys else {}
    return dataclasses.replace(decoded, given=frozenset(values), files=tuple(files), **keys)


def _read_files(files: Sequence[str], cls: type[PlanConfig]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read YAML files; return the values of `cls`'s keys, by dotted name, and the values of Levanter's keys."""
    keys = keys_of(cls)
    every = {name: key for each in COMMANDS.values() for name, key in keys_of(each).items()} | keys
    values: dict[str, Any] = {}
    levanter: dict[str, Any] = {}
    for path in map(os.path.expanduser, files):
        content, passed = _split(path, _load_yaml(path), cls.has_levanter_keys)
        check_undecided(passed, path)
        levanter.update(passed)
        read = {name: _interpret(every.get(name), value) for name, value in content.items()}
        _check(read, every, where=path)
        values.update({name: value for name, value in read.items() if name in keys})
    return values, levanter


def _model_key(model: str) -> str:
    """Return the key that the text `model` sets: model.ref for a folder, org/model or a URL, else model.config."""
    is_checkpoint = not model.endswith(".json") and ("/" in model or Path(model).is_dir())
    return "model.ref" if is_checkpoint else "model.config"


def _spell_out_model(values: dict[str, Any]) -> dict[str, Any]:
    """Replace `model: x` by `model.ref` or `model.config`, as for `--model x` on the command line."""
    model = values.get("model")
    if not isinstance(model, str) or not model:
        return values
    others = {name: value for name, value in values.items() if name != "model"}
    return {**others, _model_key(os.path.expanduser(model)): model}


def _normalize(token: str) -> str:
    """Replace hyphens by underscores in a flag; return any other token unchanged."""
    flag, separator, value = token.partition("=")
    return f"--{flag[2:].replace('-', '_')}{separator}{value}" if token.startswith("--") else token


def _refuse(token: str, keys: Mapping[str, Key], command: str) -> NoReturn:
    """Raise the error for an argument that is not a key of this command."""
    if not token.startswith("--"):
        raise ConfigError(f"unexpected argument {token!r}; options look like --workload.batch 16")
    name = token[2:].partition("=")[0]
    owners = [other for other, cls in COMMANDS.items() if name in keys_of(cls)]
    if owners:
        raise ConfigError(f"command line: {name} is a key of {', '.join(owners)}, not of {command}; leave it out")
    known = [*keys, "config", "model"]
    if nearest_key(name, known) is None:
        for other, cls in COMMANDS.items():
            meant = synonym_of(name, keys_of(cls))
            if meant is not None:
                raise ConfigError(f"command line: unknown key {name!r}; did you mean {meant!r}, a key of {other}?")
    raise ConfigError(f"command line: {_unknown_message(name, known)}")


def _unknown_message(name: str, keys: Collection[str]) -> str:
    """Explain why `name` is not a key: it is a section, or unknown; an unknown name gets the nearest key as a hint."""
    if any(key.startswith(f"{name}.") for key in keys):
        return f"{name} is a section, not a value; set a key in it"
    meant = nearest_key(name, keys)
    section, dot, rest = name.partition(".")
    levanters = None if any(key.startswith(f"{section}.") for key in keys) else closest_value(section)
    if meant is None and levanters is not None:
        meant = f"{levanters}{dot}{rest}"
    if meant is not None:
        return f"unknown key {name!r}; did you mean {meant!r}?"
    siblings = sorted(key for key in keys if key.startswith(f"{section}."))
    return f"unknown key {name!r}" + (f"; valid: {', '.join(siblings)}" if siblings else "; `--help` lists the keys")


def _value(key: Key, text: Any) -> Any:
    """Return the value that an argument gives `key`: the text itself if the key holds text, else as YAML parses it."""
    if not isinstance(text, str):
        return text
    if str in key.types:
        return None if type(None) in key.types and text == "null" else text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _interpret(key: Key | None, value: Any) -> Any:
    """Expand `~/x`, resolve `auto`, and turn 1e3, which YAML 1.1 parses as text, into a number."""
    match value:
        case str() if value.startswith("~/"):
            return os.path.expanduser(value)
        case "auto" if key is not None and key.auto is not None:
            return key.auto
        case str() if key is not None and float in key.types and EXPONENT.fullmatch(value):
            return float(value)
        case list():
            return [_interpret(None, each) for each in value]
        case str() if key is not None and tuple in key.types and str not in key.types:
            return [value]  # one text for a list of one
        case _:
            return value


def _load_yaml(path: str) -> dict[str, Any]:
    """Read the sections of a configuration's YAML file.

    Raises:
        ConfigError: the file does not exist, cannot be read, is not YAML, has a key twice, is not a mapping, or is a
            Levanter configuration.
    """
    if not path or not Path(path).exists():
        others = [str(file) for folder in {Path(path).parent, Path("configs")} for file in folder.glob("*.yaml")]
        raise ConfigError(f"config file {path} {missing_path(path, others)}")
    loaded = read_yaml(path)
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file {path} contains {value_kind(loaded)}, not keys with values")
    if "trainer" in loaded and not {"hardware", "workload"} & loaded.keys():
        raise ConfigError(
            f"config file {path} is one of Levanter: it has a section trainer; check it with `plan --lint {path}`"
        )
    return loaded


def _split(path: str, loaded: dict[str, Any], is_training: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the values of the file `path` into shardplan's and Levanter's keys, by dotted name.

    Args:
        loaded: sections of the file.
        is_training: whether the command trains, so that a section `data` is Levanter's.

    Raises:
        ConfigError: a section contains itself.
    """
    try:
        own, levanter = split_sections(loaded, is_training)
        values = _spell_out_model(flatten(own))
    except RecursionError as error:
        raise ConfigError(f"config file {path}: a section contains itself, through an alias") from error
    sections = {name.partition(".")[0] for cls in COMMANDS.values() for name in keys_of(cls) if "." in name}
    return {name: value for name, value in values.items() if value is not None or name not in sections}, levanter


def _check(values: Mapping[str, Any], keys: Mapping[str, Key], where: str) -> None:
    """Check every key and the type of its value, because draccus would silently convert 7 to "7"."""
    for name, value in values.items():
        if name not in keys:
            raise ConfigError(f"{where}: {_unknown_message(name, keys)}")
        problem = keys[name].problem(value)
        if problem is not None:
            raise ConfigError(f"{where}: {name} is {value!r}; {problem}")
        if not name.startswith(SHELL_SECTION):
            check_variables(f"{where}: {name}", value)
