"""JSON from an untrusted file: an object, bounded in size."""

import json
from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.mapped import MappedFile

# Llama 3.1 405B has 1137 tensors: an index of 100 KB, and an object per tensor in a header. Both bounds are about
# forty times as large, and a hostile file costs at most a second and 200 MB.
LARGEST = 4 << 20  # bytes
MOST_OBJECTS = 50_000  # other JSON is parsed a hundred times faster than objects are checked


def read_object(path: str | Path) -> dict:
    """Read the object in a JSON file; if a key is repeated, the last value counts. Raises `CheckpointError`.

    People edit these files by hand, and other JSON readers also use the last value.
    """
    file = MappedFile(path)
    if file.size > LARGEST:
        raise refused(path, f"{file.size} bytes of JSON, more than {LARGEST}")
    return parse_object(file.bytes(0, file.size), path, unique=False)


def parse_object(text: bytes, path: str | Path, *, most_objects: int = MOST_OBJECTS, unique: bool = True) -> dict:
    """Parse `text` from the file `path` as a JSON object of at most `most_objects`. Raises `CheckpointError`.

    With `unique`, a repeated key is refused; otherwise its last value counts. A leading byte order mark, as editors on
    Windows write it, is ignored.

    >>> parse_object(b'{"a": 1}', "config.json")
    {'a': 1}
    >>> parse_object(b'{"a": 1, "a": 2}', "config.json")
    Traceback (most recent call last):
    llamaspec.model.checkpoints.checkpoint.CheckpointError: config.json: is not usable JSON: 'a' appears twice
    """
    if text.count(b"{") > most_objects:
        raise refused(path, f"is not usable JSON: more than {most_objects} objects")
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_unique if unique else None)
    except json.JSONDecodeError as error:
        raise refused(path, f"is not JSON: {error.msg} at character {error.pos}") from error
    except UnicodeDecodeError as error:
        raise refused(path, f"is not JSON: byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise refused(path, "is not usable JSON: nested too deeply") from error
    except ValueError as error:  # A key is repeated, or a number has thousands of digits.
        raise refused(path, f"is not usable JSON: {error}") from error
    if not isinstance(value, dict):
        raise refused(path, "is not a JSON object")
    return value


def short(value: object) -> str:
    """Format `value` as JSON, cut to fit an error's line.

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
        raise ValueError(f"{repeated[:40]!r} appears twice")
    return value
