"""Renders a chat template: the program that `model.chat.template_process` starts.

A template is a program that comes with a model, perhaps from an untrusted author. So a sandbox keeps the template away
from Python. The process ends if it takes too much time or memory. It has no model and no secrets in its environment,
and it must not write files. A template cannot see other conversations: this process serves one template and forks a
child for each rendering, so a rendering cannot change the memory of the next one.

The process writes a newline to stdout once it is ready, then reads messages from stdin. Each message begins with its
length in 8 bytes. The first message is the template. Every later message asks for a rendering: JSON with the template's
variables and the model's tokens. The answer is the exit status of the child, in 8 bytes, and a message of JSON:
`{"text": ..., "marks": ...}` (see `marked_text.lengths_of`) or `{"error": ...}`. The process ends at the end of stdin.

Templates may use the functions that Hugging Face transformers gives them, and no others.
"""

import gc
import json
import os
import resource
import sys
from typing import Any

import jinja2
import jinja2.exceptions

from llamaspec.model.chat.marked_text import MarkedText, lengths_of, marks_of, plain, quote_all
from llamaspec.model.chat.template_environment import Environment, TemplateRefusal, joined

MEMORY = 512 << 20  # bytes of address space; Python takes a tenth
LONGEST = 4_000_000  # characters of a rendered conversation: about a million tokens


class TooLong(Exception):
    """Raised when a template writes more text than any model could read."""


def compiled(source: str) -> jinja2.Template:
    """Compile a template. Compiling evaluates its constant parts, so it raises any error that rendering can raise."""
    return Environment().from_string(source)


def render(template: jinja2.Template, variables: dict[str, Any]) -> MarkedText:
    """Render a template. Raises any error that the template causes."""
    parts, length = [], 0
    for part in template.generate(**variables):
        length += len(part)
        if length > LONGEST:
            raise TooLong
        parts.append(part)
    return joined(parts)


def with_marks(request: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a request, with all strings marked as quoted except the model's tokens and the roles."""
    variables = quote_all(request["variables"])
    for message, received in zip(variables["messages"], request["variables"]["messages"], strict=True):
        if "role" in received:
            message["role"] = received["role"]
    return request["tokens"] | {plain(name): value for name, value in variables.items()}


def explained(error: Exception) -> str:
    """Describe a template's error as the end of a sentence that begins with the template's name."""
    match error:
        case TemplateRefusal():
            return f"refuses this conversation: {error}"
        case jinja2.TemplateSyntaxError():
            return f"is not a valid template: line {error.lineno}: {error.message}"
        case jinja2.exceptions.SecurityError():
            return f"uses a forbidden operation: {error}"
        case MemoryError():
            return f"takes more than {MEMORY >> 20} MB of memory"
        case RecursionError():
            return "is nested too deeply, or calls itself too deeply"
        case TooLong():
            return f"renders this conversation as more than {LONGEST:,} characters"
    return f"fails: {type(error).__name__}: {error}"  # a template's mistakes can raise any exception


def answer(template: jinja2.Template | Exception, variables: bytes) -> dict[str, Any]:
    """Answer a request with the rendered text or with an error message, as a dict for JSON.

    `template` is an exception if the template could not be compiled.
    """
    try:
        if isinstance(template, Exception):
            raise template
        text = render(template, with_marks(json.loads(variables)))
        return {"text": plain(text), "marks": lengths_of(marks_of(text))}
    except Exception as error:
        return {"error": explained(error)}


def limit_this_process(cpu_seconds: int, *, for_good: bool) -> dict[int, tuple[int, int]]:
    """Limit this process to `cpu_seconds` of CPU time and `MEMORY` bytes, and forbid it to write files and start
    processes.

    Returns the previous limits. Without `for_good`, the process can remove the new limits again.
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
            if limit != resource.RLIMIT_AS:  # macOS cannot limit memory, but the CPU time limits it indirectly
                raise
    return before


def in_own_process(template: jinja2.Template | Exception, variables: bytes, cpu_seconds: int) -> tuple[int, bytes]:
    """Answer a request in a forked child. Returns the child's exit status and its output, which may be cut short."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        # The child must not read the next request or answer it.
        for unneeded in (reads, 0, 1):
            os.close(unneeded)
        limit_this_process(cpu_seconds, for_good=True)
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(json.dumps(answer(template, variables)).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        output = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output


def read_message() -> bytes | None:
    """Read a message from stdin. Returns None at the end of stdin."""
    length = sys.stdin.buffer.read(8)
    return sys.stdin.buffer.read(int.from_bytes(length)) if len(length) == 8 else None


def main(cpu_seconds: int) -> None:
    """Serve one template. Each rendering may use `cpu_seconds` of CPU time."""
    # Error messages about templates then say str.
    MarkedText.__module__, MarkedText.__name__ = str.__module__, str.__name__
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
    for limit in (resource.RLIMIT_CPU, resource.RLIMIT_NPROC):  # each child gets its own limits
        resource.setrlimit(limit, before[limit])
    gc.freeze()  # otherwise garbage collection in a child would copy memory that it shares with this process
    while (variables := read_message()) is not None:
        try:
            status, answer = in_own_process(template, variables, cpu_seconds)
        except OSError:
            sys.exit(os.EX_TEMPFAIL)
        output.write(status.to_bytes(8, signed=True) + len(answer).to_bytes(8) + answer)
        output.flush()
