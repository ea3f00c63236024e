"""Turns the options of a command into a model, a request and cache folders."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamaspec.commands.output import say
from llamaspec.commands.progress import progress_bar

if TYPE_CHECKING:
    from llamaspec.model.checkpoints.checkpoint import Checkpoint
    from llamaspec.model.llama import Llama
    from llamaspec.model.options import SamplingOptions
    from llamaspec.model.running.start_clock import StartClock
    from llamaspec.model.tokenizers.tokenizer import Tokenizer


def checked_request(options: dict[str, Any]) -> dict[str, Any]:
    """Check the arguments of `Llama.generate` before a model is loaded, and return them.

    Prints on stderr the options that the model's generation_config.json sets. Raises click.UsageError.
    """
    from llamaspec.model.options import check_max_new_tokens, check_seed

    sampling, message = chosen_sampling(options)
    try:
        request = {
            "sampling": sampling,
            "max_new_tokens": check_max_new_tokens(options["max_new_tokens"]),
            "seed": check_seed(options["seed"]),
            "stop": options["stop"],
        }
    except ValueError as error:
        raise click.UsageError(str(error), ctx=click.get_current_context()) from None
    if message:
        say(message)
    return request


def chosen_sampling(options: dict[str, Any]) -> tuple[SamplingOptions, str]:
    """Choose each sampling option from the user's options, else from generation_config.json, else from our defaults.

    Also returns a string that names the options set by the file, or an empty string if it sets none. Raises
    click.UsageError if an option is out of range, and CheckpointError if the file cannot be used.
    """
    from llamaspec.model.options import SAMPLING, SamplingOptions

    own_values = {name: options[name] for name in SAMPLING if options[name] is not None}
    try:
        own_sampling = SamplingOptions(**own_values)
    except ValueError as error:
        raise click.UsageError(str(error), ctx=click.get_current_context()) from None
    stated = file_sampling(options["model"], options)
    if stated is None:
        return own_sampling, ""
    return replace(stated, **own_values), file_message(stated, without=own_values)


def file_sampling(model: str, options: dict[str, Any]) -> SamplingOptions | None:
    """Read the sampling options in a model's generation_config.json, unless the user's options forbid it."""
    from llamaspec.model.generation_config import stated_sampling

    return None if options["no_generation_config"] else stated_sampling(model)


def file_message(stated: SamplingOptions, *, without: Collection[str] = ()) -> str:
    """Return a sentence that names the sampling options set by generation_config.json, except those in `without`.

    An option is left out if the file turns it off and our default is off as well. Returns an empty string if no option
    is left.
    """
    from llamaspec.model.generation_config import NAME, OFF
    from llamaspec.model.options import SAMPLING

    values = {name: getattr(stated, name) for name in SAMPLING if name not in without}
    listed = [
        f"{name} {value:g}"
        for name, value in values.items()
        if value != getattr(OFF, name) or value != SAMPLING[name].default
    ]
    return f"{NAME} sets {', '.join(listed)}; --no-generation-config ignores the file" if listed else ""


def open_model(model: str, adapter: str | None = None) -> Checkpoint:
    """Open a model with an adapter or without, and print its notes on stderr, such as a list of unused tensors."""
    from llamaspec.model.checkpoints.open import open_checkpoint

    return _print_notes(_adapted(open_checkpoint(model), adapter))


def _adapted(checkpoint: Checkpoint, adapter: str | None) -> Checkpoint:
    from llamaspec.model.checkpoints.adapter import with_adapter

    return checkpoint if adapter is None else with_adapter(checkpoint, adapter)


def open_to_run(model: str, tokenizer: str | None, adapter: str | None = None) -> Checkpoint:
    """Open a model with an adapter or without, and print its notes on stderr, as `open_model` does.

    If the model has a tokenizer, generation also ends at the tokenizer's eos_token, and unused rows of the embedding
    become 0 (`of_model.fitted`).
    """
    from llamaspec.model.checkpoints.open import open_checkpoint
    from llamaspec.model.tokenizers.of_model import fitted_if_any

    return _print_notes(fitted_if_any(_adapted(open_checkpoint(model), adapter), tokenizer))


def open_with_tokenizer(model: str, tokenizer: str | None, adapter: str | None = None) -> tuple[Checkpoint, Tokenizer]:
    """Open a model, with an adapter or without, and its tokenizer. Print the model's notes, as `open_model` does.

    Generation also ends at the tokenizer's eos_token, and unused rows of the embedding become 0 (`of_model.fitted`).
    """
    from llamaspec.model.checkpoints.open import open_checkpoint
    from llamaspec.model.tokenizers.of_model import fitted, tokenizer_of

    checkpoint = _adapted(open_checkpoint(model), adapter)
    vocabulary = tokenizer_of(checkpoint, tokenizer)
    return _print_notes(fitted(checkpoint, vocabulary)), vocabulary


def _print_notes(checkpoint: Checkpoint) -> Checkpoint:
    for note in checkpoint.notes:
        say(note)
    return checkpoint


def print_seed(options: dict[str, Any], request: dict[str, Any]):
    """Print the random seed on stderr if the generated text depends on it and --seed is not given."""
    if options["seed"] is None and not request["sampling"].greedy:
        say(f"seed {request['seed']}")


def load(
    options: dict[str, Any],
    *,
    greedy: bool,
    prompt: str | None = None,
    clock: StartClock | None = None,
    examine: Callable[[Tokenizer, list[str | Path]], object] = lambda tokenizer, places: None,
) -> Llama:
    """Load the model that the options name. Prints on stderr how the model runs, unless it runs in the default way.

    We check the files and the prompt first, because importing JAX takes a second and reading weights may take a minute.
    After these checks we call `examine` with the tokenizer and `Llama.places`. `clock` records the time of each phase.
    """
    from llamaspec.model.checkpoints.open import place_of
    from llamaspec.model.options import RunOptions, check_length, choose_context
    from llamaspec.model.running.start_clock import StartClock
    from llamaspec.model.tokenizers.tokenizer import encode_text

    clock = clock or StartClock()
    clock.begin("read")
    checkpoint, tokenizer = open_with_tokenizer(options["model"], options["tokenizer"], options["adapter"])
    context = choose_context(options["context"], checkpoint.config.context)
    ids = None if prompt is None else encode_text(tokenizer, prompt)
    if ids is not None:
        check_length(ids, context)
    places = [place for place in (options["tokenizer"], place_of(options["model"])) if place]
    examine(tokenizer, places)
    names = ("context", "dtype", "quantize", "cache", "backend", "kernels", "devices", "parallel", "speculate")
    clock.begin("import")
    with progress_bar() as progress:
        folder = prepare_jax()
        from llamaspec.model.running.opening import opening_device

        with opening_device():
            from llamaspec.model.llama import Llama, load_backend
        run_options = RunOptions(
            greedy=greedy,
            prompt=None if ids is None else len(ids),
            own_process=True,
            compile_cache=folder,
            **{name: options[name] for name in names},
        )
        backend = load_backend(checkpoint, run_options, progress=progress, clock=clock)
    llama = Llama(checkpoint.config, tokenizer, backend, stops=checkpoint.stops, places=places)
    say_how(llama.describe_run())
    return llama


def say_how(description: str):
    """Print on stderr how a model runs, unless it runs in the default way on a CPU."""
    if description not in ("float32 on CPU", "float64 on CPU, by the NumPy reference"):
        say(description)


def prepare_jax() -> Path | None:
    """Keep compiled programs on disk, so that the next start is fast.

    Returns their folder, or None without a cache folder.
    """
    from llamaspec.model.running.process import keep_compiled

    if folder := cache_folder():
        keep_compiled(folder / "compiled")
    return folder and folder / "compiled"


def cache_folder() -> Path | None:
    """Return the folder for this user's caches, or None if it cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamaspec"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def parse_ids(text: str, vocab: int) -> list[int]:
    """Parse comma-separated token ids.

    Raises UsageError for any other text, and ValueError for an id beyond the vocabulary.
    """
    from llamaspec.model.options import check_ids

    if not re.fullmatch(r"\s*(-?[0-9]+\s*(,\s*-?[0-9]+\s*)*)?", text):
        raise click.UsageError(f"expected comma-separated token ids, such as 1,403,5, got {text!r}")
    ids = [int(id) for id in text.split(",") if text.strip()]
    check_ids(ids, vocab)
    return ids
