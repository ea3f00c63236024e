"""Reads Mistral's `tekken.json`, which has byte strings and their ranks. Control tokens have the lowest ids.

The layout comes from https://github.com/mistralai/mistral-common, and the algorithm is `reference.byte_bpe` with the
regular expression in the file. A file may list more tokens than the vocabulary size that it states; we use only the
first tokens. Files of the first versions do not list their control tokens (see `UNLISTED`). Control tokens without a
name are called <SPECIAL_20> and so on.
"""

import base64
import binascii
from typing import Any

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.huggingface.fields import Fields
from llamaspec.model.checkpoints.strict_json import parse_object, short
from llamaspec.model.tokenizers.huggingface_parts import check_pattern
from llamaspec.model.tokenizers.limits import MOST_TOKENS, check_count, check_special
from llamaspec.model.tokenizers.tiktoken_ranks import TiktokenTokenizer, from_ranks

BEGIN = "<s>"
UNLISTED = (
    "<unk>", BEGIN, "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
MOST_OBJECTS = 2 * MOST_TOKENS  # Each token is an object, and its string may contain braces, which we also count.


def read_tekken(data: bytes, *, path: str) -> TiktokenTokenizer:
    """Read a tokenizer from `data`, the bytes of a tekken.json; `path` is its path, for error messages.

    Raises `CheckpointError` if the file cannot be used.
    """
    file = Fields(parse_object(data, path, most_objects=MOST_OBJECTS), path)
    config = Fields(file.object("config"), path)
    vocab, controls = config.integer("default_vocab_size"), config.integer("default_num_special_tokens")
    pattern = config.values.get("pattern")
    if not isinstance(pattern, str):
        raise refused(path, f"config.pattern is {short(pattern)}, expected a string")
    check_pattern(pattern, "config", path)
    check_count(vocab, path)
    entries = file.values.get("vocab")
    if not isinstance(entries, list) or not 0 <= vocab - controls <= len(entries) or controls < 0:
        what = f"config implies {vocab - controls:,} tokens and {controls:,} control tokens"
        raise refused(path, f"{what}, but the list vocab is missing or has fewer tokens")
    names = _names(file.values.get("special_tokens"), controls, path)
    tokens = [_token(entry, rank, path) for rank, entry in enumerate(entries[: vocab - controls])]
    return from_ranks(tokens, names, pattern=pattern, begin=BEGIN, controls_first=True, path=path)


def _names(listed: object, count: int, path: str) -> list[str]:
    """Return the names of the control tokens in the order of their ids."""
    if listed is None:
        names: list[Any] = list(UNLISTED)[:count]
    elif isinstance(listed, list):
        names = [
            entry.get("token_str") if isinstance(entry, dict) and entry.get("rank") == i else None
            for i, entry in enumerate(listed)
        ]
    else:
        raise refused(path, f"special_tokens is {short(listed)}, expected a list")
    if len(names) > count or not all(isinstance(name, str) for name in names):
        raise refused(path, f"special_tokens is not a list of at most {count} tokens in the order of their ranks")
    names += [f"<SPECIAL_{i}>" for i in range(len(names), count)]
    check_special(names, path)
    if len(set(names)) < count:
        raise refused(path, "two tokens in special_tokens have the same name")
    return names


def _token(entry: Any, rank: int, path: str) -> bytes:
    if not isinstance(entry, dict) or entry.get("rank") != rank:
        raise refused(path, f"item {rank} of vocab does not have rank {rank}")
    try:
        return base64.b64decode(entry.get("token_bytes", ""), validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise refused(path, f"token_bytes of the token with rank {rank} is not base64") from None
