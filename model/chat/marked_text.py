"""Strings that remember which of their characters were quoted from a message.

A chat template writes control tokens and quotes messages, and a message may spell the name of a control token. After
rendering, the marks tell whether the template or a message wrote a character. A template can use a marked string like
any str: `==`, `in` and `split` give the usual results. Slices, splits and concatenations keep each character's mark.
For any other operation, if an operand has a quoted character, we mark the whole result as quoted.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import markupsafe

QUOTED = b"\1"


class MarkedText(str):
    """A str with a mark for each of its characters: 1 if it was quoted from a message, 0 if the template wrote it.

    >>> text = "<s>" + quoted("a <s> b").upper()
    >>> text, marks_of(text)
    ('<s>A <S> B', b'\\x00\\x00\\x00\\x01\\x01\\x01\\x01\\x01\\x01\\x01')
    """

    __slots__ = ("_marks",)
    _marks: bytes

    def __new__(cls, base: object = "") -> Any:
        text = base if isinstance(base, str) else spread_quotes(str(base), base)
        return cls._with_marks(plain(text), marks_of(text))

    @classmethod
    def _with_marks(cls, text: str, marks: bytes) -> Any:
        text_with_marks = str.__new__(cls, text)
        text_with_marks._marks = marks
        return text_with_marks

    def _operand(self, text: Any) -> Any:
        """Prepare another string to be joined with this one: escape it if this string is HTML."""
        return text

    def _base(self) -> str:
        """Return the string without marks, as a str, or as a markupsafe.Markup if it is HTML."""
        return plain(self)

    def __str__(self) -> Any:
        return self

    def __add__(self, operand: Any) -> Any:
        if not isinstance(operand, str):
            return NotImplemented
        operand = self._operand(operand)
        return self._with_marks(plain(self) + plain(operand), self._marks + marks_of(operand))

    def __radd__(self, operand: Any) -> Any:
        if not isinstance(operand, str):
            return NotImplemented
        operand = self._operand(operand)
        return self._with_marks(plain(operand) + plain(self), marks_of(operand) + self._marks)

    def __mul__(self, count: SupportsIndex) -> Any:
        return self._with_marks(plain(self) * count, self._marks * count)

    def __rmul__(self, count: SupportsIndex) -> Any:
        return self * count

    def __mod__(self, values: Any) -> Any:
        return spread_quotes(self._base() % values, self, values)

    def __rmod__(self, text: Any) -> Any:
        return spread_quotes(text % (plain(self),), self) if isinstance(text, str) else NotImplemented

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        if isinstance(place, slice):
            return self._with_marks(plain(self)[place], self._marks[place])
        return self._with_marks(plain(self)[place], self._marks[place : place.__index__() + 1 or None])

    def __iter__(self) -> Iterator[Any]:
        return (self[i : i + 1] for i in range(len(self)))

    def lstrip(self, chars: str | None = None, /) -> Any:
        return self[len(self) - len(plain(self).lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Any:
        return self[: len(plain(self).rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> Any:
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str) -> Any:
        return self[len(prefix) if self.startswith(prefix) else 0 :]

    def removesuffix(self, suffix: str) -> Any:
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self[:]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._parts(plain(self).split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._parts(plain(self).rsplit(sep, maxsplit), sep)

    def _parts(self, parts: Sequence[str], sep: str | None) -> list[Any]:
        """Return consecutive parts of this string as marked strings, with the marks of their characters.

        The parts are separated by `sep`, or by white space if `sep` is None.
        """
        text, at, marked = plain(self), 0, []
        for part in parts:
            at = at if sep is not None else text.find(part, at)
            marked.append(self[at : at + len(part)])
            at += len(part) + len(sep or "")
        return marked

    def splitlines(self, keepends: bool = False) -> list[Any]:
        at, lines = 0, []
        for line, whole_line in zip(plain(self).splitlines(), plain(self).splitlines(keepends=True), strict=True):
            lines.append(self[at : at + len(whole_line if keepends else line)])
            at += len(whole_line)
        return lines

    def partition(self, sep: str, /) -> tuple[Any, Any, Any]:
        at = self.find(sep) if sep in self else len(self)
        plain(self).partition(sep)  # this raises ValueError for an empty `sep`
        return self[:at], self[at : at + len(sep)], self[at + len(sep) :]

    def rpartition(self, sep: str, /) -> tuple[Any, Any, Any]:
        head, middle, tail = plain(self).rpartition(sep)
        return self[: len(head)], self[len(head) : len(head) + len(middle)], self[len(self) - len(tail) :]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        new = self._operand(new)
        text = plain(self).replace(plain(old), plain(new), count)
        most = count.__index__()
        places = [match.span() for match in re.finditer(re.escape(old), plain(self))]
        places = places if most < 0 else places[:most]
        begins = [0, *(end for _, end in places)]
        ends = [*(begin for begin, _ in places), len(self)]
        parts = (self._marks[begin:end] for begin, end in zip(begins, ends, strict=True))
        return self._with_marks(text, marks_of(new).join(parts))

    def join(self, texts: Iterable[Any], /) -> Any:
        texts = [self._operand(text) for text in texts]
        return self._with_marks(plain(self).join(texts), self._marks.join(map(marks_of, texts)))

    def _recased(self, text: str) -> Any:
        # Changing case turns a character into one or more. If the length stays the same, no character has moved.
        return (
            self._with_marks(text, self._marks)
            if len(text) == len(self)
            else self._with_marks(text, _spread(text, self._marks))
        )

    def lower(self) -> Any:
        return self._recased(plain(self).lower())

    def upper(self) -> Any:
        return self._recased(plain(self).upper())

    def title(self) -> Any:
        return self._recased(plain(self).title())

    def capitalize(self) -> Any:
        return self._recased(plain(self).capitalize())

    def swapcase(self) -> Any:
        return self._recased(plain(self).swapcase())

    def casefold(self) -> Any:
        return self._recased(plain(self).casefold())


def _quoting(name: str) -> Callable[..., Any]:
    def quoting(self: MarkedText, *args: Any, **named: Any) -> Any:
        return spread_quotes(getattr(self._base(), name)(*args, **named), self, args, named)

    quoting.__name__ = name
    return quoting


class MarkedMarkup(MarkedText, markupsafe.Markup):
    """A marked string of HTML, for example from one of Jinja's filters `escape` and `safe`.

    A string that is joined with a `MarkedMarkup` is escaped first.
    """

    __slots__ = ()

    def __new__(cls, base: object = "") -> Any:
        return super().__new__(cls, base.__html__() if hasattr(base, "__html__") else base)  # pyright: ignore[reportAttributeAccessIssue]

    def __html__(self) -> Any:
        return self

    def _operand(self, text: Any) -> Any:
        return escape(text)

    def _base(self) -> str:
        return markupsafe.Markup(plain(self))

    @classmethod
    def escape(cls, s: Any) -> Any:
        return escape(s)


def escape(value: Any) -> MarkedMarkup:
    """Replace each character that HTML reserves with an entity. The entity gets the mark of the character."""
    if hasattr(value, "__html__"):
        return MarkedMarkup(value)
    text = value if isinstance(value, str) else spread_quotes(str(value), value)
    entities = [(match.start(), str(markupsafe.escape(match[0]))) for match in re.finditer("[&<>'\"]", plain(text))]
    marks, at, pieces = marks_of(text), 0, []
    for place, entity in entities:
        pieces += [marks[at:place], marks[place : place + 1] * len(entity)]
        at = place + 1
    return MarkedMarkup._with_marks(str(markupsafe.escape(plain(text))), b"".join([*pieces, marks[at:]]))


for _name in ("center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"):
    setattr(MarkedText, _name, _quoting(_name))


def plain(text: str) -> str:
    """Return `text` as a str without marks."""
    return str.__str__(text)


def marks_of(text: str) -> bytes:
    """Return the marks of a string, one byte per character. The marks of a plain str are 0."""
    return text._marks if isinstance(text, MarkedText) else bytes(len(text))


def quoted(text: str) -> MarkedText:
    """Return `text` with all characters marked as quoted."""
    return MarkedText._with_marks(text, QUOTED * len(text))


def marked(text: str, marks: bytes | None = None) -> MarkedText:
    """Return `text` as a MarkedText with `marks`, or with its own marks if `marks` is None."""
    return MarkedText._with_marks(plain(text), marks_of(text) if marks is None else marks)


def _spread(text: str, marks: bytes) -> bytes:
    return (QUOTED if QUOTED in marks else b"\0") * len(text)


def is_quoted(value: Any) -> bool:
    """Return whether a value contains a quoted character, at any depth of lists and dicts."""
    pending = [value]
    while pending:
        match pending.pop():
            case MarkedText() as text:
                if QUOTED in text._marks:
                    return True
            case dict() as entries:
                pending += [*entries.keys(), *entries.values()]
            case list() | tuple() as entries:
                pending += entries
    return False


def spread_quotes(result: Any, *operands: Any) -> Any:
    """Mark all strings in `result` as quoted if any operand contains a quoted character."""
    match result:
        case str():
            kind = MarkedMarkup if hasattr(result, "__html__") else MarkedText
            return kind._with_marks(plain(result), QUOTED * len(result)) if is_quoted(operands) else result
        case list() | tuple():
            return type(result)(spread_quotes(entry, *operands) for entry in result)
    return result


def quote_all(value: Any) -> Any:
    """Mark every string in a JSON value as quoted, including the keys."""
    match value:
        case str():
            return quoted(value)
        case dict():
            return {quoted(key): quote_all(entry) for key, entry in value.items()}
        case list():
            return [quote_all(entry) for entry in value]
    return value


def lengths_of(marks: bytes) -> list[int]:
    """Return the lengths of the runs of equal marks. The first run has marks 0, and may have length 0.

    >>> lengths_of(b"\\0\\0\\1\\0"), lengths_of(b"\\1\\1")
    ([2, 1, 1], [0, 2])
    """
    ends = [match.end() for match in re.finditer(rb"\x00+|\x01+", marks)]
    if marks[:1] == QUOTED:
        ends.insert(0, 0)
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def marks_from(lengths: Iterable[int]) -> bytes:
    """Return the marks with these run lengths. This is the inverse of `lengths_of`.

    >>> marks_from([2, 1, 1])
    b'\\x00\\x00\\x01\\x00'
    """
    return b"".join(bytes([i % 2]) * length for i, length in enumerate(lengths))
