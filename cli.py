"""The command line: parse, call, print.

stdout carries the result alone; progress and statistics go to stderr; an error is one line. Each
command imports what it needs when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    import numpy as np

    from model.checkpoints.checkpoint import Checkpoint
    from model.generation import Generation
    from model.llama import Llama
    from model.ops.block import Ops
    from reference.llama import Params
    from training.loop import Progress as TrainingProgress
    from verify.campaign import Campaign, Job
    from verify.runner import Report
    from verify.walk import Model as WalkedModel
    from verify.walk import Step

BUILT_IN = "stories"  # the model that comes with the package


class _Commands(click.Group):
    """Every command takes --debug, wherever a person writes it; `main` looks for it."""

    def add_command(self, cmd: click.Command, name: str | None = None):
        cmd.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks."))
        super().add_command(cmd, name)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="llamaspec", prog_name="llamaspec")
@click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks.")
def llamaspec():
    """An executable specification of Llama, and the fast implementation that is proven against it.

    MODEL is a GGUF file, one of llama2.c (.bin) or a Hugging Face directory. The tokenizer is found
    inside or beside it, or named with --tokenizer.

    \b
    llamaspec generate "Once upon a time" --model stories260K.bin --tokenizer tok512.model
    llamaspec chat --model path/to/Llama-3.2-1B-Instruct
    """


def _options(*options: Callable) -> Callable:
    """One decorator out of several, in the order in which help shows them."""

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_option = click.option("--model", default=BUILT_IN, show_default=True, help="Checkpoint: a file or a directory.")
tokenizer_option = click.option(
    "--tokenizer", help="Tokenizer file or directory.  [default: tokenizer.json, .model or .bin beside the model]"
)
SCHEMES = ("q8", "q8_row", "q4", "nf4", "fp8", "mxfp4")  # reference.quantizers.schemes says what they are
kernels_option = click.option(
    "--kernels",
    type=click.Choice(["auto", "xla", "cpu", "pallas"]),
    default="auto",
    show_default=True,
    help="Which implementation of the ops JAX runs.",
)
quantize_option = click.option(
    "--quantize", type=click.Choice(SCHEMES), help="Scheme for the matrices.  [default: as they are stored]"
)
running_options = _options(
    click.option("--context", type=int, help="Length of a sequence, in tokens.  [default: the model's, 4096 at most]"),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16"]),
        help="Of the weights that run.  [default: float32 on a CPU, as stored on a GPU]",
    ),
    quantize_option,
    click.option(
        "--cache", type=click.Choice(["int8"]), help="Of keys and values.  [default: as the weights that run]"
    ),
    click.option(
        "--backend",
        type=click.Choice(["jax", "reference"]),
        default="jax",
        show_default=True,
        help="Compiled JAX, or the NumPy definition in float64.",
    ),
    kernels_option,
)


def max_new_tokens(default: int) -> Callable:
    """The longest of the built-in model's stories has 289 tokens: what tells stories must not stop before its end."""
    text = "Stop after so many tokens."
    return click.option("--max-new-tokens", type=int, default=default, show_default=True, help=text)


sampling_options = _options(
    click.option("--temperature", type=float, default=0.8, show_default=True, help="0 always takes the likeliest."),
    click.option("--top-k", type=int, default=0, show_default=True, help="Draw from the k likeliest; 0: from all."),
    click.option("--top-p", type=float, default=0.95, show_default=True, help="Draw from the likeliest that reach it."),
    click.option("--min-p", type=float, default=0.0, show_default=True, help="Drop below this share of the likeliest."),
    click.option(
        "--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1: seen tokens are less likely."
    ),
    click.option("--seed", type=int, help="Same seed, same text.  [default: drawn, and printed]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. May be given several times."),
)
emulate_option = click.option(
    "--emulate-activations",
    type=click.Choice(["q8_0", "ggml", "int8"]),
    help="Round what quantized matrices are multiplied by: to Q8_0, as llama.cpp does for each type (ggml), or to int8 "
    "with a scale a token, as SmoothQuant is meant.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@llamaspec.command()
@click.argument("prompt", default="")
@_options(model_option, tokenizer_option, max_new_tokens(256), sampling_options, running_options, json_option)
def generate(prompt: str, as_json: bool, **options: Any):
    """Continue PROMPT; - reads it from standard input.

    Prints the prompt and its continuation as it is drawn. Without PROMPT, a text from its beginning.
    """
    if prompt == "-" and sys.stdin is None:
        raise click.UsageError("standard input is closed")
    _generate(sys.stdin.read() if prompt == "-" else prompt, as_json=as_json, **options)


@llamaspec.command()
@click.argument("prompt", default="")
@_options(model_option, tokenizer_option, max_new_tokens(512), sampling_options, running_options, json_option)
def story(prompt: str, as_json: bool, **options: Any):
    """Tell a story, from the beginning or on from PROMPT.

    `generate` under the name that children ask for.
    """
    _generate(prompt, as_json=as_json, **options)


def _generate(prompt: str, *, as_json: bool, **options: Any):
    request = _request(options)
    llama = _load(options, prompt=prompt, greedy=request["sampling"].greedy)
    generation = llama.generate(prompt, **request)
    _tell_seed(options, generation.seed)
    if as_json:
        for _ in generation:
            pass
        _print_json(
            {
                "text": generation.prompt + generation.completion,
                "completion": generation.completion,
                "prompt_tokens": generation.prompt_tokens,
                "tokens": len(generation.ids),
                "finish_reason": generation.finish_reason,
                "seed": generation.seed,
                "timings": generation.timings._asdict(),
            }
        )
    else:
        _print(prompt)
        _stream(generation)
    click.echo(_summary(generation, llama), err=True)


@llamaspec.command()
@click.option("--system", help="What the model is told before the conversation.")
@_options(model_option, tokenizer_option, max_new_tokens(512), sampling_options, running_options)
def chat(system: str | None, **options: Any):
    """Talk with a model. /reset forgets, /exit leaves; Ctrl-C stops an answer.

    Reads lines from standard input when that is not a terminal, and answers each.
    """
    from model.chat.chat import Chat
    from model.chat.template import find_template
    from model.checkpoints.open import place_of

    request = _request(options)
    llama = _load(options, greedy=request["sampling"].greedy)
    places = [place for place in (options["tokenizer"], place_of(options["model"])) if place]
    conversation = Chat(llama, find_template(llama.tokenizer, *places), system=system)
    _tell_seed(options, request["seed"])
    if sys.stdin.isatty():
        click.echo("/reset forgets, /exit leaves, Ctrl-C stops an answer", err=True)
    ask = _terminal_lines() if sys.stdin.isatty() else (line.rstrip("\r\n") for line in sys.stdin)
    for line in ask:
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                conversation.reset()
                click.echo("forgotten", err=True)
                continue
        try:
            with _interruption() as interrupted:
                _stream(conversation.reply(line, interrupted=interrupted, **request), answer=True)
        except ValueError as error:
            if not sys.stdin.isatty():
                raise
            click.echo(f"error: {error}", err=True)


def _terminal_lines() -> Iterator[str]:
    """Lines as a person types them, with editing and a history; ends at Ctrl-D."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.output import create_output

    folder = _cache_folder()
    history = FileHistory(str(folder / "chat_history")) if folder else InMemoryHistory()
    session = PromptSession("> ", history=history, output=create_output(stdout=sys.stderr))
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Within it Ctrl-C raises nothing; the function that it gives says whether it was pressed."""
    import signal

    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


@llamaspec.command()
@click.argument("text", required=False)
@click.option("--decode", metavar="IDS", help="The text of comma-separated ids, instead.")
@click.option("--no-bos", is_flag=True, help="Leave out the id that begins a text.")
@_options(model_option, tokenizer_option, json_option)
def tokens(text: str | None, decode: str | None, no_bos: bool, model: str, tokenizer: str | None, as_json: bool):
    """The ids of TEXT, on one line."""
    if (text is None) == (decode is None):
        raise click.UsageError("give either TEXT or --decode IDS")
    if decode is not None and no_bos:
        raise click.UsageError("--no-bos is for TEXT: --decode leaves control tokens out")
    from model.tokenizers.load import load_tokenizer
    from model.tokenizers.tokenizer import decode as decode_ids
    from model.tokenizers.tokenizer import encode_text

    if tokenizer:
        vocabulary = load_tokenizer(tokenizer)
    else:
        from model.checkpoints.open import open_checkpoint
        from model.tokenizers.of_model import tokenizer_of

        vocabulary = tokenizer_of(open_checkpoint(model), None)
    if decode is not None:
        ids = _parse_ids(decode, vocabulary.vocab)
        decoded = decode_ids(vocabulary, ids)
        if as_json:
            _print_json({"text": decoded})
        else:
            _print(decoded + "\n")
        return
    assert text is not None
    ids = encode_text(vocabulary, text, bos=not no_bos)
    if as_json:
        _print_json({"ids": ids, "pieces": [vocabulary.piece(id) for id in ids]})
    else:
        _print(" ".join(map(str, ids)) + "\n")


@llamaspec.command()
@click.option("--tokens", "ids", metavar="IDS", help="Comma-separated ids, taken exactly.")
@click.option("--prompt", metavar="TEXT", help="A text, with BOS where the model's convention has it.")
@click.option("--out", required=True, metavar="FILE.npy", help="Where the array goes, replacing what is there.")
@_options(model_option, tokenizer_option, running_options, emulate_option)
def logits(ids: str | None, prompt: str | None, out: str, model: str, tokenizer: str | None, **options: Any):
    """Write what the model predicts after each token.

    A NumPy file, [seq, vocab] in float32 (float64 from the reference).
    """
    if (ids is None) == (prompt is None):
        raise click.UsageError("give either --tokens IDS or --prompt TEXT")
    import numpy as np

    from model.checkpoints.open import open_checkpoint
    from model.checkpoints.staging import new_file
    from model.options import check_length, choose_context
    from model.tokenizers.of_model import tokenizer_of
    from model.tokenizers.tokenizer import encode_text

    checkpoint = open_checkpoint(model)
    if ids is not None:
        sequence = _parse_ids(ids, checkpoint.config.vocab)
    else:
        assert prompt is not None
        sequence = encode_text(tokenizer_of(checkpoint, tokenizer), prompt)
    check_length(sequence, choose_context(options["context"], checkpoint.config.context))
    with new_file(out, replace=True) as staged:
        _prepare_jax()
        from model.llama import load_backend

        with _progress() as progress:
            backend = load_backend(checkpoint, progress=progress, **options)
        rows = backend.logits(sequence)
        with open(staged, "wb") as file:
            np.save(file, rows)
    click.echo(f"{out}: {rows.shape[0]} x {rows.shape[1]} {rows.dtype}", err=True)


@llamaspec.command()
@click.argument("model", required=False)
@click.option("--plan", is_flag=True, help="What running it takes, and how fast that can be; nothing is loaded.")
@click.option("--shape", metavar="NAME", help="--plan: a published Llama in the place of MODEL.")
@click.option("--context", type=int, help="--plan: length of a sequence.  [default: the model's, 4096 at most]")
@click.option("--batch", type=click.IntRange(1), default=1, help="--plan: sequences at once.  [default: 1]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="--plan: of the weights that run.")
@click.option("--quantize", type=click.Choice(SCHEMES), help="--plan: scheme for the matrices.")
@click.option("--cache", type=click.Choice(["int8"]), help="--plan: of keys and values.")
@click.option("--device", metavar="NAME", help="--plan: h200, rtx-4090, …  [default: this machine, measured]")
@json_option
@click.pass_context
def inspect(invocation: click.Context, model: str | None, plan: bool, as_json: bool, **planned: Any):
    """What is in a checkpoint, read from its header: hyperparameters, tensors, and the cost of a token.

    With --plan: memory by part, work for a token, and the tokens a second that a device allows.

    \b
    llamaspec inspect Qwen3-0.6B-Q8_0.gguf --json
    llamaspec inspect Llama-3.2-1B --plan --quantize q4
    llamaspec inspect --plan --shape llama-3.1-8b --device h200 --context 32768 --batch 8
    """
    if plan:
        _plan(model, as_json=as_json, **planned)
        return
    for name in planned:
        if invocation.get_parameter_source(name) != click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name} goes with --plan")
    from model.checkpoints.open import open_checkpoint
    from model.insight.describe import describe

    description = describe(open_checkpoint(model or BUILT_IN))
    if as_json:
        _print_json(description)
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200)
    for key, value in description.items():
        if key == "config":
            for name, number in value.items():
                console.print(f"  {name:20}{number}", highlight=False)
        elif key != "tensors":
            console.print(f"{key:22}{value:,}" if isinstance(value, int) else f"{key:22}{value}", highlight=False)
    table = Table("tensor", "shape", "dtype", "bytes")
    for tensor in description["tensors"]:
        shape = " x ".join(map(str, tensor["shape"]))
        table.add_row(tensor["name"], shape, tensor["dtype"], f"{tensor['bytes']:,}")
    console.print(table)


def _plan(
    model: str | None, *, shape: str | None, device: str | None, context: int | None, batch: int, as_json: bool,
    **chosen: Any,
):  # fmt: skip
    if shape and model:
        raise click.UsageError("give either MODEL or --shape NAME")
    from benchmarks.model_suite import planned
    from model.insight.plan import as_text

    found = planned(model or BUILT_IN, shape=shape, device=device, context=context, batch=batch, **chosen)
    if as_json:
        _print_json(found.as_json())
    else:
        _print(as_text(found))


@llamaspec.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--to",
    type=click.Choice(["safetensors", "llama2c", "gguf"]),
    help="The format of DST; awq, gptq and smoothquant have safetensors alone.",
)
@click.option(
    "--quantize",
    type=click.Choice([*SCHEMES, "awq", "gptq", "smoothquant", "q8_0", "q4_0"]),
    help="Scheme for the matrices: gguf has q8_0, q4_0 and mxfp4, llama2c q8_0.  [default: as they are stored]",
)
@click.option("--calibration", metavar="FILE", help="With awq, gptq or smoothquant: text like what the model is for.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Of the matrices of a GGUF file.  [default: as they are stored]",
)
@tokenizer_option
def convert(source: str, destination: str, **options: Any):
    """Write checkpoint SRC as DST: a Hugging Face directory, or a file for llama2.c or llama.cpp (gguf).

    Every weight is kept bit for bit, unless --quantize or --dtype says what the matrices become. A GGUF
    file takes the tokenizer along. DST must not exist; it appears when it is complete.

    \b
    llamaspec convert stories15M.bin stories15M-hf --to safetensors
    llamaspec convert Llama-3.2-1B llama-3.2-1b.gguf --to gguf --quantize q8_0
    llamaspec convert Llama-3.2-1B awq --to safetensors --quantize awq --calibration wiki.txt
    """
    from model.checkpoints.open import open_checkpoint
    from model.convert import CALIBRATED, check_request
    from model.convert import convert as write

    if not options["to"] and options["quantize"] not in CALIBRATED:
        raise click.UsageError("Missing option '--to'. Choose from: safetensors, llama2c, gguf")
    options["to"] = options["to"] or "safetensors"
    try:
        check_request(**options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    checkpoint = open_checkpoint(source)
    if options["calibration"]:
        _prepare_jax()
    done, sizes = 0, {name: tensor.bytes for name, tensor in checkpoint.tensors.items()}
    with _progress() as progress:

        def written(name: str, _: int):
            nonlocal done
            done += sizes.get(name, 0)  # as it was read: what is quantized takes fewer bytes
            progress(f"writing {name}", done / sum(sizes.values()))

        notes = write(checkpoint, destination, progress=written, calibrating=progress, **options)
    for note in notes:
        click.echo(note, err=True)
    click.echo(f"{destination}: {len(checkpoint.tensors)} tensors", err=True)


@llamaspec.command("eval")
@click.argument("model", default=BUILT_IN)
@click.option("--text", required=True, metavar="FILE", help="What is predicted, token by token; UTF-8.")
@click.option("--against", metavar="MODEL2", help="Another model of the same vocabulary: KL divergence from it.")
@click.option("--by-tensor", is_flag=True, help="With --against: the same for each tensor that differs, alone.")
@click.option("--stride", type=int, help="Tokens from one window to the next.  [default: half of the context]")
@_options(tokenizer_option, running_options, emulate_option, json_option)
def evaluate(
    model: str,
    text: str,
    against: str | None,
    by_tensor: bool,
    stride: int | None,
    tokenizer: str | None,
    as_json: bool,
    **options: Any,
):
    """Perplexity and bits per byte of a text; what a scheme costs.

    The text is read in windows of --context tokens, and each token is scored once. With --against
    MODEL2, which runs without --quantize, --cache and --emulate-activations, also how far what MODEL
    predicts is from what MODEL2 does.

    \b
    llamaspec eval Llama-3.2-1B --text wiki.txt
    llamaspec eval Llama-3.2-1B --quantize q4 --against Llama-3.2-1B --text wiki.txt --by-tensor
    """
    if by_tensor and not against:
        raise click.UsageError("--by-tensor goes with --against")
    from model.checkpoints.codes import quantized
    from model.checkpoints.open import open_checkpoint
    from model.insight import evaluation
    from model.insight.evaluation_by_tensor import check_alike, compare_by_tensor, decoded
    from model.insight.evaluation_report import as_json as report_of
    from model.insight.evaluation_report import as_text
    from model.options import choose_context

    checkpoint = open_checkpoint(model)
    base = open_checkpoint(against) if against else None
    models = [checkpoint, *([base] if base else [])]
    read = evaluation.text_for(models, text, tokenizer=tokenizer)
    options["context"] = min(choose_context(options["context"], one.config.context) for one in models)
    windows = {"context": options["context"], "stride": evaluation.choose_stride(stride, options["context"])}
    costs = None
    if base and by_tensor:
        check_alike(base, checkpoint)
        base = decoded(base)
    _prepare_jax()
    from model.llama import load_backend

    with _progress() as progress:
        running = load_backend(checkpoint, progress=progress, **options)
        if base:
            quantize = options["quantize"]
            plain: dict[str, Any] = {"quantize": None, "cache": None, "emulate_activations": None}
            beside = load_backend(base, progress=progress, **options | plain)
            if by_tensor:
                run = quantized(checkpoint, quantize) if quantize else checkpoint
                evaluated, costs = compare_by_tensor(running, beside, run, base, read, progress=progress, **windows)
            else:
                evaluated = evaluation.compare(running, beside, read, progress=progress, **windows)
        else:
            evaluated = evaluation.evaluate(running, read, progress=progress, **windows)
    request = {"model": model, "text": text, "against": against, **options, **windows}
    report = report_of(evaluated, costs, **request)
    if as_json:
        _print_json(report)
    else:
        _print(as_text(report))


@llamaspec.command()
@json_option
def doctor(as_json: bool):
    """What is installed here, what would run, and what is missing."""
    _prepare_jax()
    from model.insight.doctor import examine

    report = examine()
    if as_json:
        _print_json(report)
        return
    for section, entries in report.items():
        click.echo(section)
        for name, value in entries.items():
            click.echo(f"  {name:16}{value}")


@llamaspec.command()
@click.option("--out", metavar="DIR", help="Where checkpoints go, and the model at the end, as DIR/model.")
@click.option("--steps", type=int, default=3600, show_default=True)
@click.option("--batch", type=int, default=16, show_default=True, help="Documents a step.")
@click.option("--answers", type=float, default=10.0, show_default=True, help="Importance of answers about stories.")
@click.option("--lr", type=float, default=0.005, show_default=True, help="The highest learning rate.")
@click.option("--dim", type=int, default=128, show_default=True, help="Width of the residual stream.")
@click.option("--layers", type=int, default=10, show_default=True)
@click.option("--heads", type=int, default=4, show_default=True)
@click.option("--kv-heads", type=int, default=2, show_default=True)
@click.option("--head-dim", type=int, default=32, show_default=True)
@click.option("--ffn", type=int, default=256, show_default=True, help="Width inside the feed-forward layers.")
@click.option("--context", type=int, default=1024, show_default=True, help="Tokens at most in a document.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same documents and beginning.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of the computation; the weights that are trained are float32.",
)
@click.option("--remat", is_flag=True, help="Compute again what the gradient needs: less memory, more time.")
@click.option("--eval-every", type=int, default=400, show_default=True, help="Steps between evaluations.")
@click.option("--save-every", type=int, default=100, show_default=True, help="Steps between checkpoints.")
@click.option("--resume", is_flag=True, help="Go on from DIR's last checkpoint.")
@click.option("--text", metavar="FILE", help="Train on the paragraphs of FILE, instead of the built-in stories.")
@click.option("--tokenizer", help="With --text: tokenizer file or directory.  [default: the stories' own]")
@click.option("--evaluate", metavar="MODEL", help="Only evaluate this model, on held-out documents.")
def train(out: str | None, evaluate: str | None, text: str | None, tokenizer: str | None, **options: Any):
    """Train a model from nothing, on stories that it writes itself or on a text.

    The defaults make the built-in model. Checkpoints are written as it goes; a run that was killed
    ends, with --resume, with the same weights.
    """
    if (out is None) == (evaluate is None):
        raise click.UsageError("give either --out DIR or --evaluate MODEL")
    if tokenizer and not text:
        raise click.UsageError("--tokenizer goes with --text")
    _prepare_jax()
    try:
        from training import loop as train_loop
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'llamaspec[train]'") from None
    from reference.config import Config

    stories = train_loop.Stories()
    source = stories
    if text:
        from model.tokenizers.load import load_tokenizer

        spelt = load_tokenizer(tokenizer) if tokenizer else stories.tokenizer
        files = train_loop.companions(tokenizer) if tokenizer else stories.files
        source = train_loop.Text(text, spelt, files, context=options["context"])
    if evaluate:
        click.echo(train_loop.evaluate_model(evaluate, source))
        return
    shape = {name: options.pop(name) for name in ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "context")}
    running = {name: options.pop(name) for name in ("resume", "eval_every", "save_every")}
    config = Config(**shape, vocab=source.tokenizer.vocab, eps=1e-5, theta=10_000.0, tied=True)
    recipe = train_loop.Recipe(config=config, **options)
    assert out is not None
    with _training_progress(recipe.steps) as report:
        directory = train_loop.train(recipe, source, out, report=report, **running)
    click.echo(f"{directory}: {train_loop.parameters(config):,} parameters", err=True)


@contextmanager
def _training_progress(steps: int) -> Iterator[Callable[[TrainingProgress], object]]:
    """A bar on stderr with loss and tokens/s; where nobody looks, a line now and then. Evaluations are lines."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    terminal = sys.stderr.isatty()
    told = 0.0

    def line(progress: TrainingProgress) -> str:
        return f"step {progress.step}  loss {progress.loss:.4f}  {progress.rate:,.0f} tokens/s"

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not terminal) as bar:
        task = bar.add_task("compiling", total=steps)

        def report(progress: TrainingProgress):
            nonlocal told
            bar.update(task, description=line(progress), completed=progress.step)
            if progress.evaluation:
                bar.console.print(f"{line(progress)}  {progress.seconds:.0f} s  {progress.evaluation}", highlight=False)
            elif not terminal and progress.seconds > told + 30:
                told = progress.seconds
                click.echo(f"{line(progress)}  {progress.seconds:.0f} s", err=True)

        yield report


@llamaspec.command()
@click.argument("model", required=False)
@click.option(
    "--suite",
    type=click.Choice(["decode", "growth", "gpu", "models", "kernels", "variants"]),
    default="decode",
    show_default=True,
    help="A model's speed, or how it changes as the work grows. On an H200: all that is to be seen there, whole models "
    "alone, or the rest of the kernels: those of published Llamas, and of other models.",
)
@click.option("--shape", metavar="NAME", help="Random weights of a published Llama in the place of MODEL.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of the weights that run.")
@quantize_option
@click.option("--context", type=click.IntRange(1), help="Tokens of the prompt, and before those that are decoded.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences at once.")
@kernels_option
@click.option(
    "--backend",
    type=click.Choice(["jax", "reference"]),
    default="jax",
    show_default=True,
    help="decode: compiled JAX, or the NumPy definition in float64.",
)
@click.option(
    "--dry-run", is_flag=True, help="The suites of a GPU: next to nothing on a CPU, to see that the suite works."
)
@click.option("--json", "json_file", metavar="FILE", help="Keep every figure, with device and versions.")
@click.option("--plot", "plot_file", metavar="FILE.svg", help="Draw a chart.")
@click.option("--tune", "tune_file", metavar="FILE", help="kernels: find the fastest tiles, and add them to FILE.")
@click.pass_context
def bench(
    invocation: click.Context,
    suite: str,
    dry_run: bool,
    json_file: str | None,
    plot_file: str | None,
    tune_file: str | None,
    **of: Any,
):
    """Measure this machine, and then how close a model comes to what it allows.

    MODEL is the built-in one unless given. The suites gpu, kernels and variants take nine minutes
    each, models three, and run on an H100 or H200; of one that is interrupted FILE.interrupted has what was found.
    After the suites decode and growth, `generate` ends with its share of what was measured.
    """
    import json
    from contextlib import ExitStack

    from model.checkpoints.staging import new_file

    on_gpu = suite in ("gpu", "models", "kernels", "variants")
    for name in of if on_gpu else ["dry_run"]:
        if invocation.get_parameter_source(name) != click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name.replace('_', '-')} is not for the suite {suite}")
    if of["shape"] and of["model"]:
        raise click.UsageError("give either MODEL or --shape NAME")
    if tune_file and (suite != "kernels" or plot_file):
        raise click.UsageError("--tune goes with the suite kernels, and has no chart")
    with ExitStack() as files:
        json_out, plot_out, tune_out = (
            files.enter_context(new_file(path, replace=True)) if path else None
            for path in (json_file, plot_file, tune_file)
        )
        with _progress() as progress:
            if on_gpu:
                from benchmarks.gpu import report as view
                from benchmarks.gpu.suite import run_suite

                rows = run_suite("tuning" if tune_file else suite, dry=dry_run, progress=progress)
                report = view.as_report(rows, suite=suite, dry=dry_run)
            else:
                _prepare_jax()
                from benchmarks import model_report as view
                from benchmarks.model_suite import run_suite
                from model.insight.machine import keep_read_rate

                report = run_suite(suite, progress=progress, **{**of, "model": of["model"] or BUILT_IN})
                if folder := _cache_folder():
                    keep_read_rate(folder, report["ceilings"])
        from benchmarks.report import write_report

        if "interrupted" in report:  # what stands at FILE may be whole, and stays
            where = "above"
            if json_file:
                where = f"in {json_file}.interrupted"
                with new_file(f"{json_file}.interrupted", replace=True) as found:
                    write_report(report, found)
            _print(view.as_text(report))
            _fail(f"interrupted: what was measured until then is {where}", report["interrupted"])
        if json_out:
            write_report(report, json_out)
        if plot_out:
            plot_out.write_text(view.as_svg(report))
        if tune_file and tune_out:
            from benchmarks.gpu.report import tuned

            table = json.loads(Path(tune_file).read_text()) if Path(tune_file).exists() else {}
            write_report(tuned(table, report), tune_out)
    _print(view.as_text(report))
    if wrong := view.wrong(report):
        _fail(f"not right on this device: {', '.join(wrong)}", 1)


@llamaspec.command()
@click.argument("model", required=False)
@click.option("--shape", metavar="NAME", help="Random weights of a published Llama in the place of MODEL.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of the weights that run.")
@quantize_option
@click.option("--context", type=click.IntRange(1), help="Tokens of the prompt, and before those that are decoded.")
@kernels_option
@click.option("--trace", "trace_file", metavar="FILE", help="Keep all that ran, for ui.perfetto.dev; .gz packs it.")
@json_option
def profile(model: str | None, trace_file: str | None, as_json: bool, **of: Any):
    """Where the time of a prompt and of a decoding step goes, by op.

    Nothing is measured of the machine: `bench` says what it would allow.

    \b
    llamaspec profile Llama-3.2-1B --quantize q4
    llamaspec profile --shape stories-110m --context 1000 --trace trace.json.gz
    """
    if of["shape"] and model:
        raise click.UsageError("give either MODEL or --shape NAME")
    from model.checkpoints.staging import new_file

    with new_file(trace_file, replace=True) if trace_file else nullcontext() as staged:
        _prepare_jax()
        from benchmarks.model_profile import as_text
        from benchmarks.model_suite import profile_model
        from model.insight.profile import save

        with _progress() as progress:
            report, trace = profile_model(model=model or BUILT_IN, progress=progress, **of)
        if trace_file and staged:
            save(trace, staged, packed=trace_file.endswith(".gz"))
    if as_json:
        _print_json(report)
    else:
        _print(as_text(report))


POSITIVE = click.FloatRange(0, min_open=True)


@llamaspec.command("verify")
@click.argument("names", nargs=-1, metavar="[OP]...")
@click.option(
    "--candidate",
    metavar="MODULE[:FUNCTION]",
    help="What to verify; of a module, the functions called as the ops are.  [default: the ops of this package]",
)
@click.option("--arrays", help="What it is handed: jax, numpy, torch or cupy.  [default: jax]")
@click.option("--dtype", "dtypes", multiple=True, default=["float32"], show_default=True, help="May be repeated.")
@click.option("--device", help="Where its arrays are, in its library's words: cpu, gpu, cuda:1.")
@click.option("--python", default=sys.executable, metavar="PATH", help="The Python that runs it.  [default: this one]")
@click.option("--examples", type=click.IntRange(1), default=200, show_default=True, help="Draws for an op and dtype.")
@click.option("--time-budget", "seconds", type=POSITIVE, default=60.0, show_default=True, help="Seconds, likewise.")
@click.option(
    "--timeout", type=POSITIVE, default=60.0, show_default=True, help="Seconds for a call and its compilation."
)
@click.option("--shapes", type=click.IntRange(1), help="Different shapes at most.  [default: 64 for jax]")
@click.option("--set", "narrowed", multiple=True, metavar="DRAW=A,B", help="Draw from these only: --set dim=128,256.")
@click.option("--seed", type=click.IntRange(0), help="Same seed, same draws.  [default: drawn, and printed]")
@click.option("--strict", is_flag=True, help="What is suspicious counts as violated.")
@click.option("--replay", metavar="FILE", help="Call with the inputs of a counterexample again.")
@click.option("--replays", default=".", show_default=True, metavar="DIR", help="Where counterexamples are written.")
@click.option("--junit", metavar="FILE", help="Write results for a CI system.")
@click.option("--model", metavar="MODEL", help="Walk through a model instead, and name the first op that is wrong.")
@click.option("--kernels", default="auto", show_default=True, help="With --model: which implementation of the ops.")
@click.option("--list", "listing", is_flag=True, help="Print contracts: how to be called, bounds, laws, mutants.")
@click.option("--mutants", is_flag=True, help="Verify wrong implementations: each must be found out.")
@json_option
def verify_command(names: tuple[str, ...], listing: bool, mutants: bool, **options: Any):
    """Hold ops to the reference, each within a proven bound, on the inputs that break kernels.

    A candidate is called exactly as the reference is: --list shows how. Exits with 0 if all are
    within their bounds and with 1 if not.
    """
    import secrets

    from verify.catalogue import CONTRACTS, contract_for

    if options["seed"] is None:
        options["seed"] = secrets.randbelow(2**32)
    try:
        ops = [contract_for(name).name for name in names] or list(CONTRACTS)
        if listing:
            _list_contracts(ops)
        elif mutants:
            _verify_mutants(ops, seed=options["seed"], as_json=options["as_json"])
        elif options["model"]:
            _verify_model(**options)
        else:
            _verify(ops, named=bool(names), **options)
    except (ImportError, ValueError) as error:
        raise click.UsageError(str(error)) from None


def _list_contracts(ops: list[str]):
    from verify.catalogue import CONTRACTS, IMPLEMENTATIONS
    from verify.report import describe

    for op in ops:
        mutants = [mutant.name for mutant in IMPLEMENTATIONS[op].mutants]
        _print("\n".join(describe(CONTRACTS[op], mutants)) + "\n\n")


def _verify_mutants(ops: list[str], *, seed: int, as_json: bool):
    from verify.mutation import row, table, trials

    click.echo(f"seed {seed}", err=True)
    found = []
    for op in ops:
        for trial in trials(op, seed=seed):
            found.append(trial)
            if not as_json:
                by, seconds, examples, op, mutant = row(trial).values()
                _print(f"{by:11} {seconds:6} s {examples:5} examples  {op}: {mutant}\n")
    if as_json:
        _print_json([row(trial) for trial in found])
    else:
        _print("\n".join(["", *table(found)]) + "\n")
    killed = sum(trial.killed for trial in found)
    click.echo(f"{killed} of {len(found)} mutants killed", err=True)
    if killed < len(found):
        sys.exit(1)


def _verify(ops: list[str], *, named: bool, **options: Any):
    from verify.campaign import Campaign, again, choices, run, run_side_by_side
    from verify.catalogue import CONTRACTS
    from verify.report import as_json, as_junit

    candidate, replay, as_json_text = options["candidate"], options["replay"], options["as_json"]
    names = ("device", "python", "examples", "seed", "seconds", "timeout", "shapes", "dtypes")
    campaign = Campaign(
        **{name: options[name] for name in names},
        arrays=options["arrays"] or "jax",
        only=choices(options["narrowed"]),
        folder=Path(options["replays"]),
    )
    jobs = [] if replay else _verify_jobs(ops, candidate, named=named)
    at_once = 1 if candidate else min(len(jobs), len(os.sched_getaffinity(0)), 4)
    if not replay:
        click.echo(f"seed {campaign.seed}", err=True)
    reports = []
    with _verify_progress(len(jobs) if at_once > 1 else campaign.examples) as (progress, aside):
        if replay:
            told = iter([again(Path(replay), campaign, candidate=candidate, arrays=options["arrays"])])
        elif at_once > 1:
            told = run_side_by_side(jobs, campaign, at_once=at_once, progress=progress)
        else:
            told = run(jobs, campaign, progress=progress)
        walks = () if named or candidate or replay else _walk_random_models(campaign)
        for report, lines in itertools.chain(told, walks):
            reports.append(report)
            if not as_json_text:
                with aside():
                    _print("\n".join(lines) + "\n")
    if as_json_text:
        _print_json(as_json(reports))
    if options["junit"]:
        Path(options["junit"]).write_text(as_junit(reports, CONTRACTS), encoding="utf-8")
    wrong = ("violated", "suspicious") if options["strict"] else ("violated",)
    if any(report.outcome in wrong for report in reports):
        sys.exit(1)


def _verify_jobs(ops: list[str], candidate: str | None, *, named: bool) -> list[Job]:
    """A job for each op and what is verified of it: the candidate, or else all that this package has."""
    from verify.campaign import Job

    if candidate and ":" in candidate:
        if len(ops) > 1:
            raise ValueError("--candidate is one function: name the op that it is, or the module alone for several")
        return [Job(ops[0], candidate)]
    if candidate:
        if not named:
            raise ValueError("--candidate is a module: name the ops that it has")
        return [Job(op, f"{candidate}:{op}") for op in ops]

    from model.candidates.table import CANDIDATES
    from verify.catalogue import IMPLEMENTATIONS

    patient: dict[str, Any] = {"shapes": 4, "timeout": 600.0}  # what is interpreted takes seconds for a new shape
    jobs = []
    for op in ops:
        jobs += [
            Job(op, c.function, dtypes=c.dtypes, only=c.only, share=1 / 4, **(patient if c.kernel else {}))
            for c in CANDIDATES
            if c.op == op
        ]
        if not any(job.op == op for job in jobs):
            right = IMPLEMENTATIONS[op]
            jobs.append(Job(op, right.name, arrays="numpy", only=right.only, share=1 / 4))
    return jobs


def _verify_model(*, model: str, kernels: str, dtypes: tuple[str, ...], seed: int, as_json: bool, **_: Any):
    """Each op of a model beside its definition, on a prompt of random tokens and two more after it."""
    from model.checkpoints.open import open_checkpoint
    from model.running.jax_backend import choose_ops
    from verify.report import counterexample
    from verify.walk import table

    checkpoint = open_checkpoint(model)
    click.echo(f"seed {seed}", err=True)
    wrong = False
    for dtype in dtypes:
        steps, report = _walk(checkpoint, choose_ops(kernels), dtype, seed, name=f"{kernels} kernels")
        wrong = wrong or report.outcome == "violated"
        if as_json:
            _print_json([step._asdict() for step in steps])
        else:
            _print("\n".join([*table(steps), *counterexample(report, None)]) + "\n")
    if wrong:
        sys.exit(1)


def _walk_random_models(campaign: Campaign) -> Iterator[tuple[Report, list[str]]]:
    """Every op of small models, plain, as a CPU has it, and by kernels, in each dtype that models run in."""
    _prepare_jax()
    from model.candidates.kernels import OPS, runnable
    from model.checkpoints.checkpoint import Checkpoint, Tensor
    from model.ops.block import CPU, XLA
    from model.tensors import tensor_shapes
    from verify.report import counterexample
    from verify.walk import CONFIGS, KERNELS, weights

    tables = {"xla": (XLA, nullcontext), "cpu": (CPU, nullcontext), "our": (OPS, runnable)}
    models = [(config, name, kernels) for name, config in CONFIGS.items() for kernels in ("xla", "cpu")]
    for config, name, kernels in [*models, (KERNELS, "heads of 64", "our")]:
        ops, context = tables[kernels]
        arrays = weights(tensor_shapes(config), seed=campaign.seed)
        tensors = {tensor: Tensor(a.shape, a.dtype, lambda a=a: a) for tensor, a in arrays.items()}
        checkpoint = Checkpoint("random", "memory", config, tensors, bos=None, stops=frozenset())
        for dtype in campaign.dtypes:
            if dtype != "float16":
                with context():
                    _, report = _walk(checkpoint, ops, dtype, campaign.seed, name=f"{kernels} kernels, {name}")
                yield report, counterexample(report, None)


def _walk(checkpoint: Checkpoint, ops: Ops, dtype: str, seed: int, *, name: str) -> tuple[list[Step], Report]:
    from time import monotonic

    _prepare_jax()
    import numpy as np

    from verify.precision import precision
    from verify.walk import report, walk

    start, config, wanted = monotonic(), checkpoint.config, precision(dtype)
    prompt = min(24, config.context - 2)
    tokens = np.random.default_rng(seed).integers(0, config.vocab, prompt + 2).astype(np.int32)
    chunks = [tokens[:prompt], tokens[prompt:-1], tokens[-1:]]
    model, exact = _walkable(checkpoint, ops, wanted.dtype, len(tokens))
    steps = []
    with _progress() as progress:
        for step in walk(model, exact, chunks, config=config, unit=wanted.unit):
            steps.append(step)
            progress(step.name, (step.layer or 0) / config.layers)
    return steps, report(steps, candidate=name, dtype=dtype, seed=seed, seconds=monotonic() - start)


def _walkable(checkpoint: Checkpoint, table: Ops, dtype: np.dtype, rows: int) -> tuple[WalkedModel, Params]:
    """What `verify.walk` is handed: the model as it runs, and for the reference the weights that it holds."""
    import inspect
    from dataclasses import replace

    import jax
    import numpy as np

    from model.cache import empty_cache
    from model.ops.block import Ops, Positions
    from model.running.reference_backend import load_reference_params
    from model.weights.params import load_params
    from verify.walk import Model

    params = load_params(checkpoint, dtype=dtype, positions=rows)
    held = {
        name: tensor._replace(read=lambda tensor=tensor: tensor.read().astype(dtype))
        for name, tensor in checkpoint.tensors.items()
    }

    def compiled(op: Callable) -> Callable:
        parameters = inspect.signature(op).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return jax.jit(op, static_argnames=[n for n in ("config", "window") if takes_any or n in parameters])

    def positions(at: np.ndarray) -> Positions:
        return Positions(*map(jax.device_put, (at, *(np.asarray(table)[at] for table in params.rope))))

    def cache(capacity: int) -> list[Any]:
        return list(empty_cache(checkpoint.config, batch=1, capacity=capacity, dtype=dtype).layers)

    ops = Ops(*map(compiled, table))
    return Model(params, ops, cache, positions, jax.device_put), load_reference_params(
        replace(checkpoint, tensors=held)
    )


@contextmanager
def _verify_progress(examples: int) -> Iterator[tuple[Callable[[str], Callable[[int], object]], Callable]]:
    """Bars on stderr, one after the other, and what takes them aside while something is printed.

    Nothing where nobody looks.
    """
    if not sys.stderr.isatty():
        yield lambda stage: lambda done: None, nullcontext
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=examples)

        def begin(stage: str) -> Callable[[int], object]:
            bar.reset(task, description=stage, total=examples)
            return lambda done: bar.update(task, completed=done)

        @contextmanager
        def aside():
            bar.stop()
            yield
            bar.start()

        yield begin, aside


def main() -> NoReturn:
    """Run the command line. 0: done; 1: the work failed; 2: wrong usage; 130: interrupted; 128 + n: by signal n."""
    import signal

    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        _fail("standard output is closed", 1)
    for end in (signal.SIGTERM, signal.SIGHUP):  # as exceptions, so that a half-written file is removed
        signal.signal(end, lambda number, _: sys.exit(128 + number))
    try:
        llamaspec.main(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        _fail(f"{error.format_message()}{hint}", 2)
    except click.ClickException as error:
        _fail(error.format_message(), 1)
    except (KeyboardInterrupt, click.Abort):
        click.echo(err=True)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again as it flushes
        sys.exit(1)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        _fail(_one_line(error), 1)
    sys.exit(0)


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(status)


def _one_line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, ValueError | MemoryError | OSError | FloatingPointError):
        return text
    return f"{type(error).__name__}: {text} (a fault of llamaspec: --debug shows where)"


def _parse_ids(text: str, vocab: int) -> list[int]:
    from model.options import check_ids

    if not re.fullmatch(r"\s*(-?[0-9]+\s*(,\s*-?[0-9]+\s*)*)?", text):
        raise click.UsageError(f"ids are whole numbers with commas between them, got {text!r}")
    ids = [int(id) for id in text.split(",") if text.strip()]
    check_ids(ids, vocab)
    return ids


def _request(options: dict[str, Any]) -> dict[str, Any]:
    """What `Llama.generate` takes, checked before a model is loaded."""
    from model.options import SamplingOptions, check_max_new_tokens, check_seed

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {
        "sampling": SamplingOptions(**{name: options[name] for name in names}),
        "max_new_tokens": check_max_new_tokens(options["max_new_tokens"]),
        "seed": check_seed(options["seed"]),
        "stop": options["stop"],
    }


def _tell_seed(options: dict[str, Any], seed: int):
    if options["seed"] is None:
        click.echo(f"seed {seed}", err=True)


def _load(options: dict[str, Any], *, greedy: bool, prompt: str | None = None) -> Llama:
    """The model that the options name. Files and prompt are checked before JAX, which takes a second, is imported."""
    from model.checkpoints.open import open_checkpoint
    from model.options import check_length, choose_context
    from model.tokenizers.of_model import tokenizer_of
    from model.tokenizers.tokenizer import encode_text

    checkpoint = open_checkpoint(options["model"])
    tokenizer = tokenizer_of(checkpoint, options["tokenizer"])
    context = choose_context(options["context"], checkpoint.config.context)
    if prompt is not None:
        check_length(encode_text(tokenizer, prompt), context)
    _prepare_jax()
    from model.llama import Llama, load_backend

    running = {name: options[name] for name in ("context", "dtype", "quantize", "cache", "backend", "kernels")}
    with _progress() as progress:
        backend = load_backend(checkpoint, greedy=greedy, progress=progress, **running)
    return Llama(checkpoint.config, tokenizer, backend, stops=checkpoint.stops)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], object]]:
    """A bar on stderr while it lasts; nothing where nobody looks."""
    if not sys.stderr.isatty():
        yield lambda stage, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("opening", total=1)
        yield lambda stage, share: bar.update(task, description=stage, completed=share)


def _prepare_jax():
    """Keep compiled programs between runs, so that the second start is fast."""
    import jax

    if folder := _cache_folder():
        jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _cache_folder() -> Path | None:
    """Where this user's caches go; None where nothing can be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamaspec"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _print(text: str):
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _print_json(value: object):
    import json

    _print(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _stream(generation: Generation, *, answer: bool = False):
    """Print tokens as they come, then a newline. An `answer` begins with a word: templates put a space before it."""
    begun = not answer
    try:
        for token in generation:
            text = token.text if begun else token.text.lstrip()
            begun = begun or text != ""
            _print(text)
    finally:
        _print("\n")


def _summary(generation: Generation, llama: Llama) -> str:
    first, total, rate = generation.timings
    return (
        f"{generation.prompt_tokens} + {len(generation.ids)} tokens, first after {first:.2f} s, "
        f"then {rate:.1f} tokens/s{_bandwidth(generation, llama)}, {total:.2f} s in all, "
        f"ended by {generation.finish_reason}"
    )


def _bandwidth(generation: Generation, llama: Llama) -> str:
    """What decoding read a second, beside what `bench` has measured here."""
    read = llama.bytes_read(generation.prompt_tokens + len(generation.ids) / 2)
    rate = generation.timings.tokens_per_second
    if not read or not rate:
        return ""
    from model.insight.machine import reading_in_words

    return f" ({reading_in_words(_cache_folder(), bytes=read, seconds=1 / rate)})"


if __name__ == "__main__":
    main()
