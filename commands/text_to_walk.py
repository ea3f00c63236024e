"""The text that `trace` and `xray` follow through a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from llamaspec.commands.loading import open_with_tokenizer

if TYPE_CHECKING:
    from llamaspec.model.checkpoints.checkpoint import Checkpoint


walk_dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Compute in this dtype.",
)


def layers_option(default: str) -> Callable:
    """Make the option `--layer`, which chooses the layers to show.

    `default` describes what is shown without the option.
    """
    text = f"Show this layer. May be repeated.  [default: {default}]"
    return click.option("--layer", "layers", type=click.IntRange(0), multiple=True, help=text)


class ModelAndTokens(NamedTuple):
    """A checkpoint with its tokenizer, and a text as tokens."""

    checkpoint: Checkpoint
    tokens: list[int]
    text_of: Callable[[int], str]  # returns the text of a token id


def read(text: str, *, model: str, tokenizer: str | None, layers: Sequence[int]) -> ModelAndTokens:
    """Open a model and tokenize a text.

    Raises UsageError if the text has no tokens or the model lacks one of `layers`.
    """
    from llamaspec.model.options import check_length, choose_context
    from llamaspec.model.tokenizers.tokenizer import encode_text

    checkpoint, vocabulary = open_with_tokenizer(model, tokenizer)
    config = checkpoint.config
    tokens = encode_text(vocabulary, text)
    check_length(tokens, choose_context(None, config.context))
    if not tokens:
        raise click.UsageError("the text is empty, and this model has no BOS token to begin with")
    if wrong := [i for i in layers if i >= config.layers]:
        raise click.UsageError(f"--layer {wrong[0]}: the model has layers 0 to {config.layers - 1}")

    def text_of(token: int) -> str:
        spelling = vocabulary.bytes_of(token).decode(errors="replace")
        return spelling or vocabulary.piece(token)

    return ModelAndTokens(checkpoint, tokens, text_of)
