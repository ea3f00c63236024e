"""Limits on tokenizer files, so that a damaged or hostile file costs little time. Real files stay below all limits."""

from collections.abc import Iterable

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.strict_json import short

MOST_TOKENS = 500_000  # Gemma 3 has 262,145 tokens.
MOST_SPECIAL = 100_000  # Gemma 3 has 6,415 tokens outside its vocabulary.
LONGEST_SPECIAL = 1_000  # characters; the longest known name has fewer than 100


def check_special(names: Iterable[str], path: str) -> None:
    """Raise `CheckpointError` if there are too many control tokens, or if the name of a token is too long."""
    names = list(names)
    if len(names) > MOST_SPECIAL:
        raise refused(path, f"there are {len(names):,} control tokens, expected at most {MOST_SPECIAL:,}")
    longest = max(names, key=len, default="")
    if len(longest) > LONGEST_SPECIAL:
        size = f"{len(longest):,} characters, expected at most {LONGEST_SPECIAL:,}"
        raise refused(path, f"the name of a control token, {short(longest)}, has {size}")


def check_single_word(names: Iterable[str], path: str) -> None:
    """Raise `CheckpointError` if there are any `names` (of control tokens with single_word true).

    We find the name of a control token in a rendered conversation even within a word.
    """
    for name in names:
        raise refused(path, f"the control token {short(name)} has single_word true, which is not supported")


def check_count(tokens: int, path: str) -> None:
    """Raise `CheckpointError` if a vocabulary has more tokens than any real vocabulary."""
    if tokens > MOST_TOKENS:
        raise refused(path, f"the vocabulary has {tokens:,} tokens, expected at most {MOST_TOKENS:,}")
