"""The memory that a process can still allocate: the host's free memory, and its control groups' limits. Linux only."""

from collections.abc import Iterator
from pathlib import Path

MEMINFO, OWN_GROUP, GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
VERSION_2 = "0::"
"""Beginning of the line that names the control group of version 2, whose memory limits containers use."""


def available_bytes() -> tuple[int, str]:
    """Return the bytes that this process can still allocate, and the control group that limits them, if one does."""
    (line,) = (line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    available, source = int(line.split()[1]) * 1024, ""
    for group in _control_groups():
        left = _left_in(group)
        if left is not None and left < available:
            available, source = left, f" (limit of the control group {group})"
    return available, source


def _control_groups() -> Iterator[Path]:
    """Yield the folders of this process's control group, and of the groups that contain it."""
    for line in OWN_GROUP.read_text().splitlines():
        if line.startswith(VERSION_2):
            group = GROUPS / line.removeprefix(VERSION_2).lstrip("/")
            yield from (group, *(parent for parent in group.parents if parent.is_relative_to(GROUPS)))


def _left_in(group: Path) -> int | None:
    """Return the free memory of a control group; None if it has no limit."""
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        values = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the group at the top has none of these files
        return None
    if limit == "max":
        return None
    return int(limit) - int(used) + int(values.get("inactive_file", 0))  # the page cache gives way
