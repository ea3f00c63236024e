"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

BUILT_IN = "stories"  # the model that comes with the package


class Verb(click.Command):
    """A command that takes --debug wherever a person writes it; `cli.main` looks for it."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks."))


def combined(*options: Callable) -> Callable:
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
running_options = combined(
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


sampling_options = combined(
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
