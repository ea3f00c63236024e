"""Writes Hugging Face's directory: config.json, generation_config.json and model.safetensors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from model.checkpoints.checkpoint import Checkpoint
from model.checkpoints.checks import check_finite
from model.checkpoints.hf_config_writer import format_config, format_tokens
from model.checkpoints.safetensors_header import format_header
from model.checkpoints.staging import new_directory

# What belongs to a model beside its weights: how it reads and writes text.
COMPANIONS = (
    "tokenizer.json", "tokenizer.model", "tokenizer.bin", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


def write_huggingface(
    checkpoint: Checkpoint, directory: str | Path, *, progress: Callable[[str, int], None] | None = None
) -> None:
    """Write `checkpoint` to a new directory, tensor by tensor, each in its own dtype, bit for bit.

    Tokenizer files and chat template that lie in or beside the source, under their usual names, come along.
    `progress` is told each tensor's name and bytes. Raises `CheckpointError`, and leaves nothing behind, where the
    directory exists, the disk is full, a weight is not finite, or no family that transformers knows is this model.
    """
    # Wider elements first, so that every tensor is aligned; in the order of use otherwise.
    order = sorted(checkpoint.tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    config = format_config(checkpoint, dtype=checkpoint.tensors["model.embed_tokens.weight"].dtype.name)
    tokens = {key: value for key, value in format_tokens(checkpoint).items() if value is not None}
    with new_directory(directory) as staged:
        (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (staged / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")
        for companion in _companions(Path(checkpoint.path)):
            shutil.copyfile(companion, staged / companion.name)
        with open(staged / "model.safetensors", "wb") as file:
            file.write(format_header({name: (tensor.dtype, tensor.shape) for name, tensor in order}))
            for name, tensor in order:
                array = tensor.read()
                check_finite(name, array, path=checkpoint.path)
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                checkpoint.release()
                if progress:
                    progress(name, tensor.bytes)


def _companions(source: Path) -> list[Path]:
    folder = source if source.is_dir() else source.parent
    return [folder / name for name in COMPANIONS if (folder / name).is_file()]
