"""Renders a chat template: the program that `model.chat.template` runs in a process of its own, by path.

A template is a program that comes with a model, from someone who may not be trusted. This process gives it nothing
worth having: a sandbox keeps it from Python, limits end the process if it computes or holds too much, and there is no
model, no environment and no file that it could write. The process lives for one rendering. It reads JSON from stdin.
It writes to stdout a newline once it is ready, and then JSON: `{"text": ...}` or `{"error": ...}`.

Templates may use the functions that Hugging Face transformers gives them, and no others.
"""

import json
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


def render(source: str, variables: dict[str, Any]) -> str:
    """Render a template. Raises whatever a template can."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now, "namespace": Namespace}
    parts, length = [], 0
    for part in environment.from_string(source).generate(**variables):
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


def answer(request: bytes) -> dict[str, str]:
    """Answer a request with the text, or with an error of the template."""
    try:
        return {"text": render(**json.loads(request))}
    except Refusal as error:
        return {"error": f"refuses this conversation: {error}"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"is not a template: line {error.lineno}: {error.message}"}
    except jinja2.exceptions.SecurityError as error:
        return {"error": f"does what no template may: {error}"}
    except MemoryError:
        return {"error": f"takes more than {MEMORY >> 20} MB of memory"}
    except RecursionError:
        return {"error": "is nested or calls itself too deeply"}
    except TooLong:
        return {"error": f"makes more than {LONGEST:,} characters of this conversation"}
    except Exception as error:  # A template's mistakes can raise anything.
        return {"error": f"fails: {type(error).__name__}: {error}"}


def limit_this_process(cpu_seconds: int) -> None:
    """Let this process compute for so many seconds, hold some memory, write no file, and start no other process."""
    for limit, value in {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
    }.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limit, (value, value))
        except ValueError:
            if limit != resource.RLIMIT_AS:  # macOS has no limit of memory; that of seconds bounds what is held
                raise


def main() -> None:
    limit_this_process(int(sys.argv[2]))
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    sys.stdout.buffer.write(json.dumps(answer(sys.stdin.buffer.read())).encode())


if __name__ == "__main__":
    main()
