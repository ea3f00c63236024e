"""Statements about a tokenizer that lie in files beside it: tokenizer_config.json and added_tokens.json."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.gguf.control_tokens import MARKER
from llamaspec.model.checkpoints.strict_json import read_object, short

NAMED_TOKENS = {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


class Added(NamedTuple):
    """A token beside a vocabulary, or one of it that is never split."""

    id: int
    special: bool  # a control token, which no text spells
    lstrip: bool = False  # takes in the white space before it
    rstrip: bool = False  # takes in the white space after it
    normalized: bool = False  # is looked for in the text after it was normalized
    single_word: bool = False  # is not found within a word


def read_config(folder: Path) -> dict[str, Any]:
    """The tokenizer_config.json in `folder`; empty where there is none. Raises `CheckpointError`."""
    path = folder / "tokenizer_config.json"
    return read_object(path) if path.is_file() else {}


def stated_tokens(folder: Path) -> dict[str, str | None]:
    """The named tokens, such as bos_token, that files in `folder` state; None for one that they say there is not.

    A special_tokens_map.json counts where the tokenizer_config.json lists no added tokens, as in transformers. Raises
    `CheckpointError`.
    """
    stated = {}
    path = folder / "tokenizer_config.json"
    config = read_config(folder)
    files = [(path, config)]
    path = folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and path.is_file():
        files.append((path, read_object(path)))
    for path, values in files:
        for key in NAMED_TOKENS & values.keys():
            token = values[key].get("content") if isinstance(values[key], dict) else values[key]
            if not isinstance(token, str | None):
                raise refused(path, f"{key} is {short(token)}, not a text")
            stated[key] = token
    return stated


def stated_bos(folder: Path, id_of: Callable[[str], int | None], *, begins: bool, default: int | None) -> int | None:
    """The id that begins texts by the tokenizer_config.json in `folder`; `default` where none names a BOS.

    `begins` says whether texts begin with BOS where the file does not say. `id_of` gives the id of a token's name, or
    None. Raises `CheckpointError` for a name that is in no vocabulary.
    """
    path, config = folder / "tokenizer_config.json", read_config(folder)
    if not config:
        return default
    if config.get("add_bos_token", begins) is not True:
        return None
    name = config.get("bos_token")
    if isinstance(name, dict):
        name = name.get("content")
    if name is None:
        return default
    token = id_of(name) if isinstance(name, str) else None
    if token is None:
        raise refused(path, f"the vocabulary has no bos_token {short(name)}")
    return token


def read_added(folder: Path) -> dict[str, Added]:
    """The tokens that added_tokens.json and tokenizer_config.json in `folder` add to a tokenizer.model, by name.

    tokenizer_config.json says which are control tokens. Of those that it does not list, the ones are that a file names
    as bos_token and the like, and those that look like the marker of a chat: transformers takes only the former. Raises
    `CheckpointError`.
    """
    added: dict[str, Added] = {}
    path = folder / "added_tokens.json"
    named = {token for token in stated_tokens(folder).values() if token is not None}
    for name, id in (read_object(path) if path.is_file() else {}).items():
        special = name in named or MARKER.fullmatch(name) is not None
        added[name] = Added(_id(id, name, path), special=special, normalized=not special)
    path = folder / "tokenizer_config.json"
    stated = read_config(folder).get("added_tokens_decoder", {})
    if not isinstance(stated, dict):
        raise refused(path, f"added_tokens_decoder is {short(stated)}, not an object")
    for key, entry in stated.items():
        if not isinstance(entry, dict) or not isinstance(name := entry.get("content"), str):
            raise refused(path, f"added_tokens_decoder's {short(key)} has no content")
        id = _id(int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key, name, path)
        if name in added and added[name].id != id:
            raise refused(path, f"token {short(name)} has id {id}, but {added[name].id} in added_tokens.json")
        added[name] = Added(id, **{flag: _flag(entry, flag, path) for flag in FLAGS})
    return added


def _id(value: object, name: str, path: Path) -> int:
    if type(value) is not int or value < 0:
        raise refused(path, f"the id of token {short(name)} is {short(value)}, not a whole number from 0 up")
    return value


def _flag(entry: Mapping[str, Any], flag: str, path: Path) -> bool:
    if not isinstance(value := entry.get(flag, False), bool):
        raise refused(path, f"{flag} is {short(value)}, not true or false")
    return value
