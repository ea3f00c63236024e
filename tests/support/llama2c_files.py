"""Tiny files in llama2.c's formats, written as its export.py writes them, without code of our reader or writer.

Version 3 here is KuiperLLama's int8 format: its export.py calls it version 3, the file has no magic number, and the
embedding is not quantized.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PER_LAYER = ("attention_norm", "ffn_norm", "wq", "wk", "wv", "wo", "w1", "w2", "w3")
ORDERS = {
    0: "embedding attention_norm wq wk wv wo ffn_norm w1 w2 w3 norm rope classifier".split(),
    1: "attention_norm ffn_norm norm embedding wq wk wv wo w1 w2 w3 classifier".split(),
    2: "attention_norm ffn_norm norm embedding wq wk wv wo w1 w2 w3 classifier".split(),
    3: "wq wk wv wo w1 w2 w3 classifier embedding attention_norm ffn_norm norm".split(),
}
HF_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    "wq": "model.layers.{}.self_attn.q_proj.weight",
    "wk": "model.layers.{}.self_attn.k_proj.weight",
    "wv": "model.layers.{}.self_attn.v_proj.weight",
    "wo": "model.layers.{}.self_attn.o_proj.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "w1": "model.layers.{}.mlp.gate_proj.weight",
    "w2": "model.layers.{}.mlp.down_proj.weight",
    "w3": "model.layers.{}.mlp.up_proj.weight",
    "norm": "model.norm.weight",
    "classifier": "lm_head.weight",
}


@dataclass(frozen=True)
class Sizes:
    """The sizes in a llama2.c header: all dimensions differ, with four query heads and two key heads."""

    dim: int = 16
    ffn: int = 24
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 20
    context: int = 10


def random_weights(sizes: Sizes, *, tied: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw weights in Meta's layout: RoPE pairs interleaved, and layers stacked as [layers, ...]."""
    random = np.random.default_rng(seed)
    kv = sizes.dim // sizes.heads * sizes.kv_heads
    shapes = {
        "embedding": (sizes.vocab, sizes.dim),
        "attention_norm": (sizes.layers, sizes.dim),
        "wq": (sizes.layers, sizes.dim, sizes.dim),
        "wk": (sizes.layers, kv, sizes.dim),
        "wv": (sizes.layers, kv, sizes.dim),
        "wo": (sizes.layers, sizes.dim, sizes.dim),
        "ffn_norm": (sizes.layers, sizes.dim),
        "w1": (sizes.layers, sizes.ffn, sizes.dim),
        "w2": (sizes.layers, sizes.dim, sizes.ffn),
        "w3": (sizes.layers, sizes.ffn, sizes.dim),
        "norm": (sizes.dim,),
    }
    if not tied:
        shapes["classifier"] = (sizes.vocab, sizes.dim)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def header(sizes: Sizes, *, version: int, tied: bool, group: int = 0) -> bytes:
    vocab = sizes.vocab if tied or version in (1, 2) else -sizes.vocab
    numbers = sizes.dim, sizes.ffn, sizes.layers, sizes.heads, sizes.kv_heads, vocab, sizes.context
    packed = struct.pack("<7i", *numbers)
    if version in (0, 3):
        return packed + struct.pack("<i", group) * (version == 3)
    packed = struct.pack("<Ii", 0x616B3432, version) + packed + struct.pack("<B", tied)
    if version == 2:
        packed += struct.pack("<i", group)
    return packed.ljust(256, b"\0")


def is_quantized(name: str, version: int) -> bool:
    return version >= 2 and not name.endswith("norm") and (version, name) != (3, "embedding")


def quantize(values: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    groups = values.reshape(-1, group)
    scales = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(groups / scales).astype(np.int8), scales


def file_bytes(
    version: int = 0, sizes: Sizes | None = None, *, tied: bool = True, seed: int = 0, group: int = 8
) -> bytes:
    """Return the bytes of a whole llama2.c file of format `version`."""
    sizes = sizes or Sizes()
    weights = random_weights(sizes, tied=tied, seed=seed)
    parts = [header(sizes, version=version, tied=tied, group=group)]
    for name in ORDERS[version]:
        if name == "rope":  # readers skip these values and compute RoPE themselves
            parts.append(np.full(sizes.context * sizes.dim // sizes.heads, 99, np.float32).tobytes())
        elif name in weights and not is_quantized(name, version):
            parts.append(weights[name].tobytes())
        elif name in weights:
            for tensor in weights[name] if name in PER_LAYER else [weights[name]]:
                codes, scales = quantize(tensor, group)
                parts += [codes.tobytes(), scales.tobytes()]
    return b"".join(parts)


def write(path: Path, version: int = 0, **kwargs) -> Path:
    path.write_bytes(file_bytes(version, **kwargs))
    return path


def expected_tensors(version: int, sizes: Sizes, *, tied: bool, seed: int = 0, group: int = 8) -> dict[str, np.ndarray]:
    """Return the tensors that a reader must find in `file_bytes` of the same arguments, by Hugging Face's names."""
    expected = {}
    for name, stacked in random_weights(sizes, tied=tied, seed=seed).items():
        for layer in range(sizes.layers if name in PER_LAYER else 1):
            tensor = stacked[layer] if name in PER_LAYER else stacked
            if is_quantized(name, version):
                codes, scales = quantize(tensor, group)
                tensor = (codes.astype(np.float32) * scales).reshape(tensor.shape)
            if name in ("wq", "wk"):
                tensor = _in_halves(tensor, sizes.dim // sizes.heads)
            expected[HF_NAMES[name].format(layer)] = tensor
    return expected


def _in_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder the rows of each head for RoPE in halves: rows 2i and 2i + 1 become rows i and i + head_dim / 2."""
    moved = np.empty_like(rows)
    for row in range(len(rows)):
        head, feature = divmod(row, head_dim)
        moved[head * head_dim + feature // 2 + (feature % 2) * head_dim // 2] = rows[row]
    return moved
