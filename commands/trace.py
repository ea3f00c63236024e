"""`trace`: one token on its way through a model."""

from __future__ import annotations

import click

from llamaspec.commands.loading import prepare_jax
from llamaspec.commands.options import Verb, combined, json_option, kernels_option, model_option, tokenizer_option
from llamaspec.commands.output import say, write, write_json
from llamaspec.commands.progress import progress_bar
from llamaspec.commands.text_to_walk import layers_option, read, walk_dtype_option


@click.command(cls=Verb)
@click.argument("text")
@click.option(
    "--position",
    type=int,
    default=-1,
    show_default=True,
    help="Follow the token at this position: 0 is the first (BOS, if the model has it), -1 the last.",
)
@layers_option("all")
@walk_dtype_option
@combined(model_option, tokenizer_option, kernels_option, json_option)
def trace(
    text: str,
    position: int,
    layers: tuple[int, ...],
    dtype: str,
    model: str,
    tokenizer: str | None,
    kernels: str,
    as_json: bool,
):
    """Follow one token of TEXT through a model, op by op.

    For each op, prints its shapes, and the bytes and operations of one token. Also compares the op's output with the
    reference: divides the error of each element by the element's proven bound, and prints the element with the largest
    quotient (expected, actual, difference). For each layer, prints the tokens that each head attends to, and the next
    token that the model would predict if it ended after this layer.

    \b
    llamaspec trace "Once upon a time" --layer 0 --layer 9
    """
    from llamaspec.learn.trace import trace as walk
    from llamaspec.learn.trace_text import as_json as to_json
    from llamaspec.learn.trace_text import lines

    checkpoint, tokens, text_of = read(text, model=model, tokenizer=tokenizer, layers=layers)
    config = checkpoint.config
    if not -len(tokens) <= position < len(tokens):
        raise click.UsageError(f"--position {position}: the text has tokens 0 to {len(tokens) - 1}")

    prepare_jax()
    from llamaspec.model.candidates.walking import chosen_ops, walkable
    from llamaspec.verify.bounds.precision import precision

    with progress_bar() as progress:
        walker = walkable(checkpoint, chosen_ops(kernels), dtype=precision(dtype).dtype, rows=len(tokens))
        walked = walk(
            walker, tokens, position=position, config=config, dtype=dtype, layers=layers or None, progress=progress
        )
    if as_json:
        write_json(to_json(walked, text_of=text_of))
        return
    say(
        f"token {walked.position} of {len(tokens)}: {text_of(tokens[walked.position])!r} (id {tokens[walked.position]})"
    )
    write("\n".join(lines(walked, text_of=text_of)) + "\n")
