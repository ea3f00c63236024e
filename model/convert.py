"""Converts a checkpoint to another format, with its tokenizer and chat template if the format has room for them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llamaspec.model.chat.template import template_of
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.gguf.write import FLOATS, QUANTIZED_TYPES, write_gguf
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.llama2c.write import write_llama2c
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.recognize import leads_out
from llamaspec.model.tokenizers.gguf_writer import unkept, vocabulary_keys
from llamaspec.model.tokenizers.load import tokenizer_in
from llamaspec.model.tokenizers.of_model import tokenizer_if_any, tokenizer_inside, tokenizer_of
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.model.tokenizers.tokenizer_config import stated_tokens
from llamaspec.reference.quantizers.schemes import SCHEMES

TensorWritten = Callable[[str, int], None]  # called with the name of a tensor that was written, and its bytes

CALIBRATED = ("awq", "gptq", "smoothquant")
SCHEMES_OF = {"safetensors": (*SCHEMES, *CALIBRATED), "llama2c": ("q8_0",), "gguf": tuple(QUANTIZED_TYPES)}


def check_request(
    to: str, *, quantize: str | None, dtype: str | None, tokenizer: str | Path | None, calibration: str | Path | None
) -> None:
    """Raise ValueError for options that the format `to` does not have.

    >>> check_request("llama2c", quantize="q4", dtype=None, tokenizer=None, calibration=None)
    Traceback (most recent call last):
    ValueError: llama2c has no q4, only q8_0
    """
    if quantize and quantize not in SCHEMES_OF[to]:
        raise ValueError(f"{to} has no {quantize}, only {', '.join(SCHEMES_OF[to])}")
    if quantize in CALIBRATED and not calibration:
        raise ValueError(f"{quantize} needs a calibration: a file of text like what the model is for")
    if calibration and quantize not in CALIBRATED:
        raise ValueError(f"a calibration is for {', '.join(CALIBRATED)} alone")
    if to != "gguf" and dtype:
        raise ValueError("a dtype can be chosen for gguf alone")
    if to != "gguf" and tokenizer and not calibration:
        beside = "; safetensors takes along what lies beside the model" if to == "safetensors" else ""
        raise ValueError(f"a tokenizer can be chosen for gguf alone, or with a calibration{beside}")
    if dtype and quantize:
        raise ValueError(f"matrices are either {dtype} or {quantize}")
    if dtype and dtype not in FLOATS:
        raise ValueError(f"gguf has no {dtype}, only {', '.join(FLOATS)}")


def convert(
    checkpoint: Checkpoint,
    destination: str | Path,
    *,
    to: str,
    quantize: str | None = None,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    calibration: str | Path | None = None,
    progress: TensorWritten | None = None,
    calibrating: Callable[[str, float], object] = lambda stage, share: None,
) -> list[str]:
    """Write `checkpoint` to `destination`, which must not exist, in the format `to`: one of `SCHEMES_OF`.

    - `quantize` is a scheme for the matrices, and `dtype` their dtype in a GGUF file. By default every weight stays as
      it is stored.
    - `tokenizer` is a path, by default the model's own. A GGUF file holds the tokenizer and its chat template. A
      directory that is made from a GGUF file gets both as files.
    - `calibration` is a text file, for the schemes in `CALIBRATED`. Calibration calls `calibrating` with a stage and
      the share of the stage that is done.
    - `progress` is called after each tensor.

    Returns notes for the user, one line each. Raises ValueError for a request that `check_request` refuses,
    CheckpointError for files that cannot be used, or for a model that the format cannot hold.
    """
    check_request(to, quantize=quantize, dtype=dtype, tokenizer=tokenizer, calibration=calibration)
    if to == "gguf":
        return _to_gguf(checkpoint, destination, to=quantize or dtype, tokenizer=tokenizer, progress=progress)
    if to == "llama2c":
        write_llama2c(checkpoint, destination, int8=bool(quantize), progress=progress)
    else:
        if calibration and quantize:
            written = _calibrated(checkpoint, calibration, quantize, tokenizer=tokenizer, progress=calibrating)
        else:
            written = quantized(checkpoint, quantize) if quantize else checkpoint
        files, notes = files_inside(checkpoint)
        int8 = quantize == "smoothquant"
        notes += write_huggingface(written, destination, files=files, int8_activations=int8, progress=progress)
        if not Path(checkpoint.path).is_dir() and tokenizer_in(Path(destination)) is None:
            notes.append(_tokenizer_left_behind(checkpoint, destination))
        return notes
    return [_tokenizer_left_behind(checkpoint, destination)]


def _tokenizer_left_behind(checkpoint: Checkpoint, destination: str | Path) -> str:
    """Say that a model was written without its tokenizer, and where the tokenizer is."""
    path = Path(checkpoint.path)
    folder = path if path.is_dir() else path.parent
    tokenizer_path = path if tokenizer_inside(checkpoint) else tokenizer_in(folder) or "PATH"
    return f"the tokenizer is not taken along: run {destination} with --tokenizer {tokenizer_path}"


def files_inside(checkpoint: Checkpoint) -> tuple[dict[str, bytes], list[str]]:
    """Return the tokenizer and chat template inside a GGUF file, as files to write, and notes for the user."""
    inside = tokenizer_inside(checkpoint)
    if inside is None:
        return {}, []
    from llamaspec.model.tokenizers.huggingface_writer import tokenizer_files

    templates, notes = _templates(inside, [checkpoint.path])
    named = {key: name for key, name in _named(checkpoint, None).items() if name is not None}
    if "eos_token" not in named and checkpoint.stops:
        named["eos_token"] = inside.piece(min(checkpoint.stops))
    return tokenizer_files(inside, named=named, templates=templates), notes


def _templates(tokenizer: Tokenizer, places: Sequence[str | Path]) -> tuple[dict[str, str], list[str]]:
    """Return the chat templates to write, by name, and notes for the user."""
    template = template_of(tokenizer, *places)
    if template is None:
        return {}, []
    if outside := leads_out(Path(template.name)):
        what = f"it is a link to {outside}, outside the model's folder"
        return {}, [f"the chat template in {template.name} is not taken along: {what}"]
    return {**template.named, "default": template.source}, []


def _named(checkpoint: Checkpoint, tokenizer: str | Path | None) -> Mapping[str, str | None]:
    """Return the strings of bos_token and eos_token that the tokenizer's file or folder states."""
    if tokenizer is None and tokenizer_inside(checkpoint):
        from llamaspec.model.tokenizers.gguf import named_tokens

        return named_tokens(MappedFile(checkpoint.path))
    path = Path(tokenizer if tokenizer is not None else checkpoint.path)
    return stated_tokens(path if path.is_dir() else path.parent)


def _calibrated(
    checkpoint: Checkpoint,
    calibration: str | Path,
    method: str,
    *,
    tokenizer: str | Path | None,
    progress: Callable[[str, float], object],
) -> Checkpoint:
    from llamaspec.model.quantize.calibration import (
        calibrated,
        read_windows,
    )  # imported here, since it imports JAX, which other conversions do not need

    windows = read_windows(calibration, tokenizer_of(checkpoint, tokenizer), context=checkpoint.config.context)
    return calibrated(checkpoint, windows, method=method, progress=progress)


def _to_gguf(
    checkpoint: Checkpoint,
    destination: str | Path,
    *,
    to: str | None,
    tokenizer: str | Path | None,
    progress: TensorWritten | None,
) -> list[str]:
    notes = []
    vocabulary_or_none = tokenizer_if_any(checkpoint, tokenizer)
    if vocabulary_or_none is None:
        notes.append(f"no tokenizer beside {checkpoint.path}: the file has none inside")
    else:
        notes += unkept(vocabulary_or_none)
    places = [place for place in (tokenizer, checkpoint.path) if place is not None]
    templates, left_out = _templates(vocabulary_or_none, places) if vocabulary_or_none else ({}, [])
    notes += left_out
    vocabulary = vocabulary_keys(checkpoint, vocabulary_or_none, templates, named=_named(checkpoint, tokenizer))
    complete = write_gguf(checkpoint, destination, to=to, vocabulary=vocabulary, progress=progress)
    if complete:
        notes.append(
            f"{len(complete)} matrices stay as they are, since {to} does not divide their rows: {complete[0]} …"
        )
    return notes
