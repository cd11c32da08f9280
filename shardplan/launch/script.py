"""Writes the script or manifest of a launcher from a job, quoting each argument as its place requires."""

import json
import shlex
import textwrap
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from shardplan.config.sections import Target
from shardplan.hardware import cloud_names
from shardplan.launch.job import Job
from shardplan.launch.targets import check_target

TEMPLATES = {
    Target.GCLOUD: "gcloud.sh.jinja",
    Target.QUEUED: "queued.sh.jinja",
    Target.XPK: "xpk.sh.jinja",
    Target.SKYPILOT: "skypilot.yaml.jinja",
    Target.SLURM: "slurm.sh.jinja",
    Target.RAY: "ray.py.jinja",
}
HOST_SCRIPT = "host.sh.jinja"
"""Template of the script that every host runs, the same for all launchers."""


def write_script(target: Target, job: Job) -> str:
    """Return the text that starts a job with a launcher: a shell script, a YAML file, or a Python program.

    Raises:
        ConfigError: the launcher cannot start such a job.
    """
    check_target(target, job)
    names: dict[str, Any] = {"job": job, "settings": job.settings}
    if not job.hardware.is_cpu:
        names |= _cloud_names(job)
    host_script = _environment().get_template(HOST_SCRIPT).render(names)
    return _environment().get_template(TEMPLATES[target]).render(names, host_script=host_script)


def _cloud_names(job: Job) -> dict[str, str | None]:
    """Return the launchers' names for one slice of a TPU job, and the software version of its hosts."""
    generation, type_ = cloud_names(job.hardware), job.accelerator_type
    topology = f"--type={generation.type} --topology={job.topology}"
    return {
        "gcloud_flags": f"--accelerator-type={type_}" if type_ else topology,
        "xpk_type": type_ or f"{generation.type}-{job.topology}",
        "software": generation.software,
    }


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("shardplan.launch"), undefined=StrictUndefined, keep_trailing_newline=True,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "shell": shlex.quote,
        "yaml": json.dumps,  # a JSON text is a YAML text as well
        "yaml_block": _yaml_block,
        "python": _python_text,
        "comment": _comment,
        "delimiter": _delimiter,
        "arguments": _arguments,
    }
    return environment


def _python_text(text: str) -> str:
    """Convert text to a Python literal with one source line per line of text."""
    lines = "".join(f"    {line!r}\n" for line in text.splitlines(keepends=True))
    return f"(\n{lines})"


def _yaml_block(text: str) -> str:
    """Convert text to lines for the value of a YAML key: a block if that keeps every character."""
    is_kept = all(each.isprintable() or each in "\t\n" for each in text)
    return f"|\n{textwrap.indent(text, '  ')}" if is_kept else f"{json.dumps(text)}\n"


def _comment(text: str) -> str:
    """Escape text so that it stays on the line of its comment."""
    return text if text.isprintable() else repr(text)


def _delimiter(text: str, name: str) -> str:
    """Return a here-document delimiter: `name`, with enough underscores that it is not a line of `text`."""
    while name in text.splitlines():
        name += "_"
    return name


def _arguments(arguments: list[str]) -> str:
    """Quote arguments for a shell, each flag on its own line."""
    return "".join((" \\\n  " if each.startswith("--") else " ") + shlex.quote(each) for each in arguments)
