"""Renders a chat template: the program that `model.chat.template_process` starts, by path.

A template is a program that comes with a model, from someone who may not be trusted. It gets nothing worth having: a
sandbox keeps it from Python, limits end its process if it computes or holds too much, and there is no model, no
environment and no file that it could write. Nor does it get other people's conversations: this process reads one
template, and forks for each rendering, so that whatever a rendering does to memory ends with it.

The process writes a newline to stdout once it is ready. Then it reads messages from stdin, each of which begins with
its length in 8 bytes: first the template, then for each rendering its variables as JSON. It answers each of these with
the exit status of the rendering's process, in 8 bytes, and a message of JSON: `{"text": ...}` or `{"error": ...}`. It
ends when stdin does.

Templates may use the functions that Hugging Face transformers gives them, and no others.
"""

import gc
import json
import os
import resource
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.utils
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 512 << 20  # bytes of address space, of which Python takes a tenth
LONGEST = 4_000_000  # characters of a rendered conversation: about a million tokens


class Refusal(jinja2.TemplateError):
    """An error that a template raises about its conversation."""


class TooLong(Exception):
    """An error about more text than any model could read."""


class Generation(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks a model's text for training.

    Here it gives its content.
    The tag has a scope of its own, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller) -> str:
        return caller()


class Namespace(jinja2.utils.Namespace):
    """A namespace that takes no name with an underscore in front, as in transformers."""

    def __init__(*args, **kwargs):  # without named parameters, which would be names that no template can use
        self, *given = args
        names = dict(*given, **kwargs)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name, value) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")


def compiled(source: str) -> jinja2.Template:
    """Compile a template. Raises whatever one can, since constant parts of it are computed here."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now, "namespace": Namespace}
    return environment.from_string(source)


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render a template. Raises whatever one can."""
    parts, length = [], 0
    for part in template.generate(**variables):
        length += len(part)
        if length > LONGEST:
            raise TooLong
        parts.append(part)
    return "".join(parts)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Format a value as JSON, without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message) -> NoReturn:
    raise Refusal(str(message))


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def explained(error: Exception) -> str:
    """Say what a template did, as the end of a sentence about it."""
    match error:
        case Refusal():
            return f"refuses this conversation: {error}"
        case jinja2.TemplateSyntaxError():
            return f"is not a template: line {error.lineno}: {error.message}"
        case jinja2.exceptions.SecurityError():
            return f"does what no template may: {error}"
        case MemoryError():
            return f"takes more than {MEMORY >> 20} MB of memory"
        case RecursionError():
            return "is nested or calls itself too deeply"
        case TooLong():
            return f"makes more than {LONGEST:,} characters of this conversation"
    return f"fails: {type(error).__name__}: {error}"  # A template's mistakes can raise anything.


def answer(template: jinja2.Template | Exception, variables: bytes) -> dict[str, str]:
    """Answer a request with the text, or with an error of the template, such as the one that compiling it raised."""
    try:
        if isinstance(template, Exception):
            raise template
        return {"text": render(template, json.loads(variables))}
    except Exception as error:
        return {"error": explained(error)}


def limit_this_process(cpu_seconds: int, *, for_good: bool) -> dict[int, tuple[int, int]]:
    """Let this process compute for so many seconds, hold some memory, write no file, and start no other process.

    Returns the limits that were in force. Those that are not `for_good` can be lifted.
    """
    before = {}
    for limit, value in {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
    }.items():
        before[limit] = resource.getrlimit(limit)
        hard = before[limit][1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limit, (value, value if for_good else hard))
        except ValueError:
            if limit != resource.RLIMIT_AS:  # macOS has no limit of memory; that of seconds bounds what is held
                raise
    return before


def in_own_process(template: jinja2.Template | Exception, variables: bytes, cpu_seconds: int) -> tuple[int, bytes]:
    """Answer a request in a process that ends with it; returns that one's exit status, and what it wrote until then."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        # The child gets neither the next request nor a way to answer it.
        for unneeded in (reads, 0, 1):
            os.close(unneeded)
        limit_this_process(cpu_seconds, for_good=True)
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(json.dumps(answer(template, variables)).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def read_message() -> bytes | None:
    """Read a message from stdin; None at its end."""
    length = sys.stdin.buffer.read(8)
    return sys.stdin.buffer.read(int.from_bytes(length)) if len(length) == 8 else None


def main() -> None:
    cpu_seconds = int(sys.argv[2])
    before = limit_this_process(cpu_seconds, for_good=False)
    output = sys.stdout.buffer
    output.write(b"\n")
    output.flush()
    source = read_message()
    if source is None:
        return
    try:
        template = compiled(source.decode(errors="surrogatepass"))
    except Exception as error:
        template = error
    for limit in (resource.RLIMIT_CPU, resource.RLIMIT_NPROC):  # Each child is limited anew.
        resource.setrlimit(limit, before[limit])
    gc.freeze()  # Collections in a child would otherwise copy what it shares with this process.
    while (variables := read_message()) is not None:
        try:
            status, said = in_own_process(template, variables, cpu_seconds)
        except OSError:
            sys.exit(os.EX_TEMPFAIL)
        output.write(status.to_bytes(8, signed=True) + len(said).to_bytes(8) + said)
        output.flush()


if __name__ == "__main__":
    main()
