"""What a checkpoint holds and what a token of it costs, from its header alone."""

from dataclasses import asdict
from math import prod
from typing import Any

from model.checkpoints.checkpoint import Checkpoint, Tensor
from reference.config import Config

EMBEDDING = "model.embed_tokens.weight"


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything that `llamaspec inspect` shows; every value goes into JSON as it is.

    Decoding a token reads every weight once, but one row of the embedding and, of the experts, the
    chosen ones; each weight of a matrix is two FLOPs. Attention comes on top as the cache fills:
    `cache_bytes_per_token` is what each earlier position adds to what is read, in the weights' dtype.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    read = {name: tensor.bytes * _share_read(name, config) for name, tensor in tensors.items()}
    multiplied = {
        name: prod(tensor.shape) * _share_read(name, config)
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and (name != EMBEDDING or config.tied)
    }
    return {
        "format": checkpoint.format,
        "config": asdict(config),
        "tensors": [
            {"name": name, "shape": list(tensor.shape), "dtype": _dtype(tensor), "bytes": tensor.bytes}
            for name, tensor in tensors.items()
        ],
        "parameters": sum(prod(tensor.shape) for tensor in tensors.values()),
        "bytes": sum(tensor.bytes for tensor in tensors.values()),
        "flops_per_token": round(2 * sum(multiplied.values())),
        "bytes_per_token": round(sum(read.values())),
        "cache_bytes_per_token": (
            2 * config.layers * config.kv_heads * config.head_dim * tensors[EMBEDDING].dtype.itemsize
        ),
    }


def _dtype(tensor: Tensor) -> str:
    return tensor.codes.form if tensor.codes else tensor.dtype.name


def _share_read(name: str, config: Config) -> float:
    if name == EMBEDDING and not config.tied:
        return 1 / config.vocab
    return config.experts_per_token / config.experts if ".experts." in name else 1.0
