"""Tables of words and sentences: the TOML files next to this module."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read_table(name: str) -> dict[str, Any]:
    """Read a table, with a tuple for each of its lists.

    >>> read_table("lexicon")["boys"][:2]
    ('Ben', 'Tom')
    """
    text = (Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8")
    return {key: _with_tuples(value) for key, value in tomllib.loads(text).items()}


def _with_tuples(value: Any) -> Any:
    match value:
        case dict():
            return {key: _with_tuples(entry) for key, entry in value.items()}
        case list():
            return tuple(_with_tuples(entry) for entry in value)
        case _:
            return value
