"""Jinja's sandbox for chat templates, which keeps the marks of quoted characters (see `marked_text`).

Plain Jinja loses the marks in some places. This environment keeps them in `~`, in blocks and macros, in methods of str
that take other strings, and in filters. If an operation does not tell which characters of its result come from a quoted
operand, we mark the whole result as quoted. So no operation can turn a quoted name into a control token.
"""

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.filters
import jinja2.runtime
import jinja2.utils
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from llamaspec.model.chat.marked_text import MarkedMarkup, MarkedText, escape, is_quoted, marked, plain, spread_quotes

# Filters that select, count or reorder values, and make no new strings.
PICKING = (
    *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items"),
    *("last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round", "select"),
    *("selectattr", "slice", "sort", "sum", "unique", "wordcount"),
)
BY_METHODS = ("capitalize", "lower", "replace", "trim", "upper")  # filters that only call a method of str
FIELD = re.compile(
    r"%(?:\((?P<key>[^)]*)\))?[-#0 +]*(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?[hlL]?(?P<kind>.)", re.S
)


class TemplateRefusal(jinja2.TemplateError):
    """An error that a template raises on purpose about its conversation."""


class GenerationTag(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks a model's text for training.

    We render the tag's content. Variables that are set inside the tag do not exist outside, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller) -> str:
        return caller()


class Namespace(jinja2.utils.Namespace):
    """A namespace that refuses names with a leading underscore, as transformers does."""

    def __init__(*args, **kwargs):  # without named parameters, a template may use any name
        self, *values = args
        names = dict(*values, **kwargs)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name, value) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the name {name!r}: names must not begin with _")


def text_of(value: Any) -> str:
    """Return the string that a template prints for a value.

    All characters of the result are marked as quoted if a string in the value has a quoted character.
    """
    return str(value) if isinstance(value, str) else spread_quotes(str(value), value)


def joined(values: Iterable[Any]) -> MarkedText:
    """Concatenate values to one marked string."""
    return marked("").join([text_of(value) for value in values])


def joined_markup(values: Iterable[Any]) -> MarkedText:
    """Concatenate values to one marked string, or to HTML if one of them is HTML."""
    values = list(values)
    return (MarkedMarkup() if any(hasattr(value, "__html__") for value in values) else marked("")).join(values)


class Macro(jinja2.runtime.Macro):
    """A macro, or the block of a `call` tag. Its result keeps the marks of quoted characters."""

    def _invoke(self, arguments: list[Any], autoescape: bool) -> str:
        text = self._func(*arguments)
        return MarkedMarkup(text) if autoescape else text


class Template(jinja2.Template):
    """A compiled template that keeps the marks when it concatenates strings."""

    @classmethod
    def _from_namespace(cls, environment, namespace, globals) -> jinja2.Template:
        namespace.update(str_join=joined, markup_join=joined_markup, escape=escape, Markup=MarkedMarkup, Macro=Macro)
        return super()._from_namespace(environment, namespace, globals)


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with the tags, filters and functions that transformers offers to templates."""

    intercepted_binops = frozenset("%")
    template_class = Template
    concat = staticmethod(joined)  # pyright: ignore[reportAssignmentType]

    def __init__(self):
        extensions = [GenerationTag, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_finalized)
        self.filters = {name: _marking(name, function) for name, function in self.filters.items()}
        self.filters |= {"join": join, "format": format_percent, "indent": indent, "string": text_of, "tojson": tojson}
        self.filters |= {"e": escape, "escape": escape, "forceescape": force_escape, "safe": MarkedMarkup}
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now, "namespace": Namespace}

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str) and not hasattr(left, "__html__"):
            return percent(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        method = super().wrap_str_format(value)
        if method is None:
            return None
        text: str = value.__self__
        nested = any("{" in (field[2] or "") for field in SandboxedFormatter(self).parse(plain(text)))
        as_a_whole, by_map = nested or hasattr(text, "__html__"), value.__name__ == "format_map"

        @wraps(method)
        def formatted(*args: Any, **named: Any) -> str:
            if as_a_whole or not is_quoted([text, args, named]):
                return spread_quotes(method(*args, **named), text, args, named)
            return self._formatted(text, () if by_map else args, args[0] if by_map else named)

        return formatted

    def _formatted(self, text: str, args: tuple[Any, ...], named: dict[str, Any]) -> str:
        """Format as str.format does. The text of a field is marked as quoted if the field's value is quoted."""
        formatter, pieces, next_field = SandboxedFormatter(self), [], 0
        for literal, field, specification, conversion in formatter.parse(plain(text)):
            pieces.append(spread_quotes(literal, text))
            if field is None:
                continue
            if re.match(r"\Z|[.[]", field):
                field, next_field = f"{next_field}{field}", next_field + 1
            value = formatter.convert_field(formatter.get_field(field, args, named)[0], conversion)
            pieces.append(spread_quotes(formatter.format_field(value, specification or ""), value))
        return joined(pieces)

    def call(self, context, obj, /, *args: Any, **named: Any) -> Any:
        if isinstance(obj, BuiltinMethodType):
            owner = obj.__self__
            # `join` may get a generator, in which we cannot look for marks, so we always join with marks.
            if type(owner) is str and (obj.__name__ == "join" or is_quoted([args, named])):
                obj = getattr(marked(owner), obj.__name__)
            elif isinstance(owner, bytes):  # bytes come from encoding a string, and have no marks
                return spread_quotes(super().call(context, obj, *args, **named), MarkedText._with_marks("?", b"\1"))
        return super().call(context, obj, *args, **named)


def _finalized(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else text_of(value)


def _marking(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter of Jinja so that the string it returns has marks."""
    if name in PICKING:
        return function
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def marking(*args: Any, **named: Any) -> Any:
        if name in BY_METHODS and isinstance(args[first], str):
            return function(*args[:first], marked_as(args[first]), *args[first + 1 :], **named)
        result = spread_quotes(function(*args, **named), args[first:], named)
        return marked_as(result) if hasattr(result, "__html__") else result

    return marking


def marked_as(text: str) -> MarkedText:
    """Return `text` as a MarkedText, or as a MarkedMarkup if it is HTML."""
    return MarkedMarkup(text) if hasattr(text, "__html__") else marked(text)


@jinja2.pass_environment
def join(environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    """Join the entries of a list to one string (the filter `join`)."""
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return marked_as(text_of(d)).join([text_of(entry) for entry in value])


def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indent the lines of a string (the filter `indent`)."""
    space = width if isinstance(width, str) else " " * width
    head, *lines = marked_as(s + "\n").splitlines()
    lines = [space + line if line or blank else line for line in lines]
    return (space if first else "") + marked("\n").join([head, *lines])


def format_percent(value: str, *args: Any, **named: Any) -> str:
    """Format values with `%` (the filter `format`)."""
    if args and named:
        raise jinja2.exceptions.FilterArgumentError("can't handle positional and keyword arguments at the same time")
    return percent(text_of(value), named or args)


def percent(text: str, values: Any) -> Any:
    """Format as the operator `%` does. The text of a field is marked as quoted if the field's value is quoted."""
    if not is_quoted([text, values]) or is_quoted(text):
        return spread_quotes(plain(text) % values, text, values)
    fields = [match for match in FIELD.finditer(plain(text)) if match["kind"] != "%"]
    if any("*" in (match["width"], match["precision"] or "") for match in fields):
        return spread_quotes(plain(text) % values, values)
    _ = plain(text) % values  # this raises an error if the values do not fit
    positional, pieces, at, count = values if isinstance(values, tuple) else (values,), [], 0, 0
    for match in FIELD.finditer(plain(text)):
        value: Any = ()
        if (key := match["key"]) is not None:
            value = {key: dict(values)[key]}
        elif match["kind"] != "%":
            value, count = (positional[count],), count + 1
        pieces += [text[at : match.start()], spread_quotes(match[0] % value, value)]
        at = match.end()
    return joined([*pieces, text[at:]])


def force_escape(value: Any) -> str:
    """Escape HTML, even in a string that is HTML already (the filter `forceescape`)."""
    return escape(marked(text_of(value)))


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Format a value as JSON, without the HTML escapes of Jinja's own filter."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return spread_quotes(text, value)


def raise_exception(message) -> NoReturn:
    raise TemplateRefusal(str(message))


def strftime_now(format: str) -> str:
    return spread_quotes(datetime.now().strftime(plain(format)), format)
