"""Limits that keep a bad tokenizer file cheap. Real files stay far below all of them."""

from collections.abc import Iterable

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.strict_json import short

MOST_TOKENS = 500_000  # Gemma 3 has 262,145 tokens.
MOST_SPECIAL = 100_000  # Gemma 3 has 6,415 tokens outside its vocabulary.
LONGEST_SPECIAL = 1_000  # characters; the longest known name has fewer than 100


def check_special(names: Iterable[str], path: str) -> None:
    """Refuse too many control tokens, or names that are too long to search a text for."""
    names = list(names)
    if len(names) > MOST_SPECIAL:
        raise refused(path, f"{len(names):,} control tokens, more than {MOST_SPECIAL:,}")
    longest = max(names, key=len, default="")
    if len(longest) > LONGEST_SPECIAL:
        size = f"{len(longest):,} characters, more than {LONGEST_SPECIAL:,}"
        raise refused(path, f"the name of a control token, {short(longest)}, has {size}")


def check_count(tokens: int, path: str) -> None:
    """Refuse a vocabulary that is too large to be one."""
    if tokens > MOST_TOKENS:
        raise refused(path, f"a vocabulary of {tokens:,} tokens, more than {MOST_TOKENS:,}")
