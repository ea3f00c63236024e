"""Converts a checkpoint to another format, with its tokenizer and chat template if the format can hold them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llamaspec.model.chat.template import template_of
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.gguf.imatrix import ImportanceMatrix, read_imatrix
from llamaspec.model.checkpoints.gguf.mixtures import MIXTURES
from llamaspec.model.checkpoints.gguf.write import (
    FLOATS,
    QUANTIZED_TYPES,
    architecture_for,
    of_tensors,
    write_gguf,
)
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.llama2c.write import write_llama2c
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.pooling import NUMBERS, pooling_files, stated_pooling
from llamaspec.model.checkpoints.recognize import leads_out
from llamaspec.model.tokenizers.gguf_writer import unkept, vocabulary_keys
from llamaspec.model.tokenizers.load import tokenizer_in
from llamaspec.model.tokenizers.of_model import tokenizer_if_any, tokenizer_inside, tokenizer_of
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.model.tokenizers.tokenizer_config import stated_tokens
from llamaspec.reference.quantizers.schemes import SCHEMES

TensorWritten = Callable[[str, int], None]  # called after a tensor was written, with its name and number of bytes

CALIBRATED = ("awq", "gptq", "smoothquant")
SCHEMES_OF = {
    "safetensors": (*SCHEMES, *CALIBRATED),
    "llama2c": ("q8_0",),
    "gguf": (*QUANTIZED_TYPES, *MIXTURES),
    "onnx": ("q8", "q8_row", "q4"),
}


def check_request(
    to: str,
    *,
    quantize: str | None,
    dtype: str | None,
    tokenizer: str | Path | None,
    calibration: str | Path | None,
    imatrix: str | Path | None = None,
) -> None:
    """Raise ValueError if the format `to` does not support an option, or if options exclude each other.

    >>> check_request("llama2c", quantize="q4", dtype=None, tokenizer=None, calibration=None)
    Traceback (most recent call last):
    ValueError: --quantize q4 is not supported for llama2c (only q8_0)
    """
    if quantize and quantize not in SCHEMES_OF[to]:
        raise ValueError(f"--quantize {quantize} is not supported for {to} (only {', '.join(SCHEMES_OF[to])})")
    if quantize in CALIBRATED and not calibration:
        raise ValueError(
            f"--quantize {quantize} needs --calibration FILE, with a text that is typical of the model's use"
        )
    if calibration and quantize not in (*CALIBRATED, *MIXTURES):
        raise ValueError(f"--calibration works only with --quantize {', '.join((*CALIBRATED, *MIXTURES))}")
    if imatrix and quantize not in MIXTURES:
        raise ValueError(f"--imatrix works only with --quantize {', '.join(MIXTURES)}")
    if imatrix and calibration:
        raise ValueError("--imatrix and --calibration exclude each other: give only one of them")
    if to != "gguf" and dtype:
        raise ValueError("--dtype works only with --to gguf")
    if to != "gguf" and tokenizer and not calibration:
        copied = "; for safetensors, the tokenizer next to the model is copied" if to == "safetensors" else ""
        raise ValueError(f"--tokenizer works only with --to gguf or with --calibration{copied}")
    if dtype and quantize:
        raise ValueError(f"--dtype {dtype} and --quantize {quantize} exclude each other: give only one of them")
    if dtype and dtype not in FLOATS:
        raise ValueError(f"--dtype {dtype} is not supported for gguf (only {', '.join(FLOATS)})")


def convert(
    checkpoint: Checkpoint,
    destination: str | Path,
    *,
    to: str,
    quantize: str | None = None,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    calibration: str | Path | None = None,
    imatrix: str | Path | None = None,
    progress: TensorWritten | None = None,
    calibrating: Callable[[str, float], object] = lambda stage, share: None,
) -> list[str]:
    """Write `checkpoint` to the new path `destination` in the format `to`, which is a key of `SCHEMES_OF`.

    - `quantize` is the quantization scheme for matrices, and `dtype` is their dtype in a GGUF file. By default, every
      weight keeps its dtype.
    - `tokenizer` is the path of a tokenizer, by default the model's own. A GGUF file contains the tokenizer and the
      chat template. If we convert a GGUF file to a directory, we write both as files.
    - `calibration` is the path of a text file, for the schemes in `CALIBRATED` and for mixtures. During calibration, we
      call `calibrating` with the name of the current stage and the share of this stage that is done.
    - `imatrix` is the path of an importance matrix of llama.cpp, for mixtures.
    - After each tensor, we call `progress` with its name and its number of bytes.

    Writing ONNX needs the package onnx; without it, we raise ModuleNotFoundError.

    Returns notes for the user, one line each. Raises ValueError if `check_request` refuses the options. Raises
    CheckpointError if a file cannot be used, or if the format cannot hold the model.
    """
    paths = {"tokenizer": tokenizer, "calibration": calibration, "imatrix": imatrix}
    check_request(to, quantize=quantize, dtype=dtype, **paths)
    if to == "gguf":
        importances = read_imatrix(str(imatrix)) if imatrix else None
        if calibration:
            importances = _importances(checkpoint, calibration, tokenizer=tokenizer, progress=calibrating)
        chosen = quantize or dtype
        return _to_gguf(checkpoint, destination, chosen, importances, tokenizer=tokenizer, progress=progress)
    if to == "onnx":
        from llamaspec.model.checkpoints.onnx.write import write_onnx  # here, since the package onnx is optional

        written = quantized(checkpoint, quantize) if quantize else checkpoint
        notes = write_onnx(written, destination, progress=progress)
        return [*notes, "the tokenizer is not copied"]
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
    """Return a note that tells the user that the tokenizer was not copied, and where it is."""
    path = Path(checkpoint.path)
    folder = path if path.is_dir() else path.parent
    tokenizer_path = path if tokenizer_inside(checkpoint) else tokenizer_in(folder) or "PATH"
    return f"the tokenizer is not copied: to run {destination}, give --tokenizer {tokenizer_path}"


def files_inside(checkpoint: Checkpoint) -> tuple[dict[str, bytes], list[str]]:
    """Return the files to write for a GGUF file's tokenizer, chat template and pooling, and notes for the user."""
    inside = tokenizer_inside(checkpoint)
    if inside is None:
        return {}, []
    from llamaspec.model.tokenizers.huggingface_writer import tokenizer_files

    templates, notes = _templates(inside, [checkpoint.path])
    named = {key: name for key, name in _named(checkpoint, None).items() if name is not None}
    if "eos_token" not in named and checkpoint.stops:
        named["eos_token"] = inside.piece(min(checkpoint.stops))
    files = tokenizer_files(inside, named=named, templates=templates)
    if (pooling := stated_pooling(Path(checkpoint.path))) in NUMBERS:
        files |= pooling_files(pooling, dim=checkpoint.config.dim)
    elif pooling:
        notes.append(_pooling_left_out(checkpoint, pooling))
    return files, notes


def _pooling_left_out(checkpoint: Checkpoint, pooling: str) -> str:
    return f"{checkpoint.path}: its pooling for embeddings, {pooling}, is left out, since the new format lacks it"


def _templates(tokenizer: Tokenizer, places: Sequence[str | Path]) -> tuple[dict[str, str], list[str]]:
    """Find the chat templates of a tokenizer; return their sources by name, and notes for the user."""
    template = template_of(tokenizer, *places)
    if template is None:
        return {}, []
    if outside := leads_out(Path(template.name)):
        what = f"it is a link to {outside}, outside the model's folder"
        return {}, [f"the chat template in {template.name} is not copied: {what}"]
    return {**template.named, "default": template.source}, []


def _named(checkpoint: Checkpoint, tokenizer: str | Path | None) -> Mapping[str, str | None]:
    """Return the strings of bos_token and eos_token, as the tokenizer's file or folder states them."""
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
    )  # We import this module here, since it imports JAX, which other conversions do not need.

    windows = read_windows(calibration, tokenizer_of(checkpoint, tokenizer), context=checkpoint.config.context)
    return calibrated(checkpoint, windows, method=method, progress=progress)


def _importances(
    checkpoint: Checkpoint,
    calibration: str | Path,
    *,
    tokenizer: str | Path | None,
    progress: Callable[[str, float], object],
) -> ImportanceMatrix:
    from llamaspec.model.quantize.calibration import importances, read_windows  # here, for the same reason

    windows = read_windows(calibration, tokenizer_of(checkpoint, tokenizer), context=checkpoint.config.context)
    values = importances(checkpoint, windows, progress=progress)
    return ImportanceMatrix(str(calibration), of_tensors(checkpoint, values))


def _to_gguf(
    checkpoint: Checkpoint,
    destination: str | Path,
    to: str | None,
    importances: ImportanceMatrix | None,
    *,
    tokenizer: str | Path | None,
    progress: TensorWritten | None,
) -> list[str]:
    notes = []
    vocabulary_or_none = tokenizer_if_any(checkpoint, tokenizer)
    if vocabulary_or_none is None:
        notes.append(f"no tokenizer was found next to {checkpoint.path}, so the GGUF file does not contain a tokenizer")
    places = [place for place in (tokenizer, checkpoint.path) if place is not None]
    templates, left_out = _templates(vocabulary_or_none, places) if vocabulary_or_none else ({}, [])
    notes += left_out
    vocabulary = vocabulary_keys(checkpoint, vocabulary_or_none, templates, named=_named(checkpoint, tokenizer))
    if vocabulary_or_none:
        notes += unkept(vocabulary_or_none, vocabulary)
    if (pooling := stated_pooling(Path(checkpoint.path))) in NUMBERS:
        vocabulary[f"{architecture_for(checkpoint).name}.pooling_type"] = NUMBERS[pooling]
    elif pooling:
        notes.append(_pooling_left_out(checkpoint, pooling))
    written = write_gguf(
        checkpoint, destination, to=to, vocabulary=vocabulary, importances=importances, progress=progress
    )
    if types := written.other_types:
        names = ", ".join(sorted(set(types.values())))
        what = f"{len(types)} matrices are stored in {names}, since their rows do not fill the blocks of {to}"
        notes.append(f"{what}: {next(iter(types))} …")
    if importances and written.unweighted:
        what = f"{importances.path} has no importances for {len(written.unweighted)} of the quantized matrices"
        notes.append(f"{what}: {written.unweighted[0]} …")
    return notes
