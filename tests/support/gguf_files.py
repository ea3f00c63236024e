"""Tiny GGUF files, written as llama.cpp's converter writes them, without code of our reader or writer."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
CODES = {
    "F32": 0, "F16": 1, "BF16": 30, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11,
    "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39,
    "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29,
}  # fmt: skip
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16}

NAMES = {
    "embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down", "gate": "ffn_gate_inp",
}  # fmt: skip
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
EXPERTS |= {"gate_proj": "ffn_gate_exps", "down_proj": "ffn_down_exps", "up_proj": "ffn_up_exps"}


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pack(kind: int, value: Any) -> bytes:
    """Encode a GGUF value of type `kind`. For an array, `value` is (element type, elements)."""
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(pack(inner, v) for v in values)
    return struct.pack("<" + FORMATS[kind], value)


@dataclass
class Tensor:
    """A tensor entry of a GGUF file: its shape in NumPy's order, and its data."""

    shape: tuple[int, ...]
    data: bytes
    code: int = 0
    offset: int | None = None  # None: directly after the previous tensor


@dataclass
class File:
    """The parts of a GGUF file, which a test can change one by one."""

    keys: dict[str | bytes, tuple[int, Any]]
    tensors: dict[str | bytes, Tensor]
    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    counts: tuple[int, int] | None = None  # counts of tensors and of keys to write, if not the true ones
    tail: bytes = field(default=b"", repr=False)

    def head(self) -> bytes:
        """Encode the bytes before the tensors' data, without padding."""
        counts = self.counts or (len(self.tensors), len(self.keys))
        parts = [self.magic, struct.pack("<IQQ", self.version, *counts)]
        parts += [text(key) + struct.pack("<I", kind) + pack(kind, value) for key, (kind, value) in self.keys.items()]
        at = 0
        for name, tensor in self.tensors.items():
            sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
            offset = at if tensor.offset is None else tensor.offset
            parts.append(text(name) + sizes + struct.pack("<IQ", tensor.code, offset))
            at += len(self.padded(tensor.data))
        return b"".join(parts)

    def padded(self, raw: bytes) -> bytes:
        return raw + bytes(-len(raw) % self.alignment)

    def bytes(self) -> bytes:
        return self.padded(self.head()) + b"".join(self.padded(t.data) for t in self.tensors.values()) + self.tail

    def write(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path


def interleaved(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder the rows of each head for interleaved RoPE: rows i and i + head_dim / 2 become rows 2i and 2i + 1."""
    moved = np.empty_like(rows)
    for row in range(len(rows)):
        head, feature = divmod(row, head_dim)
        half, pair = divmod(feature, head_dim // 2)
        moved[head * head_dim + 2 * pair + half] = rows[row]
    return moved


def keys_of(config: dict) -> dict[str | bytes, tuple[int, Any]]:
    """Build the GGUF metadata for a config.json of `tests.support.families`."""
    names = {"mixtral": "llama", "mistral": "llama", "qwen3_moe": "qwen3moe"}
    name = names.get(config["model_type"], config["model_type"])
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    keys: dict[str | bytes, tuple[int, Any]] = {
        "general.architecture": (STRING, name),
        "general.name": (STRING, "test"),
        f"{name}.block_count": (U32, config["num_hidden_layers"]),
        f"{name}.context_length": (U32, config.get("max_position_embeddings", 2048)),
        f"{name}.embedding_length": (U32, config["hidden_size"]),
        f"{name}.feed_forward_length": (U32, config["intermediate_size"]),
        f"{name}.attention.head_count": (U32, heads),
        f"{name}.attention.head_count_kv": (U32, config.get("num_key_value_heads") or heads),
        f"{name}.attention.key_length": (U32, head_dim),
        f"{name}.attention.value_length": (U32, head_dim),
        f"{name}.attention.layer_norm_rms_epsilon": (F32, config["rms_norm_eps"]),
        f"{name}.rope.dimension_count": (U32, head_dim),
        f"{name}.rope.freq_base": (F32, rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        f"{name}.vocab_size": (U32, config["vocab_size"]),
    }
    if width := config.get("moe_intermediate_size"):
        keys[f"{name}.expert_feed_forward_length"] = (U32, width)
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        keys[f"{name}.expert_count"] = (U32, experts)
        keys[f"{name}.expert_used_count"] = (U32, config["num_experts_per_tok"])
    if (rope.get("rope_type") or rope.get("type")) == "linear":
        keys[f"{name}.rope.scaling.type"] = (STRING, "linear")
        keys[f"{name}.rope.scaling.factor"] = (F32, rope["factor"])
    return keys


def tensors_of(config: dict, tensors: dict[str, np.ndarray], *, type: str = "F32") -> dict[str | bytes, Tensor]:
    """Rename and reorder tensors of `tests.support.families` as llama.cpp does; vectors are always float32."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    arrays: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        *_, part, kind = name.split(".")
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        if ".experts." in name:
            stacked = f"{layer}{EXPERTS[part]}.{kind}"
            arrays[stacked] = np.concatenate([arrays[stacked], array[None]]) if stacked in arrays else array[None]
            continue
        if part in ("q_proj", "k_proj") and not config["model_type"].startswith("qwen"):
            array = interleaved(array, head_dim)
        arrays[f"{layer}{NAMES[part]}.{kind}"] = array
    stored_tensors = {}
    for name, array in arrays.items():
        stored = type if array.ndim > 1 else "F32"
        stored_tensors[name] = Tensor(array.shape, array.astype(DTYPES[stored]).tobytes(), CODES[stored])
    return stored_tensors


def rope_factors(config: dict) -> np.ndarray | None:
    """Compute llama.cpp's frequency factors for Llama 3's RoPE rescaling, in float32 as its converter does."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") != "llama3":
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = np.float32(rope.get("rope_theta", config.get("rope_theta")))
    factor, low, high = (np.float32(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = rope["original_max_position_embeddings"]
    factors = []
    for exponent in np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim):
        wavelength = np.float32(2 * np.pi) * theta**exponent
        if wavelength < original / high:
            factors.append(np.float32(1))
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (np.float32(original) / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def file_of(config: dict, tensors: dict[str, np.ndarray], *, type: str = "F32") -> File:
    stored = tensors_of(config, tensors, type=type)
    if (factors := rope_factors(config)) is not None:
        stored = {"rope_freqs.weight": Tensor(factors.shape, factors.tobytes()), **stored}
    return File(keys_of(config), stored)


def sentencepiece_keys(proto: Any) -> dict[str | bytes, tuple[int, Any]]:
    """Build the GGUF metadata that llama.cpp's converter writes for a SentencePiece model."""
    pieces, trainer = proto.pieces, proto.trainer_spec
    names = [piece.piece for piece in pieces]
    return {
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.pre": (STRING, "default"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, names)),
        "tokenizer.ggml.scores": (ARRAY, (F32, [piece.score for piece in pieces])),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [piece.type for piece in pieces])),
        "tokenizer.ggml.bos_token_id": (U32, names.index(trainer.bos_piece)),
        "tokenizer.ggml.eos_token_id": (U32, names.index(trainer.eos_piece)),
        "tokenizer.ggml.unknown_token_id": (U32, names.index(trainer.unk_piece)),
    }


def byte_level_keys(spec: dict[str, Any], *, pre: str) -> dict[str | bytes, tuple[int, Any]]:
    """Build the GGUF metadata that llama.cpp's converter writes for a byte-level BPE tokenizer.json."""
    ids = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    types = {token["id"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    return {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, pre),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [types.get(id, 1) for id in range(len(tokens))])),
        "tokenizer.ggml.merges": (ARRAY, (STRING, merges)),
    }
