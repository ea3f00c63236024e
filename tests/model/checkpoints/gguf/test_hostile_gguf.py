"""Invalid GGUF files, each one change away from a valid file, are refused in one line, quickly, with little memory.

The kinds of changes come from bug reports about other readers: huge lengths and counts, overflowing arithmetic, offsets
outside of the file, unknown types, keys of a wrong type, and tensors that the model does not have.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support import families, gguf_files
from tests.support.gguf_files import ARRAY, BOOL, F32, F64, I32, STRING, U8, U32, U64, File, Tensor
from tests.support.refusals import load, mentions, refusal

CONFIG = families.FAMILIES["llama-2"]
UP, NORM = "blk.1.ffn_up.weight", "output_norm.weight"


def good(family: str = "llama-2") -> File:
    config = families.FAMILIES[family]
    return gguf_files.file_of(config, families.random_tensors(config))


def keyed(key: str, kind: int, value: object) -> Callable[[File], None]:
    """Return a function that sets a key of a GGUF file."""
    return lambda file: file.keys.__setitem__(key, (kind, value))


def without(key: str) -> Callable[[File], object]:
    return lambda file: file.keys.pop(key)


def tensor(name: str, **changes: object) -> Callable[[File], None]:
    def change(file: File):
        for key, value in changes.items():
            setattr(file.tensors[name], key, value)

    return change


def renamed(name: str, new_name: str | bytes) -> Callable[[File], None]:
    def change(file: File):
        file.tensors = {new_name if key == name else key: value for key, value in file.tensors.items()}

    return change


def filled(name: str, value: float) -> Callable[[File], None]:
    def change(file: File):
        weights = np.frombuffer(file.tensors[name].data, "<f4").copy()
        weights[-1] = value
        file.tensors[name].data = weights.tobytes()

    return change


def scaled(name: str, code: int, size: int, scale: bytes, at: int) -> Callable[[File], None]:
    """Return a function that fills the tensor `name` with blocks of zeros, and sets the last block's scale to `scale`.

    `scale` is a number that is not finite, at byte `at` of a block of `size` bytes. `code` is the number of the type.
    """

    def change(file: File):
        shape = file.tensors[name].shape
        blocks = int(np.prod(shape)) // 32
        raw = bytearray(size * blocks)
        raw[-size + at : -size + at + len(scale)] = scale
        raw[-1] = 0x77
        file.tensors[name] = Tensor(shape, bytes(raw), code)

    return change


L = "llama."
CASES: dict[str, tuple[Callable[[File], object], str]] = {
    # magic and version
    "version 0": (lambda f: setattr(f, "version", 0), "GGUF version 0 not supported"),
    "version 1": (lambda f: setattr(f, "version", 1), "GGUF version 1 not supported"),
    "version 4": (lambda f: setattr(f, "version", 4), "GGUF version 4 not supported"),
    "big-endian": (lambda f: setattr(f, "version", 3 << 24), "big-endian GGUF not supported"),
    "an unknown architecture": (keyed("general.architecture", STRING, "mamba"), "architecture 'mamba' not supported"),
    "an architecture of 10 MB": (keyed("general.architecture", STRING, "x" * 10**7), "architecture 'xxx not supported"),
    "an architecture that is a number": (keyed("general.architecture", U32, 1), "general.architecture 1 string"),
    "no architecture": (without("general.architecture"), "lacks key general.architecture"),
    "a part of a split": (keyed("split.count", U32, 3), "one of 3 parts"),
    # counts
    "2^63 tensors": (lambda f: setattr(f, "counts", (2**63, len(f.keys))), "9223372036854775808 tensors"),
    "2^64 - 1 keys": (lambda f: setattr(f, "counts", (len(f.tensors), 2**64 - 1)), "18446744073709551615 keys"),
    "one tensor more": (lambda f: setattr(f, "counts", (len(f.tensors) + 1, len(f.keys))), "tensor '' name 0 bytes"),
    "one tensor less": (
        lambda f: setattr(f, "counts", (len(f.tensors) - 1, len(f.keys))),
        "unexpected bytes after the last tensor",
    ),
    "one key more": (lambda f: setattr(f, "counts", (len(f.tensors), len(f.keys) + 1)), "truncated name of tensor 0"),
    "no tensors": (lambda f: f.tensors.clear(), "lacks tensor token_embd.weight"),
    "no keys": (lambda f: f.keys.clear(), "lacks key general.architecture"),
    # keys and their values
    "a key without a name": (keyed("", U32, 1), "name of key 0 characters"),
    "a long key": (keyed("k" * 70_000, U32, 1), "name of key 70000 characters"),
    "a long key that is all escapes": (
        keyed("\U000e0001" * 100, ARRAY, (99, [])),
        "key value of type 99 GGUF not define",
    ),
    "a key that is not UTF-8": (lambda f: f.keys.__setitem__(b"\xff\xfe", (U32, 1)), "name of key not UTF-8 byte 0"),
    "a text that is not UTF-8": (
        keyed("general.name", STRING, b"a\xff"),
        "value of key 'general.name' not UTF-8 byte 1",
    ),
    "a missing size": (without(L + "block_count"), "lacks key llama.block_count"),
    "a missing eps": (
        without(L + "attention.layer_norm_rms_epsilon"),
        "lacks key llama.attention.layer_norm_rms_epsilon",
    ),
    "a size that is a float": (keyed(L + "block_count", F32, 2.0), "llama.block_count 2.0 integer"),
    "a size that is a text": (keyed(L + "block_count", STRING, "2"), "llama.block_count '2' integer"),
    "a size that is a bool": (keyed(L + "block_count", BOOL, True), "llama.block_count true integer"),
    "a size for each layer": (
        keyed(L + "feed_forward_length", ARRAY, (U32, [96, 96])),
        "llama.feed_forward_length is a list expected integer",
    ),
    "eps that is NaN": (keyed(L + "attention.layer_norm_rms_epsilon", F32, np.nan), "eps nan"),
    "eps of 0": (keyed(L + "attention.layer_norm_rms_epsilon", F32, 0.0), "eps 0.0"),
    "theta beyond float32": (keyed(L + "rope.freq_base", F64, 1e300), "theta inf"),
    "2^32 - 1 layers": (keyed(L + "block_count", U32, 2**32 - 1), "layers 4294967295 outside"),
    "more layers than tensors": (keyed(L + "block_count", U32, 9_999), "too few 9999 layers"),
    "a layer too many": (keyed(L + "block_count", U32, 3), "lacks tensor blk.2"),
    "a layer too few": (keyed(L + "block_count", U32, 1), "tensor 'blk.1.attn_norm.weight' unexpected"),
    "no heads": (keyed(L + "attention.head_count", U32, 0), "heads 0 outside"),
    "heads without a width": (
        lambda f: (without(L + "attention.key_length")(f), keyed(L + "attention.head_count", U32, 0)(f)),
        "llama.embedding_length 32 multiple 0 heads",
    ),
    "heads that do not share": (keyed(L + "attention.head_count_kv", U32, 3), "number of heads 4 multiple 3 kv heads"),
    "values of another width": (keyed(L + "attention.value_length", U32, 4), "value_length 4 expected width 8"),
    "RoPE on a part of a head": (keyed(L + "rope.dimension_count", U32, 4), "dimension_count 4 expected width 8"),
    "a vocabulary of another size": (keyed(L + "vocab_size", U32, 49), "vocab_size 49 token_embd.weight 48 rows"),
    "context 0": (keyed(L + "context_length", U32, 0), "x.gguf: context 0 outside"),
    "an unknown scaling": (
        keyed(L + "rope.scaling.type", STRING, "ntk"),
        "llama.rope.scaling.type 'ntk' not supported",
    ),
    "YaRN by infinity": (
        lambda f: f.keys.update({L + "rope.scaling.type": (STRING, "yarn"), L + "rope.scaling.factor": (F32, np.inf)}),
        "YaRN inf",
    ),
    "a scaling by 0": (
        lambda f: f.keys.update({L + "rope.scaling.type": (STRING, "linear"), L + "rope.scaling.factor": (F32, 0.0)}),
        "RoPE factor 0.0",
    ),
    "a scaling of no type, which is linear": (keyed(L + "rope.scaling.factor", F32, 0.0), "RoPE factor 0.0"),
    "a soft cap": (keyed(L + "attn_logit_softcapping", F32, 50.0), "attn_logit_softcapping 50.0 not supported"),
    "a list as a switch": (
        keyed(L + "logit_scale", ARRAY, (F32, [1.0])),
        "llama.logit_scale is a list, which is not supported",
    ),
    "a window": (keyed(L + "attention.sliding_window", U32, 64), "sliding_window 64 not supported"),
    "experts without tensors": (keyed(L + "expert_count", U32, 8), "experts_per_token 0 outside 8"),
    "a tensor for each expert": (
        lambda f: (
            f.keys.update({L + "expert_count": (U32, 2), L + "expert_used_count": (U32, 1)}),
            renamed("blk.0.ffn_gate.weight", "blk.0.ffn_gate.0.weight")(f),
        ),
        "tensor expert (blk.0.ffn_gate.0.weight) files before April 2024 newer file",
    ),
    "2^32 - 1 experts": (keyed(L + "expert_count", U32, 2**32 - 1), "experts 4294967295 outside"),
    "a BOS outside": (keyed("tokenizer.ggml.bos_token_id", U32, 48), "bos_token_id 48 outside vocabulary 48"),
    "an EOS outside": (keyed("tokenizer.ggml.eos_token_id", I32, -1), "eos_token_id -1 outside vocabulary 48"),
    # alignment
    "alignment 0": (keyed("general.alignment", U32, 0), "alignment 0 not power"),
    "alignment 3": (keyed("general.alignment", U32, 3), "alignment 3 not power"),
    "alignment 2^63": (keyed("general.alignment", U64, 2**63), "alignment 9223372036854775808 not power"),
    "another alignment": (
        keyed("general.alignment", U32, 4096),
        "blk.0.attn_norm.weight overlaps offset 6144 expected 8192",
    ),
    "alignment that is a text": (keyed("general.alignment", STRING, "32"), "general.alignment '32' integer"),
    # tensors
    "a tensor without axes": (tensor(NORM, shape=()), "0 axes"),
    "five axes": (tensor(NORM, shape=(1, 1, 1, 1, 32)), "5 axes"),
    "2^32 - 1 axes": (tensor(NORM, shape=(1,) * 200), "200 axes"),
    "a side of 0": (tensor(NORM, shape=(0,)), "tensor 'output_norm.weight' shape expected 1 to 2^63 - 1 elements"),
    "a side of 2^64 - 1": (
        tensor(NORM, shape=(2**64 - 1,)),
        "tensor 'output_norm.weight' shape expected 1 to 2^63 - 1 elements",
    ),
    "sides that overflow together": (
        tensor(NORM, shape=(2**32, 2**32)),
        "tensor 'output_norm.weight' shape expected 1 to 2^63 - 1 elements",
    ),
    "bytes that overflow": (tensor(NORM, shape=(2**62,)), "output.weight overlaps expected 18446744073709658624"),
    "a transposed matrix": (
        lambda f: tensor(UP, shape=f.tensors[UP].shape[::-1])(f),
        "shape [32, 88] expected [88, 32] keys",
    ),
    "a vector as a matrix": (tensor(NORM, shape=(32, 1)), "shape [32 1] [32]"),
    "a type that there is not": (tensor(NORM, code=99), "output_norm.weight type 99 not supported"),
    "a type that was dropped": (tensor(NORM, code=4), "type Q4_2 ggml no longer supports Q4_0 file"),
    "a type for one processor": (tensor(UP, code=32), "type Q4_0_4_8 ggml no longer supports Q4_0 file"),
    "a type that is not read": (tensor(NORM, code=9), "type Q8_1 not supported"),
    "a type with a cure": (tensor(NORM, code=40), "type NVFP4 not supported take a file another type Q4_K_M"),
    "rows of no whole blocks": (tensor(NORM, code=8, shape=(31,)), "rows 31 multiple 32 block Q8_0"),
    "another type, so another size": (tensor(UP, code=1), "blk.1.ffn_down.weight leaves gap before"),
    "an offset of 2^64 - 32": (
        tensor(UP, offset=2**64 - 32),
        "blk.1.ffn_up.weight leaves gap before 18446744073709551584",
    ),
    "an unaligned offset": (tensor(UP, offset=1), "blk.1.ffn_up.weight overlaps before 1"),
    "two tensors at one place": (tensor(UP, offset=0), "blk.1.ffn_up.weight overlaps before 0"),
    "a tensor twice": (renamed(NORM, UP), "blk.1.ffn_up.weight shape [32]"),
    "a tensor without a name": (renamed(NORM, ""), "tensor '' has a name of 0 bytes outside 1 to 64"),
    "a tensor with a long name": (renamed(NORM, "n" * 65), "has a name of 65 bytes outside 1 to 64"),
    "a tensor whose name is no text": (renamed(NORM, b"\xc3("), "name of tensor not valid UTF-8 byte 0"),
    "a tensor named as a path": (renamed(NORM, "../../etc/passwd\n"), "lacks tensor output_norm.weight"),
    "a tensor more": (lambda f: f.tensors.__setitem__("x\n", Tensor((1,), bytes(4))), r"tensor 'x\n' unexpected"),
    "a tensor less": (lambda f: f.tensors.pop(UP), "lacks tensor blk.1.ffn_up.weight"),
    "no embedding": (lambda f: f.tensors.pop("token_embd.weight"), "lacks tensor token_embd.weight"),
    "RoPE factors of another type": (
        lambda f: f.tensors.__setitem__("rope_freqs.weight", Tensor((4,), bytes(8), 1)),
        "rope_freqs.weight type F16 expected F32",
    ),
    "RoPE factors that are too many": (
        lambda f: f.tensors.__setitem__("rope_freqs.weight", Tensor((99,), bytes(396))),
        "rope_freqs.weight 99 factors",
    ),
    "RoPE factors of 0": (
        lambda f: f.tensors.__setitem__("rope_freqs.weight", Tensor((4,), bytes(16))),
        "rope_freqs.weight holds factor positive number",
    ),
    # weights
    "a weight that is NaN": (filled(UP, np.nan), "up_proj.weight[87 31] nan"),
    "a weight that is infinite": (filled(NORM, -np.inf), "model.norm.weight[31] -inf"),
    # the end of the file
    "bytes after the last tensor": (lambda f: setattr(f, "tail", bytes(32)), "32 unexpected bytes after last tensor"),
}


@pytest.mark.parametrize("kind", CASES)
def test_an_invalid_gguf_file_is_refused(tmp_path, kind):
    spoil, what = CASES[kind]
    file = good()
    spoil(file)
    message = refusal(file.write(tmp_path / "x.gguf"))
    assert mentions(message, what), message


def test_the_valid_gguf_file_loads(tmp_path):
    load(good().write(tmp_path / "x.gguf"))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mixtral", "llama-3.2"])
def test_tensors_of_another_family(tmp_path, kind):
    file, stranger = good("llama-2"), good(kind)
    file.tensors = stranger.tensors
    refusal(file.write(tmp_path / "x.gguf"))


BLOCKS = {  # code, bytes per 32 weights, a non-finite scale, and its offset
    "Q8_0": (8, 34, b"\x00\x7c", 0), "Q4_0": (2, 18, b"\x00\x7e", 0), "Q4_1": (3, 20, b"\x00\xfc", 2),
    "Q5_0": (6, 22, b"\x00\x7c", 0), "Q5_1": (7, 24, b"\x01\x7c", 0), "IQ4_NL": (20, 18, b"\x00\x7c", 0),
    "MXFP4": (39, 17, b"\xff", 0),
}  # fmt: skip


@pytest.mark.parametrize("type", BLOCKS)
def test_scales_that_are_not_finite(tmp_path, type):
    config = {**CONFIG, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
    file = gguf_files.file_of(config, families.random_tensors(config))
    scaled(UP, *BLOCKS[type])(file)
    assert "up_proj.weight[95, " in refusal(file.write(tmp_path / "x.gguf"))


# Headers as bytes: too wrong for a `File`.

START = b"GGUF" + struct.pack("<I", 3)
KEY = struct.pack("<Q", 1) + b"k"


def head(tensors: int, keys: int, *parts: bytes) -> bytes:
    return START + struct.pack("<QQ", tensors, keys) + b"".join(parts)


def array(kind: int, length: int) -> bytes:
    return KEY + struct.pack("<IIQ", ARRAY, kind, length)


RAW = {
    "the magic number alone": (b"GGUF", "truncated 4 bytes"),
    "half a header": (START + bytes(8), "truncated 16 bytes"),
    "half a count": (START + bytes(12), "truncated 20 bytes"),
    "a key of 2^64 - 1 bytes": (head(0, 1, b"\xff" * 8), "truncated name of key 0 18446744073709551647"),
    "a text of 2^40 bytes": (
        head(0, 1, KEY, struct.pack("<IQ", STRING, 2**40)),
        "truncated value of key 'k' 1099511627821",
    ),
    "a list of 2^40 bytes": (head(0, 1, array(U8, 2**40)), "truncated key 'k' 1099511627825"),
    "a list of 2^30 bools": (head(0, 1, array(BOOL, 2**30)), "truncated key 'k' 1073741873"),
    "a list of 2^61 numbers of 8 bytes": (head(0, 1, array(U64, 2**61)), "truncated key 'k' 18446744073709551665"),
    "a list of 2^64 - 1 texts": (head(0, 1, array(STRING, 2**64 - 1)), "more than 1000000 strings in total"),
    "a list of lists": (head(0, 1, array(ARRAY, 1), array(U8, 1)), "is a list of lists"),
    "lists a thousand deep": (head(0, 1, KEY, struct.pack("<IIQ", ARRAY, ARRAY, 1) * 1000), "is a list of lists"),
    "a value of type 13": (head(0, 1, KEY, struct.pack("<I", 13)), "type 13 GGUF not define"),
    "a list of type 99": (head(0, 1, array(99, 0)), "key 'k' type 99 GGUF not define"),
    "a bool of 2": (head(0, 1, KEY, struct.pack("<IB", BOOL, 2)), "key 'k' 2 expected true false"),
    "a list of bools of 255": (head(0, 1, array(BOOL, 2), b"\1\xff"), "key 'k' 255 expected true false"),
    "a key twice": (head(0, 2, (KEY + struct.pack("<IB", U8, 1)) * 2), "key 'k' twice"),
    "a tensor of 2^32 - 1 axes": (head(1, 0, KEY, b"\xff" * 4), "4294967295 axes"),
    "a tensor without its sizes": (head(1, 0, KEY, struct.pack("<I", 4)), "truncated tensor 'k' ends 45"),
    "two tensors of one name": (head(2, 0, (KEY + struct.pack("<IQIQ", 1, 8, 0, 0)) * 2), "tensor 'k' twice"),
    "a tensor beyond the end": (head(1, 0, KEY, struct.pack("<IQIQ", 1, 8, 0, 0)), "truncated tensors end 96"),
    "100,000 empty texts": (
        lambda: head(0, 1, array(STRING, 100_000), bytes(800_000)),
        "lacks the key general.architecture",
    ),
    "many keys": (
        head(0, 2_000, *(struct.pack("<Q", 4) + b"%04d\0\0\0\0\0" % i for i in range(2_000))),
        "lacks the key general.architecture",
    ),
    "keys of 40 MB": (
        lambda: head(0, 1, KEY, struct.pack("<IQ", STRING, 40 << 20), bytes(40 << 20)),
        "larger than 33554432",
    ),
    "a text of 30 MB, each of four bytes": (
        lambda: head(0, 1, KEY, struct.pack("<IQ", STRING, 30 << 20), "😀".encode() * (30 << 18)),
        "lacks the key general.architecture",
    ),
    "a list of 3 million numbers": (
        lambda: head(0, 1, array(U64, 3 << 20), bytes(24 << 20)),
        "lacks the key general.architecture",
    ),
}


@pytest.mark.parametrize("kind", RAW)
def test_an_invalid_gguf_header_is_refused(tmp_path, kind):
    raw, what = RAW[kind]
    (tmp_path / "x.gguf").write_bytes(raw() if callable(raw) else raw)  # large ones are made on demand
    assert mentions(refusal(tmp_path / "x.gguf"), what)


def test_a_sparse_file_that_is_all_header(tmp_path):
    """A header that claims an array of 2^40 entries is refused, even if a sparse file is long enough to hold them."""
    with open(tmp_path / "x.gguf", "wb") as file:
        file.write(head(0, 1, array(U8, 2**40)))
        file.truncate(2**40 + 100)
    assert "larger than 33554432 bytes" in refusal(tmp_path / "x.gguf")


@pytest.mark.parametrize("cut", ["a key", "the table", "a tensor", "the last byte"])
def test_a_file_cut_short(tmp_path, cut):
    file = good()
    raw, header = file.bytes(), len(file.head())
    end = {"a key": 100, "the table": header - 20, "a tensor": header + 999, "the last byte": len(raw) - 1}[cut]
    (tmp_path / "x.gguf").write_bytes(raw[:end])
    assert "truncated" in refusal(tmp_path / "x.gguf")


def test_padding_at_the_end_may_lack(tmp_path):
    """A file without padding at its end loads, because some writers omit the padding. llama.cpp loads it, too."""
    file = good()
    data = len(list(file.tensors.values())[-1].data)
    file.alignment = 4096
    file.keys["general.alignment"] = (U32, 4096)
    padding = -data % 4096
    assert padding
    (tmp_path / "x.gguf").write_bytes(file.bytes()[:-padding])
    load(tmp_path / "x.gguf")


def test_the_corpus_is_large_enough():
    assert len(CASES) + len(RAW) + len(BLOCKS) >= 100


def test_a_gguf_under_another_name(tmp_path: Path):
    families.write_checkpoint(tmp_path, CONFIG)
    good().write(tmp_path / "model.safetensors")
    assert "GGUF file, expected safetensors" in refusal(tmp_path, named=str(tmp_path / "model.safetensors"))
    good().write(tmp_path / "model.bin")
    load(tmp_path / "model.bin")
