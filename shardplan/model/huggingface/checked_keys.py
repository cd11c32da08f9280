"""The keys of a JSON object that describes weights; each key must be read, or ignored by name."""

from typing import Any

from shardplan.errors import ConfigError, nearest


class CheckedKeys:
    """The keys of a mapping: `take` reads one, and `check` refuses keys that were not read."""

    def __init__(self, values: Any, where: str) -> None:
        """Hold all keys of a mapping; none of them has been read yet.

        Args:
            where: name of the mapping, for messages.

        Raises:
            ConfigError: `values` is not a mapping.
        """
        if not isinstance(values, dict):
            raise ConfigError(f"{where} is {values!r}; it must be a mapping")
        self.values, self.where = values, where
        self.known: set[str] = set()

    def take(self, name: str, default: Any, *allowed: Any) -> Any:
        """Return a key's value, which must be one of the allowed values if there are any."""
        self.known.add(name)
        value = self.values.get(name, default)
        value = default if value is None else value
        if allowed and value not in allowed:
            raise ConfigError(f"{self.where}.{name} is {value!r}; it must be {' or '.join(map(repr, allowed))}")
        return value

    def is_true(self, name: str, default: bool) -> bool:
        """Return the value of a key that is true or false."""
        value: bool = self.take(name, default)
        if type(value) is not bool:
            raise ConfigError(f"{self.where}.{name} is {value!r}; it must be true or false")
        return value

    def size(self, name: str, default: int | None = None) -> int | None:
        """Return the value of a key that is a positive integer; None for -1, which stands for all."""
        value = self.take(name, default)
        if type(value) is not int or (value < 1 and value != -1):
            raise ConfigError(f"{self.where}.{name} is {value!r}; it must be a positive integer, or -1 for all")
        return None if value == -1 else value

    def names(self, name: str) -> list[str]:
        """Return the value of a key that lists names of modules; empty if the key is absent."""
        value: list[str] = self.take(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{self.where}.{name} is {value!r}; it must be a list of names of modules")
        return value

    def check(self, *ignored: str) -> None:
        """Refuse keys that were not taken, unless they are known to change no weight."""
        for name in self.values.keys() - self.known - {*ignored}:
            if self.values[name] is not None:
                known = sorted({*self.known, *ignored})
                raise ConfigError(f"{self.where}.{name} is not known; {nearest(name, known)}")
