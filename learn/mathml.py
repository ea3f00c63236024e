"""Typesets the formulas of docstrings in MathML, which browsers draw and screen readers read aloud.

A formula is written as in a docstring: `y_i = g_i x_i / sqrt(mean_j(x_j^2) + eps)`. A space means multiplication. A
slash divides the product on its left by the one factor on its right. Words that are not part of a formula stay text.
"""

import re
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from typing import NamedTuple

GREEK = {"theta": "θ", "eps": "ε", "alpha": "α", "beta": "β", "lambda": "λ", "pi": "π"}
SYMBOLS = {"<-": "←", "->": "→", "<=": "≤", ">=": "≥", "|>": "▷", "...": "…", "+-": "±", "-": "−", "||": "∥"}
RELATIONS = {"=", "~", "<-", "->", "<=", ">=", "|>", "<", ">", ",", ";", ":", "...", "…", "∈"}
OPERATORS = {"=", "~", "<-", "->", "<=", ">=", "<", ">", "+", "-", "/", "^", "//", "+-", "∈"}
LIMITS = {"sum": "∑", "max": "max", "min": "min", "argmax": "argmax", "argmin": "argmin"}  # the index is written below
PREFIXES = {*LIMITS, "mean", "log", "diag", "tr"}  # functions of the next factor, if no parenthesis follows
SPACE, WIDE = '<mspace width="0.17em"/>', '<mspace width="1em"/>'
TOKEN = re.compile(
    r"""(?P<verbatim>`[^`]*`|"[^"]*"|https://[\w./-]*[\w/])|(?P<number>\d+(?:,\d{3})*(?:\.\d+)?)"""
    r"""|(?P<word>[^\W\d_]\w*(?:[-'][^\W\d_]\w*)*)|(?P<mark><-|->|<=|>=|\|>|\|\||//|\.\.\.|\+-|\S)"""
)
PUNCTUATION = {",", ".", ";", ":", "(", ")", "...", "…", "/", "&"}
PAIRS = {"(": ")", "[": "]", "{": "}"}


class Token(NamedTuple):
    """A word, number or mark of a formula, and the spaces before it."""

    kind: str
    text: str
    spaces: int


class Element(NamedTuple):
    """A part of a formula: a factor ("math"), an operator ("mark") or prose ("text").

    A group in parentheses and a function with arguments, such as `exp(x)`, have parts: if one is too long for a line,
    the line can break between its parts.
    """

    kind: str
    markup: str
    spaces: int = 0
    tall: bool = False
    parts: tuple["Element", ...] = ()
    inner: str = ""  # a group without its parentheses


def typeset(text: str) -> str:
    """Return a formula as inline HTML. A browser can break it after `=`, before a sign or a group, and in prose.

    >>> typeset("x_i")
    '<math displaystyle="true"><mrow><msub><mi>x</mi><mi>i</mi></msub></mrow></math>'
    >>> typeset("y = 2 x + b").count("<math")
    3
    >>> typeset("the paper, Meta's checkpoints")
    "the paper, Meta's checkpoints"
    """
    if is_prose(text):
        return escape(text, quote=False)
    html, run = "", []
    for element in _parentheses_of_prose(list(_broken_up(_Parser(text).sequence()))):
        factor = element.markup == _OPENING and run and run[-1].kind == "math"
        breakable = run and (
            run[-1].markup in _BREAKS_AFTER or (element.spaces and (factor or element.markup in _BREAKS_BEFORE))
        )
        if run and (element.kind == "text" or breakable):
            html, run = html + _inline(run), []
        if html and element.spaces and not run:
            near = element.kind == "mark" or html.endswith("</mo></mrow></math>")
            html += " " if element.spaces == 1 or near else " &emsp;"
        if element.kind == "text":
            html += element.markup
        else:
            run.append(element)
    return html + (_inline(run) if run else "")


def block(text: str) -> str:
    """Split a text at each run of four or more spaces. Returns each part as a separate block of MathML.

    >>> block("m = 1    n = 2").count('<math display="block">')
    2
    """
    return "".join(
        f'<math display="block">{_row(_Parser(formula).sequence())}</math>' for formula in re.split(r" {4,}", text)
    )


def is_prose(text: str) -> bool:
    """Return whether a text has words and no mathematics.

    >>> is_prose("device i gets"), is_prose("64 of a row"), is_prose("(0, 1), (2, 3)"), is_prose("w (p - e_y)")
    (True, True, False, False)
    """
    tokens = list(_tokens(text))
    if len(tokens) == 1 and re.search(r"\D\d", text):  # a name such as q8
        return True
    words = [token for token in tokens if _is_word(token)]
    plain = [token for token in tokens if token.kind in ("verbatim", "number") or token.text in PUNCTUATION]
    letters = [token for token in tokens if token.kind == "word" and len(token.text) == 1]
    functions = any(a.kind == "word" and b.text == "(" and not b.spaces for a, b in pairwise(tokens))
    return bool(words) and len(words) + len(plain) + len(letters) == len(tokens) and not functions


def _tokens(text: str) -> Iterator[Token]:
    end = 0
    for match in TOKEN.finditer(text):
        yield Token(str(match.lastgroup), match[0], match.start() - end)
        end = match.end()


def _is_word(token: Token) -> bool:
    """Return whether a token is a word of prose.

    A function such as `sqrt` and a variable such as `x`, `W_o`, `dx_i` or `s0` are not words of prose.
    """
    base = token.text.partition("_")[0]
    if token.kind != "word" or token.text in GREEK or base in LIMITS or token.text in PREFIXES:
        return False
    return not _is_variable(token.text)


def _is_variable(word: str) -> bool:
    base, _, index = word.partition("_")
    return (
        "_" not in index
        and bool(re.fullmatch(r"d?[^\W\d_]|[^\W\d_]\d", base))
        and not ("_" in word and base[-1].isdigit())
    )


class _Parser:
    def __init__(self, text: str):
        self.tokens = list(_tokens(text))
        self.at = 0

    def _next(self, ahead: int = 0) -> Token:
        i = self.at + ahead
        return self.tokens[i] if 0 <= i < len(self.tokens) else Token("end", "", 1)

    def sequence(self, closing: str = "", depth: int = 0) -> list[Element]:
        """Parse up to `closing`, which stays unread."""
        elements: list[Element] = []
        while self._next().kind != "end" and self._next().text != closing:
            token = self._next()
            if token.text == "/" and elements and elements[-1].kind == "math":
                elements = self._fraction(elements, depth)
            elif token.text == "//":
                elements = self._floor(elements, depth)
            else:
                elements.append(self._element(depth))
        return elements

    def _fraction(self, elements: list[Element], depth: int) -> list[Element]:
        slash = self._next()
        self.at += 1
        first = len(elements) - 1
        while slash.spaces and first and elements[first - 1].kind == "math":
            first -= 1
        numerator, below = elements[first:], self._denominator(depth)
        simple = not any(element.tall or element.parts for element in (*numerator, below))
        if depth and simple:
            return [*elements, Element("mark", "<mo>/</mo>", slash.spaces), below]
        top = numerator[0].inner if len(numerator) == 1 and numerator[0].inner else _row(numerator)
        markup = f"<mfrac>{top}{below.inner or _row([below])}</mfrac>"
        return [*elements[:first], Element("math", markup, numerator[0].spaces, tall=True)]

    def _floor(self, elements: list[Element], depth: int) -> list[Element]:
        self.at += 1
        first = len(elements)
        while first and elements[first - 1].kind == "math":
            first -= 1
        left, slash, right = (Element("mark", f"<mo>{mark}</mo>", 1) for mark in "⌊/⌋")
        parts = [left, *elements[first:], slash, self._denominator(depth), right]
        return [*elements[:first], Element("math", _row(parts), 1)]

    def _denominator(self, depth: int) -> Element:
        """Parse the divisor after a slash: one factor.

        If it begins with a sum, the whole product after the sum belongs to it. A maximum or a logarithm has only one
        factor after it.
        """
        word = self._next()
        if word.text == "-":
            return Element("math", _row([self._element(depth + 1), self._element(depth + 1)]), word.spaces)
        name = word.text.partition("_")[0]
        factor = self._element(depth + 1)
        if name not in PREFIXES or factor.parts:
            return factor
        parts = [factor, self._element(depth + 1)]
        while name == "sum" and self._begins_factor():
            parts.append(self._element(depth + 1))
        return Element("math", _row(parts), word.spaces, tall=True)

    def _element(self, depth: int) -> Element:
        token = self._next()
        self.at += 1
        if token.kind == "verbatim":
            return Element("text", _verbatim(token.text), token.spaces)
        if token.kind == "number":
            return self._scripts(Element("math", f"<mn>{token.text}</mn>", token.spaces), depth)
        if token.kind == "word":
            return self._word(token, depth)
        if token.text in PAIRS:
            return self._scripts(self._group(token, depth), depth)
        if token.text in ("|", "||") or (token.text == "<" and not self._next().spaces):
            closing = {"<": ">"}.get(token.text, token.text)
            if self._closes(closing):
                return self._scripts(self._group(token, depth, closing), depth)
        if self.at > 1 and self.tokens[self.at - 2].kind == "word" and token.text in ",.;:" and self._prose_before():
            return Element("text", token.text, token.spaces)
        # Between two factors, where it may become the first or last mark of a line
        form = ' form="infix"' if token.spaces and self._next().spaces and token.text not in PUNCTUATION else ""
        if token.text in "+-" and not self._next().spaces:
            form = ' form="prefix"'
        return Element("mark", f"<mo{form}>{_symbol(token.text)}</mo>", token.spaces)

    def _begins_factor(self) -> bool:
        """Return whether the next token is a variable, a number or a group."""
        token = self._next()
        return token.kind == "number" or token.text in PAIRS or (token.kind == "word" and not _is_word(token))

    def _prose_before(self) -> bool:
        i = self.at - 2
        return _is_word(self.tokens[i]) and not self._near_operator(i)

    def _near_operator(self, i: int) -> bool:
        before = self.tokens[i - 1].text if i else ""
        after = self.tokens[i + 1] if i + 1 < len(self.tokens) else Token("end", "", 1)
        sign = after.spaces and i + 2 < len(self.tokens) and not self.tokens[i + 2].spaces and after.text in "+-"
        operator = after.text in OPERATORS and not sign
        return before in OPERATORS or operator or (after.text == "(" and not after.spaces)

    def _closes(self, closing: str) -> bool:
        """Return whether `closing` follows before the end of the surrounding group."""
        depth = 0
        for token in self.tokens[self.at :]:
            if token.text == closing and depth == 0:
                return True
            depth += (token.text in PAIRS) - (token.text in PAIRS.values())
            if depth < 0:
                return False
        return False

    def _group(self, opening: Token, depth: int, closing: str = "") -> Element:
        closing = closing or PAIRS[opening.text]
        inner = self.sequence(closing, depth + 1)
        self.at += 1
        left, right = {"<": ("⟨", "⟩"), "||": ("∥", "∥")}.get(opening.text, (opening.text, closing))
        tall = any(element.tall for element in inner)
        still = "" if tall else ' stretchy="false"'
        fences = [Element("mark", f"<mo{still}>{mark}</mo>") for mark in (left, right)]
        if opening.text in ("|", "||"):  # alone, the browser cannot tell a bar that opens from one that closes
            fences = [
                Element("mark", f'<mo form="{form}" fence="true" stretchy="{str(tall).lower()}">{left}</mo>')
                for form in ("prefix", "postfix")
            ]
        parts = (fences[0]._replace(spaces=opening.spaces), *inner, fences[1])
        breakable = parts if not tall and opening.text in PAIRS else ()
        bare = _row(inner) if opening.text == "(" else ""
        return Element("math", _row(parts), opening.spaces, tall, breakable, bare)

    def _word(self, token: Token, depth: int) -> Element:
        word, i = token.text, self.at - 1
        base, _, index = word.partition("_")
        primed = self._next().text == "'" and not self._next().spaces
        applied = self._next(primed).text == "(" and not self._next(primed).spaces
        if word == "in" and (self._next().text == "{" or re.fullmatch("[A-Z]", self._next().text)):
            return Element("mark", "<mo>∈</mo>", token.spaces)
        if word == "inf":
            return Element("math", "<mi>∞</mi>", token.spaces)
        if word == "a" and _is_word(self._next()) and not self._near_operator(i + 1):
            return Element("text", "a", token.spaces)
        if base == "sqrt" and applied:
            self.at += 1
            inner = self.sequence(")", depth + 1)
            self.at += 1
            return Element("math", f"<msqrt>{_row(inner)}</msqrt>", token.spaces, tall=True)
        if base in LIMITS and (index or self._next().text == "{" or word.endswith("_")):
            below = self._index(index)
            name = f'<mo lspace="0.2em" rspace="0.2em">{LIMITS[base]}</mo>'
            element = Element("math", f"<munder>{name}{below}</munder>", token.spaces, tall=True)
            return self._applied(element, depth)
        if word == "sum" and not applied and not self._begins_factor():
            return Element("text", word, token.spaces)
        if word in PREFIXES or base in ("mean", "softmax"):
            element = Element("math", f'<mi mathvariant="normal">{LIMITS.get(base, base)}</mi>', token.spaces)
            if index:
                element = element._replace(markup=f"<msub>{element.markup}{self._index(index)}</msub>")
            return self._applied(element, depth)
        if _is_variable(word) or word in GREEK:
            element = self._marked(Element("math", _variable(base), token.spaces))
            if index or word.endswith("_"):
                element = element._replace(markup=f"<msub>{element.markup}{self._index(index)}</msub>")
            return self._applied(self._scripts(element, depth), depth)
        if applied:
            element = self._marked(Element("math", f'<mi mathvariant="normal">{word}</mi>', token.spaces))
            return self._applied(element, depth)
        if self._near_operator(i):
            element = self._marked(Element("math", f"<mi>{escape(word, quote=False)}</mi>", token.spaces))
            if re.fullmatch("[hij]{1,3}", index):
                element = element._replace(markup=f"<msub><mi>{base}</mi>{self._index(index)}</msub>")
            return self._scripts(element, depth)
        return Element("text", escape(word, quote=False), token.spaces)

    def _marked(self, element: Element) -> Element:
        """Add the mark after a variable: a prime, a hat, a star as in `x*`, or a sign as in `s+`."""
        token, after = self._next(), self._next(1)
        ends = after.spaces or after.text in (")", ",", "|", "", "_")
        if token.spaces:
            return element
        if token.text == "'":
            self.at += 1
            return element._replace(markup=f'<msup>{element.markup}<mo lspace="0" rspace="0">′</mo></msup>')
        if token.text == "^" and ends:
            self.at += 1
            element = element._replace(markup=f'<mover accent="true">{element.markup}<mo>^</mo></mover>')
            if self._next().text == "_" and not self._next().spaces:
                self.at += 1
                index = self._next().text
                self.at += 1
                return element._replace(markup=f"<msub>{element.markup}{self._index(index)}</msub>")
            return element
        if token.text in ("*", "+", "-") and ends and after.text != "_":
            self.at += 1
            sign = token.text.replace("-", "−")
            return element._replace(markup=f"<msup>{element.markup}<mo>{sign}</mo></msup>")
        return element

    def _index(self, index: str) -> str:
        """Return the index that follows `x_`: a word, one or more letters, or a group in braces."""
        if not index:
            opening = self._next()
            self.at += 1
            inner = self.sequence(PAIRS.get(opening.text, ""), 1)
            self.at += 1
            return _row(inner)
        if (index.isalpha() and len(index) > 3) or index in ("up", *GREEK):
            return f"<mtext>{GREEK.get(index, index)}</mtext>"
        letters = [f"<mn>{letter}</mn>" if letter.isdigit() else f"<mi>{letter}</mi>" for letter in index]
        return letters[0] if len(letters) == 1 else f"<mrow>{''.join(letters)}</mrow>"

    def _scripts(self, element: Element, depth: int) -> Element:
        """Add the exponent and the index that follow without a space."""
        while self._next().text in ("^", "_") and not self._next().spaces:
            tag = "msup" if self._next().text == "^" else "msub"
            self.at += 1
            sign = ""
            if self._next().text == "-":
                sign = "<mo>−</mo>"
                self.at += 1
            if self._next().text == "(":
                self.at += 1
                inner = _row(self.sequence(")", 1))
                self.at += 1
                inner = f'<mrow><mo stretchy="false">(</mo>{inner}<mo stretchy="false">)</mo></mrow>' if sign else inner
            else:
                token = self._next()
                self.at += 1
                text = GREEK.get(token.text, token.text)
                inner = f"<mn>{text}</mn>" if token.kind == "number" else f"<mi>{escape(text)}</mi>"
            script = f"<mrow>{sign}{inner}</mrow>" if sign else inner
            element = Element("math", f"<{tag}>{element.markup}{script}</{tag}>", element.spaces, element.tall)
        return element

    def _applied(self, element: Element, depth: int) -> Element:
        """Add the arguments of a function, in parentheses that follow without a space."""
        if self._next().text not in ("(", "[") or self._next().spaces:
            return element
        opening = self._next()
        self.at += 1
        group = self._group(opening, depth)
        parts = (element, *group.parts) if group.parts else ()
        call = Element("math", f"<mrow>{element.markup}{group.markup}</mrow>", element.spaces, group.tall, parts)
        return self._scripts(call, depth)


def _symbol(mark: str) -> str:
    return escape(SYMBOLS.get(mark, mark))


_BREAKS_AFTER = {f"<mo{form}>{_symbol(mark)}</mo>" for mark in RELATIONS for form in ("", ' form="infix"')}
_OPENING, _BRACKET = '<mo stretchy="false">(</mo>', '<mo stretchy="false">[</mo>'
_BREAKS_BEFORE = {f'<mo form="infix">{_symbol(mark)}</mo>' for mark in "+-"}


def _variable(name: str) -> str:
    """Return the MathML of a variable: a letter, a Greek letter, a letter with a digit as index (`s0`), or `dx`."""
    if name in GREEK:
        return f"<mi>{GREEK[name]}</mi>"
    if len(name) == 2 and name[1].isdigit():
        return f"<msub><mi>{name[0]}</mi><mn>{name[1]}</mn></msub>"
    if len(name) == 2:
        return f"<mrow><mi>d</mi><mi>{name[1]}</mi></mrow>"
    return f"<mi>{name}</mi>"


def _verbatim(text: str) -> str:
    if text.startswith("`"):
        return f"<code>{escape(text[1:-1], quote=False)}</code>"
    if text.startswith("https://"):
        return f'<a href="{text}">{text.removeprefix("https://")}</a>'
    return escape(text, quote=False)


def _row(elements: "list[Element] | tuple[Element, ...]") -> str:
    """Put elements side by side, with a thin space between factors."""
    markup, before = "", "mark"
    for element in elements:
        thin = (
            element.kind == before == "math"
            or (element.kind == "text" and before != "mark")
            or (before == "text" and element.kind == "math")
        )
        apart = element.spaces > 1 and (element.kind != "mark" or element.markup in (_OPENING, _BRACKET))
        markup += WIDE if apart else SPACE * thin
        markup += f"<mtext>{element.markup}</mtext>" if element.kind == "text" else element.markup
        before = element.kind
    return f"<mrow>{markup}</mrow>"


def _inline(elements: list[Element]) -> str:
    first, *others = elements
    if first.markup in _BREAKS_BEFORE:  # the text's own space is before it
        first = first._replace(markup=first.markup.replace(">", ' lspace="0" rspace="0.25em">', 1))
    elements = [first, *others]
    if elements[-1].markup.startswith('<mo form="infix">'):
        last = elements[-1].markup.replace(">", ' lspace="0.25em" rspace="0">', 1)
        elements[-1] = elements[-1]._replace(markup=last)
    return f'<math displaystyle="true">{_row(elements)}</math>'


def _broken_up(elements: "list[Element] | tuple[Element, ...]") -> Iterator[Element]:
    """Replace each group and each applied function by its parts, so that a line can break between the parts."""
    for element in elements:
        if element.parts:
            first, *others = element.parts
            yield from _broken_up([first._replace(spaces=element.spaces), *others])
        else:
            yield element


def _parentheses_of_prose(elements: list[Element]) -> list[Element]:
    """Turn a parenthesis next to prose into prose, so that no line breaks between the two."""
    kinds = ["mark", *(element.kind for element in elements), "mark"]
    changed = []
    for before, element, after in zip(kinds, elements, kinds[2:], strict=False):
        mark = re.sub("<[^>]*>", "", element.markup) if element.kind == "mark" else ""
        prose = (mark == "(" and after == "text") or (mark == ")" and before == "text")
        changed.append(element._replace(kind="text", markup=mark) if prose else element)
    return changed
