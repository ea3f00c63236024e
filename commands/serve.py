"""`serve`: an HTTP server for a model."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from llamaspec.commands.interrupt import SIGNALS, first_handled_by, remove_what_is_unfinished
from llamaspec.commands.loading import file_message, file_sampling, open_with_tokenizer, prepare_jax
from llamaspec.commands.options import (
    COUNT,
    MODEL,
    POSITIVE,
    Verb,
    combined,
    default_model,
    devices_option,
    generation_config_option,
    serving_options,
    template_option,
    tokenizer_option,
)
from llamaspec.commands.output import fail, say
from llamaspec.commands.progress import progress_bar

if TYPE_CHECKING:
    from llamaspec.model.chat.template import ChatTemplate
    from llamaspec.model.checkpoints.adapter import Adapter
    from llamaspec.model.checkpoints.checkpoint import Checkpoint
    from llamaspec.model.options import SamplingOptions
    from llamaspec.model.tokenizers.tokenizer import Tokenizer
    from llamaspec.serving.connections import Access, ClientLimits
    from llamaspec.serving.http import Site
    from llamaspec.serving.request import Engine

MIXED = "It's 12345,  a\tB-c\r\n\n  of 3.14 \u00e9e\u0301 \u72d0\u72f8 \U0001f98a don't STOP {x: [1]};\u00a0 \u0130"
LAST_STEP = 60.0  # seconds that the device's last step may take after all requests are cancelled


def _limit(name: str, kind: type, default: int | float, text: str) -> Any:
    least = COUNT if kind is int else POSITIVE
    return click.option(name, type=least, default=default, metavar="N", show_default=True, help=text)


def named_folders(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Parse NAME=DIR pairs. Raises click.BadParameter if a name or folder is missing, or if a NAME occurs twice."""
    folders: dict[str, str] = {}
    for pair in values:
        name, _, folder = pair.partition("=")
        if not (name.isprintable() and name and folder):
            raise click.BadParameter(f"expected NAME=DIR, got {pair!r}")
        if name in folders:
            raise click.BadParameter(f"two adapters have the name {name}")
        folders[name] = folder
    return folders


@click.command(cls=Verb)
@click.argument("model", type=MODEL, required=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen at this address.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    metavar="N",
    show_default=True,
    help="Listen at this port. 0: any free port.",
)
@click.option(
    "--api-key",
    multiple=True,
    envvar="LLAMASPEC_API_KEY",
    metavar="KEY",
    help="Require this key; may be repeated. To keep the key out of the process list, set LLAMASPEC_API_KEY instead.",
)
@click.option("--no-api-key", is_flag=True, help="Let other machines connect without a key.")
@click.option(
    "--cors",
    multiple=True,
    metavar="ORIGIN",
    help="Accept requests from web pages of this origin, such as https://example.org.",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    callback=named_folders,
    metavar="NAME=DIR",
    help="Also serve the model with the LoRA adapter in DIR, as the model NAME. May be repeated.",
)
@template_option
@combined(
    tokenizer_option,
    serving_options,
    generation_config_option,
    devices_option,
    _limit(
        "--max-batch", int, 16, "Decode N requests at once. N changes how results are rounded, so texts may change."
    ),
    click.option(
        "--cache-tokens",
        type=COUNT,
        metavar="N",
        help="Make a KV cache for N tokens.  [default: enough for all requests, but at most half of the free memory]",
    ),
    _limit("--max-queue", int, 256, "Queue up to N requests. Others are refused with status 429."),
    _limit("--max-connections", int, 1000, "Accept up to N connections. Others are refused with status 503."),
    _limit("--request-seconds", float, 600, "End a request with an error after N seconds."),
    _limit("--max-body", int, 4 << 20, "Accept requests of up to N bytes. Larger ones are refused with status 413."),
    _limit("--body-seconds", float, 60, "Disconnect a client that needs more than N seconds to send a request."),
    _limit("--write-seconds", float, 30, "Disconnect a client that reads nothing for N seconds."),
    _limit("--drain-seconds", float, 30, "After SIGTERM, let running requests continue for up to N seconds."),
    _limit(
        "--step-seconds",
        float,
        300,
        "Exit with an error if one step takes more than N seconds: the device hangs.",
    ),
)
def serve(model: str | None, **options: Any):
    """Serve a model to many clients: OpenAI's API, and a chat page.

    Without MODEL, the built-in model runs. The chat page is at the address that the command prints. After SIGTERM or
    Ctrl-C, running requests may finish. A second signal ends them at once.

    \b
    llamaspec serve
    llamaspec serve path/to/Llama-3.2-1B-Instruct --quantize q8 --port 8080
    llamaspec serve stories --adapter robot=tuned --adapter polite=dpo
    """
    model = model or default_model()
    from llamaspec.serving.connections import Access, ClientLimits, loopback_hosts

    host, keys = options["host"], options["api_key"]
    if not all(keys):
        raise click.UsageError("--api-key: an API key must not be empty")
    if not _is_loopback(host) and not keys and not options["no_api_key"]:
        raise click.UsageError(
            f"--host {host} can be reached from other machines: give --api-key KEY, or --no-api-key to serve without "
            "a key"
        )
    limits = ClientLimits(
        body_bytes=options["max_body"],
        body_seconds=options["body_seconds"],
        write_seconds=options["write_seconds"],
        request_seconds=options["request_seconds"],
        connections=options["max_connections"],
        drain_seconds=options["drain_seconds"],
    )
    access = Access(keys=keys, origins=frozenset(options["cors"]), hosts=loopback_hosts(host))
    with _bound(host, options["port"]) as bound:
        _serve(model, options, bound, limits, access)


def _serve(model: str, options: dict[str, Any], bound: socket.socket, limits: ClientLimits, access: Access) -> None:
    """Load the model, then serve it until a signal."""
    from llamaspec.model.checkpoints.open import place_of
    from llamaspec.model.checkpoints.pooling import read_pooling
    from llamaspec.model.options import RunOptions, choose_context

    sampling = file_sampling(model, options)
    checkpoint, tokenizer = open_with_tokenizer(model, options["tokenizer"])
    if sampling and (stated := file_message(sampling)):
        say(stated)
    choose_context(options["context"], checkpoint.config.context)
    adapters = _adapters(model, options["adapters"], checkpoint)
    pooling = read_pooling(place_of(model))
    with progress_bar() as progress:
        prepare_jax()
        from llamaspec.serving.loading import load_engine

        engine = load_engine(
            checkpoint,
            RunOptions(
                **{name: options[name] for name in ("context", "dtype", "quantize", "cache", "kernels", "devices")}
            ),
            width=options["max_batch"],
            cached_tokens=options["cache_tokens"],
            waiting=options["max_queue"],
            adapters=adapters,
            step_seconds=options["step_seconds"],
            progress=progress,
        )
    from llamaspec.serving.watchdog import DeviceHangs

    try:
        about = {"adapters": adapters, "sampling": sampling, "pooling": pooling}
        site = _site(model, options, checkpoint, tokenizer, engine, limits, access, **about)
        if not _run(site, bound, model):
            if isinstance(engine.failed, DeviceHangs):
                _end_at_once(f"the device hangs: {engine.failed}")
            fail(f"the engine failed: {engine.failed!r}", 1)
    finally:
        engine.close()


def _adapters(model: str, folders: Mapping[str, str], checkpoint: Checkpoint) -> dict[str, Adapter]:
    """Read the adapters, and print notes on stderr. Raises click.UsageError for an adapter with the model's name."""
    from llamaspec.model.checkpoints.adapter import adapter_notes, read_adapter

    if _name(model) in folders:
        raise click.UsageError(f"--adapter {_name(model)}: the model has this name, so the adapter needs another one")
    adapters = {name: read_adapter(folder, checkpoint.config) for name, folder in folders.items()}
    for name, adapter in adapters.items():
        for note in adapter_notes(adapter, checkpoint, folders[name]):
            say(note)
    return adapters


def _run(site: Site, bound: socket.socket, model: str) -> bool:
    """Serve until the first signal. Returns True if the engine was still running then, and False if it has failed."""
    import asyncio
    from threading import Timer

    late = Timer(site.limits.drain_seconds + LAST_STEP, _end_late)
    late.daemon = True

    async def run() -> bool:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def end() -> None:
            late.start()
            stop.set()

        def ask_to_stop(number: int) -> None:
            if number == signal.SIGINT and sys.stderr.isatty():
                say("")  # the terminal has printed ^C, so we begin a new line
            say("stopping after the running requests; another signal stops them at once")
            loop.call_soon_threadsafe(end)

        host, port = bound.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        with first_handled_by(ask_to_stop, SIGNALS):
            # Scripts look for "is at http://" to find the port.
            return await site.run(bound, stop, ready=lambda: say(f"{model} is at http://{name}:{port}"))

    try:
        return asyncio.run(run())
    finally:
        late.cancel()


def _end_late() -> None:
    """End the process with an error, because the engine's thread still waits for the device after `LAST_STEP`
    seconds.
    """
    _end_at_once(f"the device has not finished its last step {LAST_STEP:g} s after all requests were cancelled")


def _end_at_once(why: str) -> None:
    """End the process at once. The engine's thread waits for the device, so a normal exit would hang."""
    say(f"error: {why}")
    remove_what_is_unfinished()
    os._exit(1)


def _site(
    model: str,
    options: dict[str, Any],
    checkpoint: Checkpoint,
    tokenizer: Any,
    engine: Engine,
    limits: ClientLimits,
    access: Access,
    *,
    adapters: Mapping[str, Adapter],
    sampling: SamplingOptions | None,
    pooling: str,
) -> Site:
    """Build the site that answers HTTP requests with an engine.

    `sampling` has defaults for the sampling fields of a request. If it is None, OpenAI's defaults are used. `pooling`
    is the default for embeddings.
    """
    import time
    from dataclasses import replace

    from llamaspec.model.chat.template import find_template
    from llamaspec.model.checkpoints.checkpoint import CheckpointError
    from llamaspec.model.checkpoints.open import place_of
    from llamaspec.serving.api import Api
    from llamaspec.serving.connections import allow_files
    from llamaspec.serving.http import Site
    from llamaspec.serving.metrics import Metrics
    from llamaspec.serving.openai_answers import ModelCard
    from llamaspec.serving.prompts import Prompts

    places = [place for place in (options["tokenizer"], place_of(model)) if place]
    try:
        template = find_template(tokenizer, *places, template=options["template"])
        if template.note:
            say(template.note)
    except CheckpointError as error:
        if options["template"]:
            raise
        say(f"{error}; without a chat template, completions work, but chat does not")
        template = None
    prompts = Prompts(tokenizer, template=template, stops=checkpoint.stops, context=engine.context, vocab=engine.vocab)
    name = _name(model)
    owner = name.split("/")[0] if "/" in name else "llamaspec"
    about = ModelCard(name, int(time.time()), owner, engine.context)
    api = Api(
        *(engine, prompts, about, Metrics(engine)),
        fingerprint=_fingerprint(name, options, tokenizer, template, sampling, adapters),
        request_seconds=limits.request_seconds,
        adapters=[*adapters],
        sampling=sampling,
        pooling=pooling,
    )
    allowed = allow_files(limits.connections)
    if allowed < limits.connections:
        say(f"--max-connections {limits.connections}: the system allows only {allowed} connections (see ulimit -n)")
    return Site(api, limits=replace(limits, connections=allowed), access=access)


def _name(model: str) -> str:
    """Return the name by which clients request a model.

    For a model on the Hub, this is owner/name. For a file, it is the file name without its extension, and for a folder
    the folder's name.
    """
    path = Path(model)
    if not path.exists():
        return model
    return path.resolve().name if path.is_dir() else path.stem


def _fingerprint(
    name: str,
    options: dict[str, Any],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    sampling: SamplingOptions | None,
    adapters: Mapping[str, Adapter] = MappingProxyType({}),
) -> str:
    """Hash the model, tokenizer, template, programs, options and adapters.

    Only these and the request affect an answer.
    """
    import hashlib

    from llamaspec.model.running.program_store import SERVING_SOURCES, facts

    chosen = [options[key] for key in ("context", "dtype", "quantize", "cache", "kernels", "max_batch", "devices")]
    ids = range(tokenizer.vocab)
    pieces = [(tokenizer.bytes_of(id), tokenizer.first_bytes_of(id)) for id in ids]
    rules = [
        tokenizer.bos,
        tokenizer.dummy_prefix,
        sorted(tokenizer.special.items()),
        sorted(tokenizer.absorbs.items()),
    ]
    turns = None
    if template:
        turns = [template.source, sorted(template.named.items()), sorted(template.tokens.items())]
    # Two tokenizers may share a vocabulary and still split text differently, so we also hash the ids of `MIXED`, a text
    # with characters of many kinds.
    parts = repr(
        [name, pieces, rules, tokenizer.encode(MIXED), turns, facts(sources=SERVING_SOURCES), chosen, sampling]
        + [(adapter_name, adapter.digest()) for adapter_name, adapter in adapters.items()]
    )
    return f"fp_{hashlib.sha256(parts.encode()).hexdigest()[:12]}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bound(host: str, port: int) -> socket.socket:
    """Bind the port before the model is loaded, so that a port in use is an error at once.

    Clients cannot connect yet.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise click.ClickException(f"cannot listen at {host}, port {port}: {error.strerror or error}") from None
    return bound
