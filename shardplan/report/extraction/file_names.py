"""File names of the pages and plots of texts, whose ids may be invalid as file names."""

import hashlib
import re
from collections.abc import Iterable

LONGEST = 80
"""Maximum number of characters of a file name, without its ending."""


def file_names(ids: Iterable[str], taken: Iterable[str] = ()) -> dict[str, str]:
    """Map each id to a unique file name without suffix that is valid on every system.

    If an id is not safe as a file name, for example because it has slashes or differs from another id only in case, the
    file name ends with a part of the id's SHA-256.

    Args:
        ids: different from each other.
        taken: file names that are not given to any id.
    """
    used = {name.lower() for name in taken}
    names = {}
    for id_ in ids:
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", id_).lstrip(".-")[:LONGEST].rstrip(".") or "text"
        digest, length = hashlib.sha256(id_.encode()).hexdigest(), 8
        unique = name if name == id_ else f"{name[: LONGEST - length - 1]}-{digest[:length]}"
        while unique.lower() in used:
            unique, length = f"{name[: LONGEST - length - 1]}-{digest[:length]}", length + 8
        used.add(unique.lower())
        names[id_] = unique
    return names


def short_label(text: str, limit: int = 60) -> str:
    """Return a text on one line of at most `limit` characters, without unprintable ones."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
