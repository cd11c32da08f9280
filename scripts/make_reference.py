"""python scripts/make_reference.py [--check]

Writes what docs/reference has from the code: the keys of every command, the keys and the JSON Schema of Plan files, and
the exit codes. With --check it writes nothing, and exits with 1 if a file is not as the code has it.
"""

import json
import sys
from collections import defaultdict
from itertools import groupby
from pathlib import Path

from plan_schema import key_tables, plan_schema

from shardplan import errors
from shardplan.config.command_flags import COMMANDS
from shardplan.config.help import CONFIG_FLAG, LOGGING_FLAGS, MODEL_FLAG
from shardplan.config.keys import Key, keys_of
from shardplan.plan.workload.workload import AUTO

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
BEGIN, END = "<!-- begin: made by scripts/make_reference.py -->", "<!-- end -->"


def main() -> int:
    """Write or check the files of the reference; returns the exit code."""
    is_check = sys.argv[1:] == ["--check"]
    stale = {name: text for name, text in made_files().items() if (FOLDER / name).read_text(encoding="utf-8") != text}
    for name, text in stale.items():
        if not is_check:
            (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"docs/reference/{name} {'is not as the code has it' if is_check else 'is written'}", file=sys.stderr)
    return 1 if is_check and stale else 0


def made_files() -> dict[str, str]:
    """File of docs/reference -> the content that it has to have."""
    return {
        "configuration.md": _fill_page("configuration.md", configuration_tables()),
        "plan-file.md": _fill_page("plan-file.md", key_tables()),
        "exit-codes.md": _fill_page("exit-codes.md", exit_code_table()),
        "plan.schema.json": json.dumps(plan_schema(), indent=1) + "\n",
    }


def configuration_tables() -> str:
    """A table of the keys without a section, and one for every section of the configuration."""
    commands: defaultdict[tuple[str, Key], list[str]] = defaultdict(list)
    for command, cls in COMMANDS.items():
        for name, key in keys_of(cls).items():
            commands[name, key].append(command)
    plain = [
        f"| `{name}` | {_commands_text(users)} | {default_text(key)} | {_meaning(key)} |"
        for (name, key), users in commands.items()
        if "." not in name
    ]
    flags = {"config": CONFIG_FLAG, "model": MODEL_FLAG} | LOGGING_FLAGS
    plain += [f"| `--{name}` | all commands | | {text[0].upper()}{text[1:]}. |" for name, text in flags.items()]
    parts = ["## Keys without a section\n\n| key | of | default | meaning |\n|---|---|---|---|\n" + "\n".join(plain)]
    in_sections = sorted((item for item in commands if "." in item[0]), key=_section_of)
    for section, group in groupby(in_sections, _section_of):
        items = list(group)
        purpose = (items[0][1].section.__doc__ or "").splitlines()[0]
        rows = [f"| `{name}` | {default_text(key)} | {_meaning(key)} |" for name, key in items]
        parts.append(
            f"## {section}\n\n{purpose} Of {_commands_text(commands[items[0]])}.\n\n"
            "| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows)
        )
    return "\n\n".join(parts) + "\n"


def default_text(key: Key) -> str:
    """The default of a key as YAML has it."""
    if key.auto is not None and key.default == key.auto:
        return f"`{AUTO}`"
    match key.default:
        case None:
            return "`null`"
        case bool():
            return f"`{str(key.default).lower()}`"
        case "" | ():
            return "empty"
        case _:
            return f"`{key.default}`"


def exit_code_table() -> str:
    """The table in the docstring of `shardplan.errors`."""
    return "\n".join(line for line in (errors.__doc__ or "").splitlines() if line.startswith("|")) + "\n"


def _fill_page(name: str, text: str) -> str:
    """The page with `text` between its two marks."""
    page = (FOLDER / name).read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def _section_of(item: tuple[str, Key]) -> str:
    return item[0].rpartition(".")[0]


def _commands_text(commands: list[str]) -> str:
    return "all commands" if len(commands) == len(COMMANDS) else ", ".join(f"`{each}`" for each in commands)


def _meaning(key: Key) -> str:
    return " ".join(key.documentation.split()).replace("|", "\\|")


if __name__ == "__main__":
    raise SystemExit(main())
