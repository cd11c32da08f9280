"""JSON in which no key occurs twice, and every key can be written as text again."""

import json
from collections import Counter
from typing import Any


def parse_json(text: str) -> Any:
    """Parse JSON, and refuse keys that occur twice in an object.

    >>> parse_json('{"a": {"b": 1}}')
    {'a': {'b': 1}}

    Raises:
        ValueError: the text is not JSON, or a key occurs twice or is not valid Unicode.
    """
    if "\\u" not in text:  # only escapes make half of a surrogate pair
        parsed = json.loads(text)
        # a colon follows each key, and others are in texts: where there are no more than keys, no key was there twice
        if text.count(":") == _count_keys(parsed):
            return parsed
    return json.loads(text, object_pairs_hook=_reject_duplicate_keys)


def _count_keys(value: Any) -> int:
    """Return the number of keys of an object and of the objects among its values; headers are no deeper."""
    if not isinstance(value, dict):
        return 0
    return len(value) + sum(len(each) for each in value.values() if type(each) is dict)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, as `object_pairs_hook`; raise ValueError for a key that is repeated or not valid Unicode."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"duplicate key {next(name for name, count in counts.items() if count > 1)!r}")
    "".join(entries).encode()  # raises for half of a surrogate pair
    return entries
