"""Added tokens and control tokens of SentencePiece models and GGUF files: found where llama.cpp and transformers do.

The libraries themselves are asked where a Python that LLAMASPEC_OTHER_PYTHON names has them.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]
from tokenizers import AddedToken, Tokenizer

from llamaspec.model.chat.template import SpecialTokens
from llamaspec.model.checkpoints import open_checkpoint
from llamaspec.model.tokenizers.added_tokens import Leftmost, LongestFirst
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tokenizer import Tokenizer as AnyTokenizer
from llamaspec.model.tokenizers.tokenizer import decode
from llamaspec.model.tokenizers.tokenizer_config import Added
from llamaspec.reference.byte_bpe import LLAMA3
from tests import gguf_files, test_byte_bpe, test_sentencepiece_bpe
from tests.gguf_files import ARRAY, BOOL, F32, I32, STRING, U32, File
from tests.other_pythons import python_with
from tests.other_tokenizers import OtherTokenizers, other_tokenizers
from tests.test_gguf_tokenizers import Keys, trained_merges, trained_pieces

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

NAMES = ["  ", "   ", "\n\n", "\t\t", "<tool>", "total income", "Größe", "she ", " saw", "▁theme", "a▁b", "<think>"]
CONTROLS = ["<|im_start|>", "<|im_end|>", "<|user|>"]
white = st.sampled_from(["", " ", "  ", "    ", "\n", "\n\n\n", "\t", " \n"])
parts = st.sampled_from([*NAMES, *test_sentencepiece_bpe.fragments, "total", "income", "theme", "Gr"]) | white
texts = st.lists(parts | st.text(test_byte_bpe.characters, max_size=3), max_size=8).map("".join)


def with_added(keys: Keys, names: dict[str, int]) -> Keys:
    """The keys of a tokenizer with more tokens, each of a type."""
    tokens, types = keys["tokenizer.ggml.tokens"][1][1], keys["tokenizer.ggml.token_type"][1][1]
    keys = keys | {
        "tokenizer.ggml.tokens": (ARRAY, (STRING, [*tokens, *names])),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [*types, *names.values()])),
    }
    if "tokenizer.ggml.scores" in keys:
        scores = keys["tokenizer.ggml.scores"][1][1]
        keys["tokenizer.ggml.scores"] = (ARRAY, (F32, [*scores, *[-1000.0] * len(names)]))
    return keys


def sentencepiece_keys() -> Keys:
    proto = ModelProto()
    proto.ParseFromString(trained_pieces())
    return gguf_files.sentencepiece_keys(proto)


def byte_level_keys() -> Keys:
    spec = json.loads(trained_merges(LLAMA3))
    return gguf_files.byte_level_keys(spec | {"added_tokens": []}, pre="llama-bpe")


def named(**changes: tuple[int, Any]) -> Keys:
    return {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


TYPES = dict.fromkeys(NAMES, USER_DEFINED) | dict.fromkeys(CONTROLS, CONTROL)
# Of tokens in byte-level vocabularies, names are text: they have no "▁" for a space.
GGUF: dict[str, Keys] = {
    "llama": with_added(sentencepiece_keys(), TYPES),
    "llama, no space": with_added(sentencepiece_keys(), TYPES) | named(add_space_prefix=(BOOL, False)),
    "llama, Phi-3": with_added(sentencepiece_keys(), TYPES) | {"general.name": (STRING, "Phi-3 mini")},
    "gpt2": with_added(byte_level_keys(), TYPES),
    "gpt2, phi3": with_added(byte_level_keys(), TYPES) | {"general.name": (STRING, "my-PHI3-model")},
}
LEGACY = {"transformers, legacy": True, "transformers": False}


def gguf(folder: Path, keys: Keys) -> Path:
    keys = {"general.architecture": (STRING, "llama"), "tokenizer.ggml.bos_token_id": (U32, 1), **keys}
    return File(keys, {}).write(folder / "x.gguf")


def folder_with(folder: Path, names: list[str], **config: Any) -> Path:
    """A tokenizer.model with added tokens in added_tokens.json and tokenizer_config.json, as transformers writes them."""
    (folder / "tokenizer.model").write_bytes(trained_pieces())
    ids = {name: 450 + i for i, name in enumerate(names)}
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    decoder = {str(id): {"content": name, **flags} for name, id in ids.items()}
    (folder / "added_tokens.json").write_text(json.dumps(ids))
    stated = {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": decoder, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {kind: gguf(tmp_path_factory.mktemp("gguf"), keys) for kind, keys in GGUF.items()}
    return made | {
        kind: folder_with(tmp_path_factory.mktemp("folder"), NAMES, legacy=legacy) for kind, legacy in LEGACY.items()
    }


@pytest.fixture(scope="module")
def tokenizer(folders) -> Callable[[str], AnyTokenizer]:
    loaded = {kind: load_tokenizer(path) for kind, path in folders.items()}
    return lambda kind: loaded[kind]


def spelled(tokenizer: AnyTokenizer, text: str) -> list[str]:
    """The spelling of a text: added tokens, and what is between them."""
    spelling, text_before = [], False
    for id in tokenizer.encode(text):
        piece = tokenizer.piece(id)
        if piece not in NAMES and text_before:
            spelling[-1] += piece
        else:
            spelling.append(piece)
        text_before = piece not in NAMES
    return spelling


@pytest.mark.parametrize(
    ("kind", "text", "spelling"),
    [
        ("llama, no space", "red  ball", ["red", "  ", "ball"]),
        ("llama", "red  ball", ["▁red", "  ", "▁ball"]),
        ("llama", "<tool>red", ["<tool>", "▁red"]),
        ("llama", "red <tool>", ["▁red▁", "<tool>"]),
        ("gpt2", "red  <tool>red", ["red", "  ", "<tool>", "red"]),
        ("llama, Phi-3", "<tool> \n red", ["<tool>", "▁red"]),
        ("gpt2, phi3", "<tool> \n red", ["<tool>", "red"]),
        ("transformers", "red total income red", ["▁red▁", "total income", "▁red"]),
        ("transformers", "<tool>red", ["<tool>", "red"]),
        ("transformers, legacy", "<tool>red<tool> red", ["<tool>", "▁red", "<tool>", "▁red"]),
    ],
)
def test_added_tokens_are_found_before_a_text_is_cut(tokenizer, kind, text, spelling):
    """All were wrong: spaces were looked for as "▁", and no text after an added token began anew."""
    assert spelled(tokenizer(kind), text) == spelling


def libraries(*names: str) -> Iterator[OtherTokenizers]:
    python = python_with(*names)
    if not python:
        pytest.skip(f"needs a Python with {' and '.join(names)}: set LLAMASPEC_OTHER_PYTHON")
    with other_tokenizers(python) as process:
        yield process


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[OtherTokenizers]:
    yield from libraries("llama_cpp")


@pytest.fixture(scope="module")
def transformers() -> Iterator[OtherTokenizers]:
    yield from libraries("transformers", "sentencepiece")


@pytest.mark.parametrize("kind", GGUF)
@settings(max_examples=300)
@given(text=texts)
@example("<tool><tool>  \n\n  <tool>")
def test_ids_are_those_of_llama_cpp(llama_cpp, folders, tokenizer, kind, text):
    assert tokenizer(kind).encode(text) == llama_cpp.llama_cpp(folders[kind], text)[0]


@pytest.mark.parametrize("kind", GGUF)
@settings(max_examples=300)
@given(text=st.lists(texts | st.sampled_from(CONTROLS), max_size=5).map("".join))
def test_ids_of_a_rendered_conversation_are_those_of_llama_cpp(llama_cpp, folders, tokenizer, kind, text):
    ids = SpecialTokens(tokenizer(kind)).encode(text)
    assert ids == llama_cpp.llama_cpp(folders[kind], text, special=True)[0]


@pytest.mark.parametrize("kind", LEGACY)
@settings(max_examples=300)
@given(text=texts.filter(lambda text: text[:1] not in (" ", "▁")))
@example("<tool><tool>  \n\n  <tool>")
def test_ids_are_those_of_transformers(transformers, folders, tokenizer, kind, text):
    """At the start of a text, transformers 5 alone puts no space in front of a space."""
    assert SpecialTokens(tokenizer(kind)).encode(text) == transformers.transformers(folders[kind], text)[0]
