"""Options that several commands share."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from llamaspec.commands.output import say, wrapped
from llamaspec.model.options import SAMPLING, SamplingOption

COUNT = click.IntRange(1)
POSITIVE = click.FloatRange(0, min_open=True)
ALIAS = "model_alias"  # the second way to name a model; see `Verb`
BUILT_IN = "stories"  # the model that comes with the package
SECTIONS = {  # sections of a verb's help and their parameters; all others come before these
    "Model and memory": (
        "model", "tokenizer", "adapter", "context", "dtype", "quantize", "cache", "backend", "kernels",
    ),
    "Several devices": ("devices", "parallel", "coordinator", "processes", "process", "peer_timeout"),
    "Choice of the next token": (
        *SAMPLING, "no_generation_config", "seed", "stop", "max_new_tokens",
    ),
}  # fmt: skip


NARROW = 60  # columns; a narrower terminal gets the help of an option on the line below its name


def write_help_text(text: str, formatter: click.HelpFormatter) -> None:
    """Write the help text of a command. Breaks long example commands so that a shell still accepts them."""
    formatter.write_paragraph()
    with formatter.indentation():
        width = formatter.width - formatter.current_indent
        lines = inspect.cleandoc(text).splitlines()
        broken = [piece for line in lines for piece in (broken_example(line, width) if is_example(line) else [line])]
        formatter.write_text("\n".join(broken))


def is_example(line: str) -> bool:
    """Return whether a line of help is an example command of llamaspec."""
    return re.match(r"llamaspec \w", line) is not None


def broken_example(line: str, width: int) -> list[str]:
    """Break a command into lines of at most `width` columns. Each line except the last ends with a backslash.

    >>> broken_example('llamaspec generate "Once upon a time" --seed 7', 40)
    ['llamaspec generate "Once upon a time" \\\\', '    --seed 7']
    """
    if len(line) <= width:
        return [line]
    quoted_whole = re.sub(r'"[^"]*"', lambda quoted: quoted[0].replace(" ", "\0"), line)
    return wrapped(quoted_whole, width - 2, " " * 4).replace("\n", " \\\n").replace("\0", " ").split("\n")


def broken_choices(option: str, width: int) -> str:
    """Break an option's list of choices into lines of at most `width` columns. Lines end after a choice.

    >>> print(broken_choices("--to [safetensors|llama2c|gguf]", 24))
    --to [safetensors|
          llama2c|gguf]
    """
    return option if len(option) <= width else wrapped(option.replace("|", "| "), width, " " * 6).replace("| ", "|")


class Verb(click.Command):
    """A command that accepts --debug anywhere. The flag does nothing here: `cli.main` looks for it in `sys.argv`.

    The user may name the model that a command runs as an argument or by `--model`. If the command takes a prompt or
    another argument, only `--model` names the model. If the command samples tokens, its help groups the options into
    sections.
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks."))
        self._required: click.Argument | None = None  # the model, if the user must name one
        model = next((param for param in self.params if param.name == "model" and param.type is MODEL), None)
        if isinstance(model, click.Argument):
            if model.required:  # the help shows MODEL without brackets
                self._required, model.required, model.metavar = model, False, "MODEL"
            self.params.append(click.Option(["--model", ALIAS], type=MODEL, help="Another way to name MODEL."))
        elif model and not any(isinstance(param, click.Argument) for param in self.params):
            self.params.append(click.Argument([ALIAS], type=MODEL, metavar="[MODEL]", required=False))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments as click does. A model that is named twice, or not at all, is a UsageError."""
        remainder = super().parse_args(ctx, args)
        if (model := ctx.params.pop(ALIAS, None)) is not None:
            if ctx.get_parameter_source("model") is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"two models: {ctx.params['model']} and {model}; name one", ctx)
            ctx.params["model"] = model
        if self._required and ctx.params["model"] is None and not ctx.resilient_parsing:
            raise click.MissingParameter(ctx=ctx, param=self._required)
        return remainder

    def invoke(self, ctx: click.Context) -> Any:
        """Prepare the process, then run the command, which may import JAX. Click does not call this for `--help`.

        If the command runs in several processes, `ctx.obj` is a `model.parallel.processes.Watch`, otherwise None.
        """
        from llamaspec.model.running.process import prepare_process

        prepare_process(debug="--debug" in sys.argv)
        if "devices" not in ctx.params:
            return super().invoke(ctx)
        from llamaspec.commands.parallel import taking_part

        with taking_part(ctx.params, ctx.command) as ctx.obj:
            return super().invoke(ctx)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help text, with its examples."""
        write_help_text(self.help or "", formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section."""
        home = {name: section for section, names in SECTIONS.items() for name in names}
        sampled = any(param.name == "temperature" for param in self.params)
        sections: dict[str, list[tuple[str, str]]] = {"Options": []} | {name: [] for name in SECTIONS}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                named = broken_choices(record[0], formatter.width - 2)
                sections[home.get(param.name or "", "Options") if sampled else "Options"].append((named, record[1]))
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=30 if formatter.width >= NARROW else 6)


class ModelName(click.ParamType):
    """A model: a path, the built-in name, or a name on the Hub. The shell completes file names."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name. Prints a line on stderr if a file hides the built-in model."""
        say_what_hides(value)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete file names and the name of the built-in model."""
        built_in = [CompletionItem(BUILT_IN)] if incomplete and BUILT_IN.startswith(incomplete) else []
        return [*built_in, CompletionItem(incomplete, type="file")]


class PictureName(click.ParamType):
    """A file that the command draws. Its name must end in .svg: any other file could be one that the user needs."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name."""
        if not value.lower().endswith(".svg"):
            self.fail(f"expected the name of a file that ends in .svg, got {value!r}", param, ctx)
        return value


MODEL = ModelName()
SVG = PictureName()
FILE = click.Path(path_type=str)  # the shell completes file names


def default_model() -> str:
    """Return the name of the default model. Prints a line on stderr if a file of this name hides the model."""
    say_what_hides(BUILT_IN)
    return BUILT_IN


def say_what_hides(model: str) -> None:
    """Print a line on stderr if a file or folder with the name of the built-in model is used in its place."""
    if model == BUILT_IN and os.path.exists(model):
        say(f"using ./{model}, because it has the name of the built-in model")


def combined(*options: Callable) -> Callable:
    """Combine decorators into one. The help shows their options in this order."""

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_option = click.option(
    "--model",
    type=MODEL,
    default=BUILT_IN,
    show_default=True,
    help="Run this model: a GGUF file, a llama2.c file, a Hugging Face directory, or owner/name in the Hub's cache.",
)
tokenizer_option = click.option(
    "--tokenizer",
    type=FILE,
    metavar="PATH",
    help="Use this tokenizer: a file, or a directory that has one.  [default: the one in the model's file, or "
    "tokenizer.json, tekken.json, tokenizer.model, tokenizer.bin, or vocab.json with merges.txt next to it]",
)
template_option = click.option(
    "--template",
    metavar="NAME|FILE",
    help="Use this chat template: a file, llama3, chatml, mistral, mistral-tekken, llama2, vicuna, or the name of one "
    "of the model's templates.  [default: the model's default template]",
)
SCHEME_NAMES = ("q8", "q8_row", "q4", "nf4", "fp8", "mxfp4")  # reference.quantizers.schemes defines them
MIXTURE_NAMES = ("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "iq4_nl")  # model.checkpoints.gguf.mixtures defines them
kernels_option = click.option(
    "--kernels",
    type=click.Choice(["auto", "xla", "cpu", "pallas"]),
    default="auto",
    show_default=True,
    help="Run the ops with GPU kernels (pallas), with plain JAX (xla), or with plain JAX arranged for CPUs (cpu).",
)
quantize_option = click.option(
    "--quantize",
    type=click.Choice(SCHEME_NAMES),
    help="Quantize the matrices by this scheme while loading.  [default: keep them as stored]",
)
devices_option, devices_of_processes_option = (
    click.option(
        "--devices",
        type=COUNT,
        metavar="N",
        help=f"Run the model on N devices, or on N virtual devices of a CPU.  [default: {default}]",
    )
    for default in ("1", "1; with --processes, all their devices")
)
parallel_option = click.option(
    "--parallel",
    type=click.Choice(["tensor", "context"]),
    default="tensor",
    show_default=True,
    help="With --devices: shard heads and columns (tensor), or positions of the KV cache (context).",
)
processes_options = combined(
    click.option("--coordinator", metavar="HOST:PORT", help="Connect the processes at this address of process 0."),
    click.option(
        "--processes", type=COUNT, metavar="N", help="Run the model in N processes, each started with the same command."
    ),
    click.option("--process", type=click.IntRange(0), metavar="I", help="Number of this process, from 0 to N - 1."),
    click.option(
        "--timeout",
        "peer_timeout",  # not `timeout`: `verify` has its own --timeout
        type=click.FloatRange(1),
        default=30.0,
        show_default=True,
        metavar="SECONDS",
        help="End with an error if another process does not answer for this long.",
    ),
)
_context, _dtype, _cache = (
    click.option(
        "--context",
        type=int,
        metavar="N",
        help="Use a KV cache for N tokens.  [default: the model's context, 4096 at most]",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16"]),
        help="Compute with this dtype.  [default: float32 on a CPU; on a GPU bfloat16, or float32 if the model is "
        "stored in float32]",
    ),
    click.option(
        "--cache",
        type=click.Choice(["int8"]),
        help="Store the KV cache in int8, with one scale per key and value.  [default: in the dtype of the weights]",
    ),
)
_backend = click.option(
    "--backend",
    type=click.Choice(["jax", "reference"]),
    default="jax",
    show_default=True,
    help="Run compiled JAX, or the float64 NumPy reference.",
)
adapter_option = click.option(
    "--adapter",
    type=FILE,
    metavar="DIR",
    help="Run the model with the LoRA adapter in DIR, which `tune --lora` or PEFT wrote.",
)
running_options = combined(
    adapter_option,
    _context,
    _dtype,
    quantize_option,
    _cache,
    _backend,
    kernels_option,
    devices_of_processes_option,
    parallel_option,
)
serving_options = combined(_context, _dtype, quantize_option, _cache, kernels_option)


def max_new_tokens(default: int) -> Callable:
    """Make the option `--max-new-tokens`.

    A story of the built-in model may have about 315 tokens, so `story` needs a higher `default`.
    """
    text = "Stop after N tokens."
    return click.option("--max-new-tokens", type=int, default=default, show_default=True, metavar="N", help=text)


def generation_options(most: int) -> Callable:
    """Make the options of a command that generates text. `most` is the default of --max-new-tokens."""
    return combined(
        model_option,
        tokenizer_option,
        max_new_tokens(most),
        sampling_options,
        running_options,
        speculate_option,
        processes_options,
        timings_option,
    )


def _sampled(option: SamplingOption) -> Callable:
    flag = f"--{option.name.replace('_', '-')}"
    text = f"{option.help}  [default: the model's, else {option.default:g}]"
    return click.option(flag, type=option.kind, help=text)


generation_config_option = click.option(
    "--no-generation-config",
    is_flag=True,
    help="Do not take defaults for these choices from the model's generation_config.json.",
)
sampling_options = combined(
    *map(_sampled, SAMPLING.values()),
    generation_config_option,
    click.option(
        "--seed",
        type=int,
        help="Draw with this seed. The same seed gives the same text.  [default: random, and printed]",
    ),
    click.option(
        "--stop",
        multiple=True,
        metavar="TEXT",
        help="Stop when the model writes this text, and do not print it. May be repeated.",
    ),
)
emulate_option = click.option(
    "--emulate-activations",
    type=click.Choice(["q8_0", "ggml", "int8"]),
    help="Round activations before they are multiplied by a matrix. ggml: to the type that llama.cpp uses for the "
    "matrix's type, such as Q8_0 for Q4_0 and Q8_K for Q4_K. q8_0: to Q8_0, for every quantized matrix. int8: to int8 "
    "with one scale per token as SmoothQuant does, for matrices in int8.",
)
speculate_option = click.option(
    "--speculate",
    is_flag=True,
    help="Draft tokens from the text itself, and verify several at once. The text stays the same, and may take less "
    "time if it repeats or quotes something. Needs --backend jax on one device, a CPU.",
)
timings_option = click.option(
    "--timings", is_flag=True, help="Print how long each phase took, from the start of the command to the first token."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
