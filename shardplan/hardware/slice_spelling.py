"""Parses slice names as users, clouds and JAX spell them, such as `V5E-16`, `v5e-4x4` and `TPU v4-8`.

Other spellings are not accepted, because plans, caches and records compare slices by name; a message suggests the name.
"""

import re

from shardplan.hardware.generations import GENERATIONS

NAME = re.compile(
    r"(?:(?P<copies>[0-9]{1,9})x)?(?P<generation>[a-z0-9]+?)"
    r"(?:-(?P<count>[0-9]{1,9})|:(?P<chips>[0-9]{1,9}(?:x[0-9]{1,9})+))"
)
"""Pattern for a slice name."""


def _cloud_spellings() -> dict[str, str]:
    """Return Google Cloud's name of a generation -> shardplan's name, for generations whose names differ."""
    spellings = {}
    for name, row in GENERATIONS.items():
        if row.cloud is not None and row.cloud.type != name:
            spellings[row.cloud.type] = name
    return spellings


def _generation_spellings() -> dict[str, str]:
    """Return every spelling of a generation, and of virtual CPU devices -> its name."""
    spellings = {"cpu": "cpu"}
    for name, row in GENERATIONS.items():
        spellings |= dict.fromkeys((name, *row.spellings), name)
    return spellings


CLOUD_SPELLINGS = _cloud_spellings()
"""Google Cloud's name of a generation -> shardplan's name, where the two differ; slice names may use either."""
GENERATION_SPELLINGS = _generation_spellings()
"""Name by Google Cloud, JAX or users, without separators -> name of the generation; `v5` may be v5e or v5p."""
_SEPARATORS = r"[\s\-_:/.,]*"
_GENERATION = "|".join(map(_SEPARATORS.join, sorted(GENERATION_SPELLINGS, key=len, reverse=True)))
_OTHER_NAME = re.compile(
    rf"(?:(?P<copies>[0-9]{{1,9}}){_SEPARATORS}[x*]{_SEPARATORS})?(?:tpu{_SEPARATORS})??(?P<generation>{_GENERATION})"
    rf"(?:{_SEPARATORS}(?P<size>[0-9]{{1,9}}(?:[x*][0-9]{{1,9}})*)(?:{_SEPARATORS}(?:chips|cores))?)?{_SEPARATORS}",
    re.IGNORECASE,
)


def standard_spelling(name: str) -> str | None:
    """Return the standard slice name for another spelling; None if it cannot be read or has no size.

    >>> standard_spelling("V5E-16"), standard_spelling("v5e-4x4"), standard_spelling("TPU v4-8")
    ('v5e-16', 'v5e:4x4', 'v4-8')
    """
    match = _OTHER_NAME.fullmatch(name.strip())
    if match is None or match["size"] is None:
        return None
    size, generation = match["size"].lower().replace("*", "x"), _generation(match)
    if generation == "cpu" and "x" in size:
        return None
    prefix = f"{match['copies']}x" if match["copies"] else ""
    return f"{prefix}{generation}{':' if 'x' in size else '-'}{size}"


def spelled_generation(name: str) -> str | None:
    """Return the generation with which a non-standard or incomplete name begins; None if unknown."""
    match = _OTHER_NAME.match(name.strip())
    return None if match is None else _generation(match)


def _generation(match: re.Match[str]) -> str:
    return GENERATION_SPELLINGS[re.sub(_SEPARATORS, "", match["generation"].lower())]
