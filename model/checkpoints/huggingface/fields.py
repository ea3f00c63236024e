"""`Fields`: typed access to the keys of a parsed config.json."""

from pathlib import Path
from typing import Any

from llamaspec.model.checkpoints.checkpoint import CheckpointError, refused
from llamaspec.model.checkpoints.strict_json import short


class Fields:
    """A JSON object of the file `path`; a method for each type returns a key's value, or raises `CheckpointError`.

    The error names the file and the key. It says that the key is missing, or that its value has the wrong type.
    """

    def __init__(self, values: dict[str, Any], path: str | Path):
        self.values, self.path = values, path

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None and key not in self.values:
            raise refused(self.path, f"lacks the key {key}")
        return self._typed(key, value, "an integer", type(value) is int)

    def integral(self, key: str, default: int | None = None) -> int:
        """Read an integer; we also accept 8192.0, since some tools write all numbers as floats."""
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
            raise refused(self.path, f"lacks the key {key}")
        number = self._typed(key, value, "a number", type(value) in (int, float))
        try:
            return float(number)
        except OverflowError as error:
            raise refused(self.path, f"{key} is {short(value)}, which is too large for a float") from error

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        return self._typed(key, value, "true or false", type(value) is bool)

    def ids(self, key: str) -> frozenset[int] | None:
        """Read token ids, which a file gives as one integer or as a list; None if the key is absent."""
        value: Any = self.values.get(key)
        ids = value if isinstance(value, list) else [value]
        valid = value is None or all(type(id) is int for id in ids)
        self._typed(key, value, "an integer or a list of integers", valid)
        return None if value is None else frozenset(ids)

    def object(self, key: str) -> dict[str, Any]:
        """Read a JSON object; an empty one if the key is absent or null."""
        value = self.values.get(key)
        return self._typed(key, value, "an object", value is None or isinstance(value, dict)) or {}

    def numbers(self, key: str) -> tuple[float, ...]:
        """Read a list of numbers. Raises `CheckpointError` if the key is absent."""
        value: Any = self.values.get(key)
        valid = isinstance(value, list) and all(type(number) in (int, float) for number in value)
        return tuple(float(number) for number in self._typed(key, value, "a list of numbers", valid))

    def refused(self, what: str) -> CheckpointError:
        """Build a `CheckpointError` about the file."""
        return refused(self.path, what)

    def _typed(self, key: str, value: Any, kind: str, valid: bool) -> Any:
        if not valid:
            raise refused(self.path, f"{key} is {short(value)}, expected {kind}")
        return value
