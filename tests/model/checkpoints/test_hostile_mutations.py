"""2,000 randomly changed files: each loads or gives a one-line error, quickly and with little memory.

Valid files of every format are cut, extended or shuffled, or get extreme numbers in random places. Every run makes the
same changes.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from llamaspec.model.checkpoints import open_checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.tokenizers.llama2c import read_llama2c
from llamaspec.reference.quantizers import ggml
from tests.model.checkpoints import test_quantized_checkpoints as test_quantized_checkpoints
from tests.support import bounded, families, gguf_files, llama2c_files, tiny_tokenizers
from tests.support.gguf_files import STRING, U32, File, Tensor
from tests.support.refusals import check_message, load, load_with_tokenizer
from tests.support.strategies import share_of

EXTREMES = [0, 1, 2, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


def small(family: str, **changes: object) -> dict:
    return {**families.FAMILIES[family], "num_hidden_layers": 1, **changes}


def gguf(config: dict, *, type: str = "F32") -> File:
    file = gguf_files.file_of(config, families.random_tensors(config))
    if type in ggml.TYPES:
        for name, tensor in file.tensors.items():
            if len(tensor.shape) == 2:
                weights = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
                raw = ggml.encode(weights, type).tobytes()
                file.tensors[name] = Tensor(tensor.shape, raw, gguf_files.CODES[type])
    return file


def gguf_with_pieces() -> File:
    proto: ModelProto = read_llama2c(tiny_tokenizers.llama2c(), path="tokenizer.bin").proto()
    file = gguf(small("llama-2", vocab_size=len(proto.pieces), hidden_size=16, intermediate_size=8))
    file.keys |= gguf_files.sentencepiece_keys(proto)
    return file


def gguf_with_merges() -> File:
    spec = json.loads(tiny_tokenizers.chatml())
    spec["model"]["merges"] = []
    file = gguf(small("qwen3", vocab_size=259, hidden_size=16, intermediate_size=8))
    file.keys |= gguf_files.byte_level_keys(spec, pre="qwen2")
    file.keys |= {"tokenizer.ggml.bos_token_id": (U32, 256), "tokenizer.chat_template": (STRING, "{{ messages }}")}
    return file


def header_of_safetensors(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


CONFIGS = {
    "safetensors": small("llama-3"),
    "safetensors, NF4": small("llama-2", hidden_size=64, intermediate_size=64),
}


LAYOUTS = {"safetensors, AWQ": "awq", "safetensors, GPTQ": "gptq 4", "safetensors, int4": "packed 4"}
DIRECTORIES = [*CONFIGS, *LAYOUTS]


def write_directory(kind: str, folder: Path) -> Path:
    """Write a valid Hugging Face folder."""
    if kind in LAYOUTS:
        test_quantized_checkpoints.write_layout(folder, LAYOUTS[kind])
        return folder
    families.write_checkpoint(folder, CONFIGS[kind])
    if kind != "safetensors, NF4":
        return folder
    write_huggingface(quantized(open_checkpoint(folder), "nf4"), folder / "nf4")
    return folder / "nf4"


@cache
def healthy(kind: str) -> tuple[bytes, int]:
    """Return the bytes of a valid file, and how many of them come before its weights."""
    wide = small("llama-2", hidden_size=64, intermediate_size=64)
    files: dict[str, Callable[[], File]] = {
        "gguf": lambda: gguf(small("llama-3.2")),
        "gguf experts": lambda: gguf(small("mixtral")),
        "gguf Q4_0": lambda: gguf(wide, type="Q4_0"),
        "gguf Q5_1": lambda: gguf(wide, type="Q5_1"),
        "gguf pieces": gguf_with_pieces,
        "gguf merges": gguf_with_merges,
    }
    if kind in files:
        file = files[kind]()
        return file.bytes(), len(file.head())
    if kind in DIRECTORIES:
        with tempfile.TemporaryDirectory() as folder:
            raw = (write_directory(kind, Path(folder)) / "model.safetensors").read_bytes()
        return raw, header_of_safetensors(raw)
    version = int(kind[-1])
    raw = llama2c_files.file_bytes(version, tied=False)
    return raw, (28, 41, 41, 32)[version]


KINDS = ["gguf", "gguf experts", "gguf Q4_0", "gguf Q5_1", "gguf pieces", "gguf merges", *DIRECTORIES]
KINDS += [f"llama2c {version}" for version in range(4)]


@dataclass(frozen=True)
class Change:
    """A change to a file.

    For most kinds of change, `place` and `second_place` are offsets in the header, taken modulo its length. For cuts
    and floats, `place` is an offset in the whole file.
    """

    how: str
    place: int
    second_place: int
    size: int
    number: int

    def apply(self, raw: bytearray, header: int) -> None:
        at, second = (place % max(1, min(header, len(raw))) for place in (self.place, self.second_place))
        end, size = self.place % max(1, len(raw)), self.size
        match self.how:
            case "flip":
                raw[at : at + 1] = bytes(byte ^ (1 + self.second_place % 255) for byte in raw[at : at + 1])
            case "number":
                raw[at : at + size] = (self.number % 256**size).to_bytes(size, "little")
            case "cut":
                del raw[end:]
            case "longer":
                raw += bytes(size)
            case "drop":
                del raw[at : at + size]
            case "repeat":
                raw[at:at] = raw[at : at + size]
            case "swap":
                raw[at : at + size], raw[second : second + size] = raw[second : second + size], raw[at : at + size]
            case "float":
                value = (np.nan, np.inf, -np.inf, 3e38)[self.second_place % 4]
                raw[end : end + 4] = np.float32(value).tobytes()


changes = st.builds(
    Change,
    how=st.sampled_from(["flip", "number", "number", "cut", "longer", "drop", "repeat", "swap", "float"]),
    place=st.integers(0, 1 << 16),
    second_place=st.integers(0, 1 << 16),
    size=st.sampled_from([1, 2, 4, 8, 33]),
    number=st.sampled_from(EXTREMES),
)


def reader(kind: str) -> Callable[[str], object]:
    return load_with_tokenizer if kind in ("gguf pieces", "gguf merges") else load


def put(kind: str, raw: bytes, folder: Path) -> Path:
    """Write a file under the name that its format requires."""
    path = folder / kind / "model.safetensors" if kind in DIRECTORIES else folder / "model.bin"
    path.write_bytes(raw)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    for kind in DIRECTORIES:
        models = tmp_path_factory.mktemp("made")
        write_directory(kind, models).rename(folder / kind)
    return folder


@seed(6)
@settings(max_examples=share_of(2000), database=None, deadline=None, phases=[Phase.generate, Phase.shrink])
@given(kind=st.sampled_from(KINDS), changes=st.lists(changes, min_size=1, max_size=3))
def test_a_changed_file_loads_or_is_refused(folder, kind, changes):
    good, header = healthy(kind)
    raw = bytearray(good)
    for change in changes:
        change.apply(raw, header)
    path = put(kind, bytes(raw), folder)
    message = bounded.process().refusal(reader(kind), str(path))
    if message is not None:
        check_message(message, str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_good_files_load(folder, kind):
    raw, header = healthy(kind)
    assert 0 < header < len(raw)
    reader(kind)(str(put(kind, raw, folder)))


def places(values: dict, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """List the path of every value in a JSON object and in its nested objects."""
    paths = []
    for key, value in values.items():
        paths += [(*path, key), *(places(value, (*path, key)) if isinstance(value, dict) else [])]
    return paths


STRANGE = [None, True, 0, -1, 3, 7, 33, 2**31, 2**64, 0.5, 1e308, "", "4", "int", "channel", [], [[]], {}, {"a": {}}]


@seed(7)
@settings(max_examples=share_of(300), database=None, deadline=None, phases=[Phase.generate, Phase.shrink])
@given(layout=st.sampled_from(sorted(test_quantized_checkpoints.LAYOUTS)), place=st.integers(0, 99), value=st.data())
def test_a_changed_quantization_config_loads_or_is_refused(layouts, layout, place, value):
    folder, good = layouts[layout]
    config = json.loads(good)
    *path, key = (paths := places(config["quantization_config"]))[place % len(paths)]
    inside = config["quantization_config"]
    for step in path:
        inside = inside[step]
    if value.draw(st.booleans()):
        inside[key] = value.draw(st.sampled_from(STRANGE))
    else:
        del inside[key]
    (folder / "config.json").write_text(json.dumps(config))
    message = bounded.process().refusal(load, str(folder))
    if message is not None:
        check_message(message, str(folder))


@pytest.fixture(scope="module")
def layouts(tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """Write a folder in each quantized layout; return, by layout, the folder and the text of its config.json."""
    stored = {}
    for layout in test_quantized_checkpoints.LAYOUTS:
        folder = tmp_path_factory.mktemp("layout")
        test_quantized_checkpoints.write_layout(folder, layout)
        stored[layout] = folder, (folder / "config.json").read_text()
    return stored
