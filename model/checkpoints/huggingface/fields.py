"""Fetches values from a parsed config.json, by key and type."""

from pathlib import Path
from typing import Any

from llamaspec.model.checkpoints.checkpoint import CheckpointError, refused
from llamaspec.model.checkpoints.strict_json import short


class Fields:
    """A JSON object to fetch values from by key and type; a `CheckpointError` names the key of a wrong value."""

    def __init__(self, values: dict[str, Any], path: str | Path):
        self.values, self.path = values, path

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None and key not in self.values:
            raise refused(self.path, f"lacks {key}")
        return self._typed(key, value, "an integer", type(value) is int)

    def integral(self, key: str, default: int | None = None) -> int:
        """Read an integer, also if it is written as 8192.0, as some tools write all numbers of a config.json."""
        value = self.values.get(key)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return self.integer(key, default)

    def integer_or_none(self, key: str, default: int | None = None) -> int | None:
        value = self.values.get(key, default)
        return self._typed(key, value, "an integer", value is None or type(value) is int)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if value is None and key not in self.values:
            raise refused(self.path, f"lacks {key}")
        number = self._typed(key, value, "a number", type(value) in (int, float))
        try:
            return float(number)
        except OverflowError as error:
            raise refused(self.path, f"{key} is {short(value)}, too large") from error

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        return self._typed(key, value, "true or false", type(value) is bool)

    def ids(self, key: str) -> frozenset[int] | None:
        """Read token ids, given as one integer or a list; None if absent."""
        value: Any = self.values.get(key)
        ids = value if isinstance(value, list) else [value]
        self._typed(key, value, "an integer or a list of them", value is None or all(type(id) is int for id in ids))
        return None if value is None else frozenset(ids)

    def object(self, key: str) -> dict[str, Any]:
        """Read an object; empty if absent or null."""
        value = self.values.get(key)
        return self._typed(key, value, "an object", value is None or isinstance(value, dict)) or {}

    def numbers(self, key: str) -> tuple[float, ...]:
        """Read a list of numbers. Raises `CheckpointError` if it is absent."""
        value: Any = self.values.get(key)
        valid = isinstance(value, list) and all(type(number) in (int, float) for number in value)
        return tuple(float(number) for number in self._typed(key, value, "a list of numbers", valid))

    def refused(self, what: str) -> CheckpointError:
        """Make the error to raise about the file."""
        return refused(self.path, what)

    def _typed(self, key: str, value: Any, kind: str, valid: bool) -> Any:
        if not valid:
            raise refused(self.path, f"{key} is {short(value)}, not {kind}")
        return value
