"""Reads settings from the files next to a tokenizer.

The files are tokenizer_config.json, special_tokens_map.json and added_tokens.json.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.gguf.control_tokens import MARKER
from llamaspec.model.checkpoints.strict_json import read_object, short

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")  # we use the first list that is not empty
# For tokenizers of these classes, add_prefix_space in tokenizer_config.json counts, except in MODELS_AS_IN_FILE.
LLAMA_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer")
MODELS_AS_IN_FILE = ("mistral", "mistral3", "ministral", "ministral3", "mixtral", "phi3", "phimoe")
BYTE_LEVEL_CLASSES = ("CohereTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer")
FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


class SpecialToken(NamedTuple):
    """A special token that a configuration file states, with its flags."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


class Added(NamedTuple):
    """An added token: a token that we find in a text before the text is split into pieces."""

    id: int
    special: bool  # whether it is a control token, which a text cannot spell
    lstrip: bool = False  # whether it absorbs the white space before it
    rstrip: bool = False  # whether it absorbs the white space after it
    normalized: bool = False  # whether to search for it in the normalized text
    single_word: bool = False  # whether to find it only as a whole word


def read_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json in `folder`; an empty dictionary if there is no such file.

    Raises `CheckpointError` if the file is not a JSON object.
    """
    path = folder / "tokenizer_config.json"
    return read_object(path) if path.is_file() else {}


def stated_tokens(folder: Path) -> dict[str, str | None]:
    """Return the strings of bos_token and other special tokens, by key, from files in `folder`; templates use them.

    A string is None if a file sets its key to null. Raises `CheckpointError` if a file cannot be used.
    """
    named, _ = special_tokens(folder)
    return {key: token and token.content for key, token in named.items()}


def special_tokens(folder: Path) -> tuple[dict[str, SpecialToken | None], list[SpecialToken]]:
    """Return the special tokens that files in `folder` state: some by key in a dictionary, the others in a list.

    The dictionary first has the keys in `NAMED_TOKENS`, such as bos_token, then other keys that end in "_token" and
    have a string. If extra_special_tokens is an object, its items follow. The list is extra_special_tokens, or else
    additional_special_tokens.

    We read tokenizer_config.json. If special_tokens_map.json has the same key, its value replaces the value from
    tokenizer_config.json. But we do not read special_tokens_map.json if tokenizer_config.json has added_tokens_decoder.
    Source: transformers 5.24, tokenization_utils_base.py, `_from_pretrained` and `__init__`. Raises `CheckpointError`
    if a file cannot be used.
    """
    path, stated = folder / "tokenizer_config.json", read_config(folder)
    files = [(path, stated)]
    path = folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in stated and path.is_file():
        files.append((path, read_object(path)))
    named: dict[str, SpecialToken | None] = {}
    unlisted: dict[str, SpecialToken | None] = {}
    lists: dict[str, list[SpecialToken]] = {}
    for path, values in files:
        for key, value in values.items():
            if key in NAMED_TOKENS:
                named[key] = None if value is None else _special_token(value, key, path)
            elif key.endswith("_token") and (isinstance(value, str) or _is_token(value)):
                unlisted[key] = _special_token(value, key, path)
            elif key in EXTRA_TOKENS and isinstance(value, list):
                lists[key] = [_special_token(entry, key, path) for entry in value]
            elif key == "extra_special_tokens" and isinstance(value, dict):
                unlisted |= {name: _special_token(entry, name, path) for name, entry in value.items()}
    ordered = {key: named[key] for key in NAMED_TOKENS if key in named}
    return ordered | unlisted, next((lists[key] for key in EXTRA_TOKENS if lists.get(key)), [])


def _is_token(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str)


def _special_token(value: object, key: str, path: Path) -> SpecialToken:
    """Read a token as files write it: a string, or an object with the string and flags."""
    if isinstance(value, dict) and _is_token(value):
        flags = {flag: _flag(value, flag, path) for flag in ("lstrip", "rstrip", "normalized", "single_word")}
        return SpecialToken(value["content"], **flags)
    if not isinstance(value, str):
        raise refused(path, f"{key} is {short(value)}, expected a string")
    return SpecialToken(value)


def stated_bos(folder: Path, id_of: Callable[[str], int | None], *, begins: bool, default: int | None) -> int | None:
    """Return the id of the token that begins texts, as tokenizer_config.json in `folder` states it, or None.

    If the file lacks bos_token, we return `default`. If the file lacks add_bos_token, `begins` says whether texts begin
    with BOS. `id_of` returns the id of a token by its name, or None. Raises `CheckpointError` if the vocabulary lacks
    the token.
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
        raise refused(path, f"bos_token is {short(name)}, which is not a token of the vocabulary")
    return token


def stated_eos(folder: Path, id_of: Callable[[str], int | None], *, default: str | None) -> int | None:
    """Return the id of eos_token, as files in `folder` state it; if no file has the key, return the id of `default`.

    Returns None if the files set eos_token to null, or if the vocabulary lacks the token.
    """
    name = stated_tokens(folder).get("eos_token", default)
    return None if name is None else id_of(name)


def stated_end(folder: Path, eos: int | None) -> tuple[int, ...]:
    """Return the ids that follow a text: the token `eos` if add_eos_token of tokenizer_config.json is true, or none.

    `eos` is None if the vocabulary lacks eos_token, or if no file states it. Raises `CheckpointError` if the key is not
    true or false, or if it is true and the vocabulary lacks the token that a file states.
    """
    path, config = folder / "tokenizer_config.json", read_config(folder)
    stated = config.get("add_eos_token")
    if stated is None:
        return ()
    if not isinstance(stated, bool):
        raise refused(path, f"add_eos_token is {short(stated)}, expected true or false")
    if not stated:
        return ()
    if eos is None and (name := stated_tokens(folder).get("eos_token")) is not None:
        raise refused(path, f"add_eos_token is true, but the vocabulary has no token {short(name)} (eos_token)")
    return () if eos is None else (eos,)


def stated_prefix(folder: Path, *, byte_level: bool) -> bool | None:
    """Read add_prefix_space of tokenizer_config.json, which says whether texts get a space in front.

    Returns None if the key is absent or has no effect.

    transformers builds some tokenizer classes anew from the vocabulary, and the key affects only these classes. Other
    tokenizers follow their own file. Source: transformers 5.24, models/auto/tokenization_auto.py,
    `AutoTokenizer.from_pretrained`, and `__init__` of these classes. Raises `CheckpointError` if the key is not true or
    false.
    """
    config = read_config(folder)
    stated = config.get("add_prefix_space")
    if stated is None:
        return None
    if not isinstance(stated, bool):
        what = f"add_prefix_space is {short(stated)}, expected true or false"
        raise refused(folder / "tokenizer_config.json", what)
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    if byte_level:
        return stated if kind in BYTE_LEVEL_CLASSES else None
    path = folder / "config.json"
    model = read_object(path).get("model_type") if path.is_file() else None
    return stated if kind in LLAMA_CLASSES and model not in MODELS_AS_IN_FILE else None


def prefix_scheme(folder: Path, prefix: bool) -> str:
    """Choose Metaspace's prepend_scheme: "never", "first" or "always".

    It is "never" if `prefix` is False, "always" for a Llama tokenizer with legacy set to true, and otherwise "first".

    With "always", a text after a control token also gets a space in front.
    """
    config = read_config(folder)
    always = config.get("legacy") is True and str(config.get("tokenizer_class")).startswith("LlamaTokenizer")
    return "never" if not prefix else "always" if always else "first"


def read_added(folder: Path) -> dict[str, Added]:
    """Read the tokens that added_tokens.json and tokenizer_config.json in `folder` add to a tokenizer.model, by name.

    tokenizer_config.json says which tokens are control tokens. If it does not list a token, the token is a control
    token in two cases: if a key such as bos_token names it (as in transformers), or if it looks like a chat marker
    (transformers lacks this rule). Raises `CheckpointError` if a file cannot be used.
    """
    added: dict[str, Added] = {}
    named, extra = special_tokens(folder)
    names = {token.content for token in (*named.values(), *extra) if token}
    for name, id in added_ids(folder).items():
        special = name in names or MARKER.fullmatch(name) is not None
        added[name] = Added(id, special=special, normalized=not special)
    for name, token in added_decoder(folder).items():
        if name in added and added[name].id != token.id:
            path = folder / "tokenizer_config.json"
            what = f"but added_tokens.json states id {added[name].id}"
            raise refused(path, f"token {short(name)} has id {token.id}, {what}")
        added[name] = token
    return added


def added_ids(folder: Path) -> dict[str, int]:
    """Read added_tokens.json in `folder`: ids by the names of tokens. Raises `CheckpointError` for an invalid id."""
    path = folder / "added_tokens.json"
    return {name: _id(id, name, path) for name, id in (read_object(path) if path.is_file() else {}).items()}


def added_decoder(folder: Path) -> dict[str, Added]:
    """Read added_tokens_decoder of tokenizer_config.json in `folder`: tokens by name.

    Raises `CheckpointError` if the key is not an object, or if an entry is invalid.
    """
    path, added = folder / "tokenizer_config.json", {}
    stated = read_config(folder).get("added_tokens_decoder", {})
    if not isinstance(stated, dict):
        raise refused(path, f"added_tokens_decoder is {short(stated)}, expected an object")
    for key, entry in stated.items():
        if not isinstance(entry, dict) or not isinstance(name := entry.get("content"), str):
            raise refused(path, f'the entry {short(key)} of added_tokens_decoder has no string "content"')
        id = _id(int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key, name, path)
        added[name] = Added(id, **{flag: _flag(entry, flag, path) for flag in FLAGS})
    return added


def _id(value: object, name: str, path: Path) -> int:
    if type(value) is not int or value < 0:
        raise refused(path, f"the id of token {short(name)} is {short(value)}, expected a nonnegative integer")
    return value


def _flag(entry: Mapping[str, Any], flag: str, path: Path) -> bool:
    if not isinstance(value := entry.get(flag, False), bool):
        raise refused(path, f"{flag} of a token is {short(value)}, expected true or false")
    return value
