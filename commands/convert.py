"""`convert`: write a checkpoint in another format."""

from __future__ import annotations

from typing import Any

import click

from llamaspec.commands.loading import open_model, prepare_jax
from llamaspec.commands.options import COUNT, FILE, MIXTURE_NAMES, MODEL, SCHEME_NAMES, Verb, tokenizer_option
from llamaspec.commands.output import say
from llamaspec.commands.progress import progress_bar


@click.command(cls=Verb)
@click.argument("source", type=MODEL, metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--to",
    type=click.Choice(["safetensors", "llama2c", "gguf", "onnx"]),
    help="Write this format. --quantize awq, gptq and smoothquant need safetensors.",
)
@click.option(
    "--quantize",
    type=click.Choice([*SCHEME_NAMES, "awq", "gptq", "smoothquant", "q8_0", "q4_0", *MIXTURE_NAMES]),
    help="Quantize the matrices by this scheme. --to gguf allows q8_0, q4_0, mxfp4, and llama.cpp's mixtures of types, "
    "such as q4_k_m; --to llama2c allows q8_0; --to onnx allows q8, q8_row and q4.  [default: unchanged]",
)
@click.option(
    "--calibration",
    metavar="FILE",
    help="awq, gptq, smoothquant, and mixtures: calibrate on the text in FILE. Choose a text that is typical of the "
    "model's use.",
)
@click.option(
    "--imatrix",
    type=FILE,
    metavar="FILE",
    help="Mixtures: use the importance matrix in FILE, which llama.cpp's llama-imatrix wrote.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Store the matrices of a GGUF file in this dtype.  [default: as in SRC]",
)
@click.option(
    "--adapter",
    type=FILE,
    metavar="DIR",
    help="Merge the LoRA adapter in DIR, which `tune --lora` or PEFT wrote, into the weights, before --quantize.",
)
@click.option("--layers", type=COUNT, metavar="N", help="Write a model of only the first N layers.")
@tokenizer_option
def convert(source: str, destination: str, adapter: str | None, layers: int | None, **options: Any):
    """Convert a checkpoint to another format, or quantize it.

    DST is a Hugging Face directory (safetensors), or a file for llama2.c, llama.cpp (gguf) or ONNX's runtimes. Weights
    stay the same bit for bit, unless --quantize, --dtype or --adapter changes the matrices. A GGUF file and a directory
    include the tokenizer. An ONNX file has its weights in a second file, DST.data. DST must not exist yet, and appears
    only when it is complete.

    \b
    llamaspec convert stories15M.bin stories15M-hf --to safetensors
    llamaspec convert Llama-3.2-1B llama-3.2-1b.gguf --to gguf --quantize q8_0
    llamaspec convert Llama-3.2-1B llama-3.2-1b.gguf --to gguf --quantize q4_k_m --imatrix imatrix.gguf
    llamaspec convert Llama-3.2-1B llama-3.2-1b.onnx --to onnx
    llamaspec convert stories robot-stories --to safetensors --adapter robot
    llamaspec convert Llama-3.2-1B awq --to safetensors --quantize awq --calibration wiki.txt
    """
    from llamaspec.model.checkpoints.adapter import merged
    from llamaspec.model.checkpoints.smaller import first_layers
    from llamaspec.model.convert import CALIBRATED, check_request
    from llamaspec.model.convert import convert as write

    if not options["to"] and options["quantize"] not in CALIBRATED:
        raise click.UsageError("Missing option '--to'. Choose from: safetensors, llama2c, gguf, onnx")
    options["to"] = options["to"] or "safetensors"
    try:
        check_request(**options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    checkpoint = open_model(source, adapter)
    in_codes = sum(bool(tensor.applies) for tensor in checkpoint.tensors.values())
    checkpoint = merged(checkpoint)
    if layers:
        checkpoint = first_layers(checkpoint, layers)
    if in_codes and not options["quantize"]:
        say(f"{in_codes} quantized matrices become float32, to hold the adapter exactly; --quantize makes them smaller")
    if options["calibration"]:
        prepare_jax()
    done, sizes = 0, {name: tensor.bytes for name, tensor in checkpoint.tensors.items()}
    with progress_bar() as progress:

        def written(name: str, _: int):
            nonlocal done
            done += sizes.get(name, 0)  # the size in SRC: quantized tensors become smaller
            progress(f"writing {name}", done / sum(sizes.values()))

        notes = write(checkpoint, destination, progress=written, calibrating=progress, **options)
    for note in notes:
        say(note)
    say(f"wrote {len(checkpoint.tensors)} tensors to {destination}")
