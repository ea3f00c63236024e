"""A Llama in JAX: `from model import load`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.llama import Llama, load
    from model.options import SamplingOptions

__all__ = ["Llama", "SamplingOptions", "load"]


def __getattr__(name: str):
    # On first use, so that reading a file's header or a tokenizer does not wait for JAX to import.
    from importlib import import_module

    homes = {"Llama": "model.llama", "load": "model.llama", "SamplingOptions": "model.options"}
    if name not in homes:
        raise AttributeError(f"module 'model' has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)
