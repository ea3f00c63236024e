"""Reads a JSON object or list of bounded size from an untrusted file."""

import json
from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.mapped import MappedFile

# Llama 3.1 405B has 1137 tensors: its index has 100 KB, and its headers have one object per tensor. Both bounds are
# about forty times as large. With these bounds, a hostile file costs at most a second and 200 MB.
LARGEST = 4 << 20  # bytes
MOST_OBJECTS = 50_000  # checking the keys of an object takes a hundred times longer than parsing other JSON


def read_object(path: str | Path) -> dict:
    """Read a JSON file that contains one object. Raises `CheckpointError` for any other file, or if it is too large.

    If a key is repeated, the last value counts: people edit such files by hand, and other JSON readers also use the
    last value.
    """
    return parse_object(_bytes(path), path, unique=False)


def read_list(path: str | Path) -> list:
    """Read a JSON file that contains one list, with the same limits and errors as `read_object`."""
    value = _parse(_bytes(path), path, most_objects=MOST_OBJECTS, unique=False)
    if not isinstance(value, list):
        raise refused(path, "is not a JSON list")
    return value


def _bytes(path: str | Path) -> bytes:
    file = MappedFile(path)
    if file.size > LARGEST:
        raise refused(path, f"the JSON file has {file.size} bytes, expected at most {LARGEST}")
    return file.bytes(0, file.size)


def parse_object(text: bytes, path: str | Path, *, most_objects: int = MOST_OBJECTS, unique: bool = True) -> dict:
    """Parse `text` (the content of the file `path`) as a JSON object that contains at most `most_objects` objects.

    Raises `CheckpointError` if `text` is not such an object. With `unique`, a repeated key is an error, too; otherwise
    the last value of a key counts. We ignore a leading byte order mark, which editors on Windows write.

    >>> parse_object(b'{"a": 1}', "config.json")
    {'a': 1}
    >>> parse_object(b'{"a": 1, "a": 2}', "config.json")
    Traceback (most recent call last):
    llamaspec.model.checkpoints.checkpoint.CheckpointError: config.json: is not usable JSON: key 'a' appears twice
    """
    value = _parse(text, path, most_objects=most_objects, unique=unique)
    if not isinstance(value, dict):
        raise refused(path, "is not a JSON object")
    return value


def _parse(text: bytes, path: str | Path, *, most_objects: int, unique: bool) -> object:
    if text.count(b"{") > most_objects:
        raise refused(path, f"is not usable JSON: it contains more than {most_objects} objects")
    try:
        return json.loads(text.decode("utf-8-sig"), object_pairs_hook=_unique if unique else None)
    except json.JSONDecodeError as error:
        raise refused(path, f"is not JSON: {error.msg} at character {error.pos}") from error
    except UnicodeDecodeError as error:
        raise refused(path, f"is not JSON: byte {error.start} is not valid UTF-8") from error
    except RecursionError as error:
        raise refused(path, "is not usable JSON: it is nested too deeply") from error
    except ValueError as error:  # A key is repeated, or a number has thousands of digits.
        raise refused(path, f"is not usable JSON: {error}") from error


def short(value: object) -> str:
    """Format a JSON value for an error message: at most 40 characters, and lists and objects without their contents.

    >>> short(None), short("x" * 100), short([1, 2])
    ('null', '"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...', 'a list')
    """
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _unique(pairs: list[tuple[str, object]]) -> dict:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {repeated[:40]!r} appears twice")
    return value
