"""Defaults for the choice of the next token, from the generation_config.json next to a model's weights.

The commands `generate`, `chat` and `serve` use them, as transformers and vLLM do; the library does not.

1. The file counts if it states at least one of `SAMPLING`, or do_sample. A key that is null counts as absent.
2. If a file counts, the options that it does not state are off: temperature 1, and neither top-k, top-p, min-p nor a
   penalty. vLLM does the same. transformers differs in one default, top_k 50.
3. do_sample false means greedy, as in transformers: the temperature is 0, even if the file states a temperature.
4. top_k -1 is off, as in vLLM.

Source: transformers 5.24, generation/configuration_utils.py; vLLM 0.33, `ModelConfig.get_diff_sampling_param`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from llamaspec.model.checkpoints.checkpoint import CheckpointError, refused
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.open import is_safetensors, place_of
from llamaspec.model.checkpoints.recognize import GGUF
from llamaspec.model.checkpoints.strict_json import read_object, short
from llamaspec.model.options import SAMPLING, SamplingOptions

NAME = "generation_config.json"
OFF = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


def stated_sampling(model: str | Path) -> SamplingOptions | None:
    """Read the options in a model's generation_config.json; None if there is no file, or if it states no option.

    For a GGUF file or a file of llama2.c, we do not read a generation_config.json in the same folder, and return None.
    Raises `CheckpointError` for a file that cannot be read, and for a value out of range.
    """
    folder = _folder(place_of(model))
    if folder is None or not (folder / NAME).is_file():
        return None
    path = folder / NAME
    values = {key: value for key, value in read_object(path).items() if value is not None}
    samples = values.get("do_sample")
    if samples is not None and not isinstance(samples, bool):
        raise _refused(path, "do_sample", samples, "true or false")
    stated = {name: values[name] for name in SAMPLING if name in values}
    if samples is None and not stated:
        return None
    if stated.get("top_k") == -1:
        stated["top_k"] = 0
    chosen = replace(OFF, **{name: _checked(path, name, value) for name, value in stated.items()})
    return replace(chosen, temperature=0.0) if samples is False else chosen


def _folder(place: Path) -> Path | None:
    """Find the folder with the files of a model at `place`; None if the model is one file that holds everything."""
    if place.is_dir():
        return place
    try:
        file = MappedFile(place)
    except CheckpointError:  # Opening the model names the fault.
        return None
    return place.parent if file.bytes(0, len(GGUF)) != GGUF and is_safetensors(file) else None


def _checked(path: Path, name: str, value: Any) -> float | int:
    option = SAMPLING[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    is_integer = number and float(value).is_integer()
    if not number or not option.range.holds(value) or (option.kind is int and not is_integer):
        raise _refused(path, name, value, option.range.words)
    return option.kind(value)


def _refused(path: Path, name: str, value: object, expected: str) -> CheckpointError:
    return refused(path, f"{name} is {short(value)}, expected {expected}; --no-generation-config ignores the file")
