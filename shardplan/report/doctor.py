"""Prints the findings of a host's checks: the verdict first, then a line for each finding."""

from collections import Counter
from typing import Any

from rich.console import Console
from rich.text import Text

from shardplan.doctor.findings import HostFinding, HostFindings, Level, worst_level
from shardplan.report.text import print_wrapped

STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}
LEVEL_WIDTH = max(map(len, Level)) + 2


def print_findings(host: str, findings: HostFindings, out: Console) -> None:
    """Print the number of findings of each level, then each finding with its requirement and remedy."""
    counts = Counter(finding.level for each in findings.values() for finding in each)
    verdict = ", ".join(_count_text(counts[level], level) for level in reversed(Level) if counts[level])
    worst = worst_level(findings)
    print_wrapped(verdict, out, Text(f"{host}: ", STYLES[worst]))
    width = max(map(len, findings), default=0) + 2
    for check, each in findings.items():
        for finding in each:
            head = Text.assemble((finding.level.ljust(LEVEL_WIDTH), STYLES[finding.level]), check.ljust(width))
            print_wrapped(_describe(finding), out, head)


def findings_json(host: str, findings: HostFindings) -> dict[str, Any]:
    """Return the findings as JSON values."""
    return {
        "host": host,
        "level": worst_level(findings),
        "findings": [{"check": check, **vars(finding)} for check, each in findings.items() for finding in each],
    }


def _count_text(count: int, level: Level) -> str:
    return f"{count} {level}{'s' if count > 1 and level is not Level.OK else ''}"


def _describe(finding: HostFinding) -> str:
    parts = [finding.measured]
    if finding.required:
        parts.append(f"required: {finding.required}")
    if finding.remedy:
        parts.append(f"remedy: {finding.remedy}")
    return "; ".join(parts)
