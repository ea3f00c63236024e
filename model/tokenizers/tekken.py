"""Mistral's `tekken.json`: byte strings and their ranks. Control tokens have the first ids.

The layout comes from https://github.com/mistralai/mistral-common, and the algorithm is `reference.byte_bpe` with the
file's own pattern. The vocabulary is cut off at a size that the file states. Files of the first versions do not
list their control tokens; control tokens without a name are called <SPECIAL_20> and so on.
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
MOST_OBJECTS = 2 * MOST_TOKENS  # a token is an object, and its text may have braces


def read_tekken(data: bytes, *, path: str) -> TiktokenTokenizer:
    """Read a tokenizer from the bytes of a tekken.json; `path` is for messages. Raises `CheckpointError`."""
    file = Fields(parse_object(data, path, most_objects=MOST_OBJECTS), path)
    config = Fields(file.object("config"), path)
    vocab, controls = config.integer("default_vocab_size"), config.integer("default_num_special_tokens")
    pattern = config.values.get("pattern")
    if not isinstance(pattern, str):
        raise refused(path, f"its pattern is {short(pattern)}, not a text")
    check_pattern(pattern, "config", path)
    check_count(vocab, path)
    entries = file.values.get("vocab")
    if not isinstance(entries, list) or not 0 <= vocab - controls <= len(entries) or controls < 0:
        raise refused(path, f"does not have the {vocab - controls:,} tokens beside {controls:,} control tokens")
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
        raise refused(path, f"its special_tokens are {short(listed)}, not a list")
    if len(names) > count or not all(isinstance(name, str) for name in names):
        raise refused(path, f"its special_tokens are not {count} names in the order of their ranks")
    names += [f"<SPECIAL_{i}>" for i in range(len(names), count)]
    check_special(names, path)
    if len(set(names)) < count:
        raise refused(path, "two of its special_tokens have the same name")
    return names


def _token(entry: Any, rank: int, path: str) -> bytes:
    if not isinstance(entry, dict) or entry.get("rank") != rank:
        raise refused(path, f"its vocab has no token of rank {rank} in its place")
    try:
        return base64.b64decode(entry.get("token_bytes", ""), validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise refused(path, f"the token of rank {rank} is not base64") from None
