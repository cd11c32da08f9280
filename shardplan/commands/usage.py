"""`shardplan --help`: the purpose of each command."""

import shutil
import textwrap
from collections.abc import Iterable

from shardplan.config.command_flags import COMMANDS
from shardplan.config.help import WITHOUT_CONFIGURATION

INDENT = 22
"""Columns before the purposes of commands."""


def usage(commands: Iterable[str]) -> str:
    """Return the usage of `shardplan`, with the purpose of each command, in the width of the terminal.

    The purpose is the first paragraph of the command's docstring; `shardplan COMMAND --help` has the other paragraphs.
    """
    first_paragraphs = {name: (cls.__doc__ or "").partition("\n\n")[0] for name, cls in COMMANDS.items()}
    purposes = first_paragraphs | WITHOUT_CONFIGURATION
    wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns, subsequent_indent=" " * INDENT)
    lines = [wrapper.fill(f"  {name}".ljust(INDENT) + purposes[name]) for name in commands]
    return "\n".join(
        ["usage: shardplan COMMAND [--config FILE] [--KEY VALUE ...]", "       shardplan COMMAND --help", "", *lines]
    )
