"""`xray`: a web page that shows how a model computes on a text."""

from __future__ import annotations

from pathlib import Path

import click

from llamaspec.commands.loading import prepare_jax
from llamaspec.commands.options import Verb, combined, kernels_option, model_option, tokenizer_option
from llamaspec.commands.output import say, write
from llamaspec.commands.progress import progress_bar
from llamaspec.commands.text_to_walk import layers_option, read, walk_dtype_option


@click.command(cls=Verb)
@click.argument("text")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write index.html and the page's other files to FOLDER.",
)
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@layers_option("all layers of a small model, otherwise the first, the middle and the last")
@walk_dtype_option
@combined(model_option, tokenizer_option, kernels_option)
def xray(
    text: str,
    out: Path,
    show: bool,
    layers: tuple[int, ...],
    dtype: str,
    model: str,
    tokenizer: str | None,
    kernels: str,
):
    """Write a web page that shows TEXT on its way through a model.

    The page shows the model's blocks, and in each block its ops. For each op, it shows the equation, the code of the
    reference, the lines that ran, the numbers as heat maps, and the error. Attention, RoPE, the KV cache, sampling and
    quantization have interactive pictures. The page loads nothing from the network. The command prints the page's path.

    \b
    llamaspec xray "Once upon a time" --out page --open
    """
    from llamaspec.learn.xray.content import default_layers
    from llamaspec.learn.xray.page import check_folder, write_page

    try:
        check_folder(out)
    except FileExistsError as error:
        raise click.UsageError(f"--out: {error}") from None
    checkpoint, tokens, text_of = read(text, model=model, tokenizer=tokenizer, layers=layers)
    checkpoint.config.check_llama("X-ray pages")

    prepare_jax()
    from llamaspec.learn.trace import record
    from llamaspec.model.candidates.walking import chosen_ops, walkable
    from llamaspec.verify.bounds.precision import precision

    with progress_bar() as progress:
        walker = walkable(checkpoint, chosen_ops(kernels), dtype=precision(dtype).dtype, rows=len(tokens))
        recording = record(
            walker,
            tokens,
            config=checkpoint.config,
            dtype=dtype,
            layers=sorted(set(layers)) or default_layers(checkpoint.config),
            progress=progress,
        )
        index = write_page(out, recording, checkpoint, name=Path(model).name, text_of=text_of, progress=progress)
    size = sum(file.stat().st_size for file in index.parent.rglob("*") if file.is_file())
    say(f"page of {len(tokens)} tokens and {len(recording.layers)} layers, {size / 1e6:.1f} MB")
    write(f"{index}\n")
    if show:
        click.launch(str(index))
