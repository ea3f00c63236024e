"""Finds added tokens in a text, before the tokenizer splits the text into pieces and replaces its spaces with "▁".

This module has the search algorithms of two programs. Their results differ if two names overlap:

- `Leftmost` works like the tokenizers library (src/tokenizer/added_vocabulary.rs). It searches from left to right, and
  chooses the longest name at each position. A token may absorb the white space on either side, and may be restricted to
  whole words.
- `LongestFirst` works like llama.cpp (src/llama-vocab.cpp, `tokenizer_st_partition`). It finds the longest name (in
  bytes) in the whole text, then the next longest in the remaining text. If two names have the same length, it finds the
  one with the smaller id first. (llama.cpp sorts the names with std::sort. In GNU's library, this keeps the order of
  ids for up to 16 names. The order of more names is not defined.) A token may absorb the ASCII white space after it.

    >>> names = {"ab": Added(7, special=False), "bcd": Added(8, special=False)}
    >>> Leftmost(names).split("abcd"), LongestFirst(names).split("abcd")
    ([7, 'cd'], ['a', 8])

We look up names by binary search, so that many names cost little time.
"""

import heapq
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from llamaspec.model.tokenizers.tokenizer_config import Added

# White space in llama.cpp, and white space in the tokenizers library (without U+001C to U+001F).
ASCII_SPACES = "\t\n\v\f\r "
SPACES = (
    f"{ASCII_SPACES}\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
# A character of a word as Rust's regular expressions define it. Python's own \w also has numbers such as "²".
WORD = r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]"


class _Match(NamedTuple):
    begin: int
    end: int
    id: int


class _Names:
    """Names in alphabetical order. For each name, we store the longest other name that is a prefix of it."""

    def __init__(self, added: Mapping[str, Added]):
        self.names = sorted(name for name in added if name)
        self._longest = max(map(len, self.names), default=0)
        self._shorter: list[int] = []
        beginnings: list[int] = []  # indices of the names that are prefixes of the current name, the shortest first
        for at, name in enumerate(self.names):
            while beginnings and not name.startswith(self.names[beginnings[-1]]):
                beginnings.pop()
            self._shorter.append(beginnings[-1] if beginnings else -1)
            beginnings.append(at)
        self._starts = {name[:2] for name in self.names}
        firsts = "".join(sorted({re.escape(name[0]) for name in self.names}))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def places(self, text: str) -> Iterator[int]:
        """Yield each position in the text at which a name may begin, by the name's first two characters."""
        for first in self._first.finditer(text):
            begin = first.start()
            if text[begin : begin + 2] in self._starts or text[begin] in self._starts:
                yield begin

    def longest(self, text: str, begin: int) -> int:
        """Find the index of the longest name that occurs in the text at position `begin`; -1 if no name does.

        Let n be the last name in alphabetical order that is not greater than the text from `begin` on. Every name that
        occurs at `begin` is n or a prefix of n. So the search tries n, then the names that are prefixes of n, the
        longest first.
        """
        at = bisect_right(self.names, text[begin : begin + self._longest]) - 1
        while at >= 0 and not text.startswith(self.names[at], begin):
            at = self._shorter[at]
        return at

    def fitting(self, at: int, room: int) -> int:
        """Find the longest name of at most `room` characters: the name with index `at`, or a name that is its prefix.

        Returns the index of this name; -1 if no such name exists.
        """
        while at >= 0 and len(self.names[at]) > room:
            at = self._shorter[at]
        return at


class Leftmost:
    """Finds added tokens as the tokenizers library does: from left to right, the longest name at each position."""

    def __init__(self, added: Mapping[str, Added]):
        self.added = added
        self._names = _Names(added)

    def split(self, text: str) -> list[str | int]:
        """Split a text into the ids of added tokens and the non-empty texts between them."""
        return _parts(text, self._matches(text))

    def trimmed(self, text: str, *, after: str | None, before: str | None) -> str:
        """Remove the white space that the control tokens `after` and `before` absorb from a text between them.

        None means that there is a control token that absorbs nothing, or an end of the whole text. The library finds
        all added tokens before it removes white space. So an added token that consists of white space stays in the
        text, and the white space on its other side stays, too.
        """
        matches = list(self._matches(text))
        begin, end = 0, len(text)
        if after is not None:
            begin = min(end - len(text.lstrip(SPACES)), matches[0].begin if matches else end)
        if before is not None:
            end = max(begin, len(text.rstrip(SPACES)), matches[-1].end if matches else 0)
        return text[begin:end]

    def _matches(self, text: str) -> Iterator[_Match]:
        names = self._names
        end = after_name = 0
        for begin in names.places(text):
            if begin < after_name or (at := names.longest(text, begin)) < 0:
                continue
            token = self.added[name := names.names[at]]
            after_name = begin + len(name)
            if token.single_word and (_is_word(text[begin - 1 : begin]) or _is_word(text[after_name : after_name + 1])):
                continue
            if token.lstrip:
                while begin > end and text[begin - 1] in SPACES:
                    begin -= 1
            begin, end = max(begin, end), after_name
            if token.rstrip:
                while end < len(text) and text[end] in SPACES:
                    end += 1
            if begin < end or not token.lstrip:  # otherwise the token before has absorbed all of it
                yield _Match(begin, end, token.id)


class LongestFirst:
    """Finds added tokens as llama.cpp does: the longest name in the whole text first, then shorter names."""

    def __init__(self, added: Mapping[str, Added]):
        self.added = added
        self._names = _Names(added)
        names = self._names.names
        self._order = sorted(range(len(names)), key=lambda at: (-len(names[at].encode()), added[names[at]].id))
        self._ranks = {at: rank for rank, at in enumerate(self._order)}  # names with smaller ranks are found first

    def split(self, text: str) -> list[str | int]:
        """Split a text into the ids of added tokens and the non-empty texts between them."""
        return _parts(text, sorted(self._matches(text)))

    def trimmed(self, text: str, *, after: str | None, before: str | None) -> str:
        """Strip the white space at the start of `text` that `after`, the control token before it, absorbs.

        If `after` is None, we strip nothing. llama.cpp first searches for all tokens with longer names than `after`.
        White space in these tokens stays in the text. In llama.cpp, no token absorbs the white space before it, so
        `before` has no effect.
        """
        if after is None:
            return text
        longer = {token.id for name, token in self.added.items() if len(name.encode()) > len(after.encode())}
        begins = [match.begin for match in self._matches(text) if match.id in longer] if longer else []
        return text[min([len(text) - len(text.lstrip(ASCII_SPACES)), *begins]) :]

    def _matches(self, text: str) -> Iterator[_Match]:
        names = self._names
        longest = ((begin, names.longest(text, begin)) for begin in names.places(text))
        waiting = [(self._ranks[at], begin) for begin, at in longest if at >= 0]
        heapq.heapify(waiting)
        covered = bytearray(len(text))
        while waiting:
            rank, begin = heapq.heappop(waiting)
            if covered[begin]:
                continue
            at = self._order[rank]
            name = names.names[at]
            obstacle = covered.find(1, begin, begin + len(name))
            if obstacle < 0:
                end = begin + len(name)
                token = self.added[name]
                if token.rstrip:
                    while end < len(text) and text[end] in ASCII_SPACES and not covered[end]:
                        end += 1
                covered[begin:end] = b"\1" * (end - begin)
                yield _Match(begin, end, token.id)
            elif (shorter := names.fitting(at, obstacle - begin)) >= 0:
                heapq.heappush(waiting, (self._ranks[shorter], begin))


def _parts(text: str, matches: Iterator[_Match] | list[_Match]) -> list[str | int]:
    parts: list[str | int] = []
    end = 0
    for match in matches:
        if match.begin > end:
            parts.append(text[end : match.begin])
        parts.append(match.id)
        end = match.end
    return [*parts, text[end:]] if end < len(text) else parts


def _is_word(character: str) -> bool:
    import regex  # takes 10 ms, and only tokens of whole words need it

    return regex.match(WORD, character) is not None
