"""Options for running a model on several devices, or in several processes."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from llamaspec.commands.loading import chosen_sampling
from llamaspec.commands.output import say

if TYPE_CHECKING:
    from llamaspec.model.parallel.processes import Watch

# Options that may differ between processes: a process's number and timeout, and how it prints results.
OF_ONE = {"coordinator", "process", "peer_timeout", "as_json", "timings", "thoughts"}
FILES = {"model", "tokenizer", "template", "text", "against", "evaluate", "out"}  # options that name a file or a folder
COMPUTING = ("llamaspec", "jax", "jaxlib")  # packages with the programs that run; all processes need the same versions
LONGEST = 60  # characters of an option that an error message shows
VIRTUAL = "--xla_force_host_platform_device_count"  # XLA's flag for several virtual devices on one CPU


@contextmanager
def taking_part(params: dict[str, Any], command: click.Command) -> Iterator[Watch | None]:
    """Prepare JAX for the devices and processes that a command's options ask for.

    Yields the connections to the other processes, or None for a single process. Removes the options of processes, such
    as --coordinator, from `params`, and sets `params["devices"]` to the number of devices. On a CPU, makes virtual
    devices. With several processes, only the first one writes to stdout, and all of them sample with the first one's
    seed. Raises ValueError if the commands or options of the processes differ.
    """
    stated = dict(params)
    processes = {name: params.pop(name) for name in ("coordinator", "processes", "process") if name in params}
    peer_timeout, stated_processes = (
        params.pop("peer_timeout", None),
        [value for value in processes.values() if value is not None],
    )
    if stated_processes and len(stated_processes) < len(processes):
        raise click.UsageError("give all three of --coordinator, --processes and --process, or none of them")
    several, number = processes.get("processes") or 1, processes.get("process") or 0
    if number >= several:
        raise click.UsageError(f"--process: expected a number from 0 to {several - 1}, got {number}")
    if params["devices"] and params["devices"] % several:
        raise click.UsageError(f"--devices {params['devices']} is not a multiple of --processes {several}")
    own_devices = (params["devices"] or several) // several
    if params.get("parallel") == "context" and own_devices * several == 1:
        raise click.UsageError("--parallel context needs --devices 2 or more")
    if own_devices > 1 and "plan" not in params and VIRTUAL not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {VIRTUAL}={own_devices}".strip()
    if not stated_processes:
        params["devices"] = params["devices"] or 1
        yield None
        return
    if params.get("prompt") == "-":
        raise click.UsageError(
            "several processes cannot share one standard input: give the text itself as PROMPT, not -"
        )
    from llamaspec.model.parallel.processes import ProcessGroup, agreed, joined

    if number:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with joined(
        ProcessGroup(processes["coordinator"], several, number, peer_timeout, described(stated, command))
    ) as watch:
        import jax

        params["devices"] = params["devices"] or jax.device_count()
        if "seed" in params and params["seed"] is None:
            params["seed"] = agreed(secrets.randbelow(2**31))
            if not number and not chosen_sampling(params)[0].greedy:
                say(f"seed {params['seed']}")
        yield watch


def described(params: dict[str, Any], command: click.Command) -> dict[str, str]:
    """Describe a command, its options and versions. All processes that run one model must have equal descriptions.

    We include only the last part of a path, because machines may have the file in different folders.
    """
    from importlib.metadata import PackageNotFoundError, version

    facts = {"the command": str(command.name)}
    for package in COMPUTING:
        with suppress(PackageNotFoundError):  # llamaspec runs from a checkout and is not installed
            facts[f"the version of {package}"] = version(package)
    own = OF_ONE if "resume" in params else {*OF_ONE, "out"}  # `train --resume` reads its own output there
    options = [param for param in command.params if param.name in params and param.name not in own]
    values = {
        max(param.opts, key=len): option_text(params[str(param.name)], file=param.name in FILES) for param in options
    }
    return {**facts, **values}


def option_text(value: Any, *, file: bool = False) -> str:
    """Format an option's value on one line. A long value is cut and gets a hash, so that different values look
    different.

    >>> option_text(None), option_text(7), option_text("models/tiny/", file=True), option_text("a" * 99)[55:]
    ('not given', '7', 'tiny', 'aaaaa... (99 characters, 13284468)')
    >>> print(option_text("Once "), option_text("Once"), option_text(""), option_text("a\\nb"))
    'Once ' Once '' 'a\\nb'
    """
    if value is None:
        return "not given"
    text = os.path.basename(os.path.abspath(value)) if file else str(value)  # `.` becomes the folder's name
    if not text.isprintable() or text != " ".join(text.split()) or not text:
        text = repr(text)
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({len(text)} characters, {hashlib.sha256(text.encode()).hexdigest()[:8]})"
