"""A tokenizer and a chat template in a GGUF file, compared with the same tokenizer in its usual file."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]
from tokenizers import Tokenizer, pre_tokenizers

from llamaspec.model.chat.template import find_template
from llamaspec.model.checkpoints import CheckpointError, open_checkpoint
from llamaspec.model.tokenizers.gguf_writer import unkept
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.of_model import tokenizer_of
from llamaspec.model.tokenizers.sentencepiece_model import read_sentencepiece
from llamaspec.model.tokenizers.tokenizer import Tokenizer as AnyTokenizer
from llamaspec.model.tokenizers.tokenizer import decode
from llamaspec.reference.byte_bpe import GPT2, LLAMA3, QWEN2, TEKKEN
from tests.reference import test_byte_bpe, test_sentencepiece_bpe
from tests.support import families, gguf_files
from tests.support.gguf_files import ARRAY, BOOL, F32, I32, STRING, U32, File
from tests.support.refusals import mentions

fragments = [*test_sentencepiece_bpe.fragments, *test_byte_bpe.fragments, "<s>", "<|eot_id|>", "<0x41>", "1234 5"]
texts = (st.text() | st.lists(st.sampled_from(fragments)).map("".join)).filter(lambda text: "▁" not in text)

Keys = dict[str | bytes, tuple[int, Any]]


@cache
def trained_pieces() -> bytes:
    return test_sentencepiece_bpe.train()


@cache
def trained_merges(pattern: str) -> str:
    return test_byte_bpe.train(pattern).to_str()


def sentencepiece() -> tuple[bytes, Keys]:
    raw, proto = trained_pieces(), ModelProto()
    proto.ParseFromString(raw)
    return raw, gguf_files.sentencepiece_keys(proto)


def byte_level(pattern: str, pre: str) -> tuple[bytes, Keys]:
    trained = Tokenizer.from_str(trained_merges(pattern))
    if pre == "smollm":
        trained.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    trained.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    spec = json.loads(trained.to_str())
    return trained.to_str().encode(), gguf_files.byte_level_keys(spec, pre=pre)


KINDS = {
    "sentencepiece": ("tokenizer.model", sentencepiece),
    "llama-bpe": ("tokenizer.json", lambda: byte_level(LLAMA3, "llama-bpe")),
    "qwen2": ("tokenizer.json", lambda: byte_level(QWEN2, "qwen2")),
    "tekken": ("tokenizer.json", lambda: byte_level(TEKKEN, "tekken")),
    "gpt-2": ("tokenizer.json", lambda: byte_level(GPT2, "gpt-2")),
    "smollm": ("tokenizer.json", lambda: byte_level(GPT2, "smollm")),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer_pair(request, tmp_path_factory) -> tuple[AnyTokenizer, AnyTokenizer]:
    """Load one tokenizer twice: from a GGUF file, and from its usual file."""
    folder = tmp_path_factory.mktemp("tokenizer")
    name, make = KINDS[request.param]
    raw, keys = make()
    (folder / name).write_bytes(raw)
    return load_tokenizer(File(keys, {}).write(folder / "x.gguf")), load_tokenizer(folder / name)


@given(text=texts, start=st.booleans())
@example("  a\n\n 12345  ", True)
@example("", True)
def test_the_ids_are_the_same(tokenizer_pair, text, start):
    inside, beside = tokenizer_pair
    ids = inside.encode(text, start=start)
    assert ids == beside.encode(text, start=start)
    assert decode(inside, ids, start=start) == text


def test_the_tokens_are_the_same(tokenizer_pair):
    inside, beside = tokenizer_pair
    assert (inside.vocab, inside.special, inside.dummy_prefix) == (beside.vocab, beside.special, beside.dummy_prefix)
    for token in range(inside.vocab):
        assert (inside.piece(token), inside.bytes_of(token)) == (beside.piece(token), beside.bytes_of(token))


@pytest.mark.parametrize(("pre", "stated", "bos"), [
    ("llama-bpe", None, 450), ("llama-bpe", False, None), ("gpt-2", None, None), ("gpt-2", True, 450),
])  # fmt: skip
def test_a_text_begins_as_llama_cpp_has_it(tmp_path, pre, stated, bos):
    _, keys = byte_level(LLAMA3, pre)
    keys["tokenizer.ggml.bos_token_id"] = (U32, 450)
    if stated is not None:
        keys["tokenizer.ggml.add_bos_token"] = (BOOL, stated)
    (tmp_path / "tokenizer_config.json").write_text("not this tokenizer's")
    assert load_tokenizer(File(keys, {}).write(tmp_path / "x.gguf")).bos == bos


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_models_of_embeddings_end_a_text_with_eos(tmp_path, kind):
    _, keys = byte_level(LLAMA3, "llama-bpe") if kind == "byte level" else sentencepiece()
    keys["tokenizer.ggml.eos_token_id"] = (U32, 2)
    assert load_tokenizer(File(keys, {}).write(tmp_path / "x.gguf")).appended == ()
    keys["tokenizer.ggml.add_eos_token"] = (BOOL, True)
    tokenizer = load_tokenizer(File(keys, {}).write(tmp_path / "y.gguf"))
    assert tokenizer.appended == (2,) and 2 not in tokenizer.encode("she")
    keys["tokenizer.ggml.eos_token_id"] = (U32, 99_999)
    with pytest.raises(CheckpointError, match="add_eos_token is true, but"):
        load_tokenizer(File(keys, {}).write(tmp_path / "z.gguf"))


def test_without_a_key_a_text_begins_with_sentencepieces_bos(tmp_path):
    _, keys = sentencepiece()
    del keys["tokenizer.ggml.bos_token_id"]
    assert load_tokenizer(File(keys, {}).write(tmp_path / "x.gguf")).bos == 1
    keys["tokenizer.ggml.add_bos_token"] = (BOOL, False)
    assert load_tokenizer(File(keys, {}).write(tmp_path / "x.gguf")).bos is None


def test_no_space_in_front_where_the_file_says_so(tmp_path):
    _, keys = sentencepiece()
    keys["tokenizer.ggml.add_space_prefix"] = (BOOL, False)
    keys["tokenizer.ggml.add_bos_token"] = (BOOL, False)
    tokenizer = load_tokenizer(File(keys, {}).write(tmp_path / "x.gguf"))
    assert (tokenizer.dummy_prefix, tokenizer.bos) == (False, None)
    assert decode(tokenizer, tokenizer.encode("she")) == "she"


@pytest.mark.parametrize("stated", [True, False])
def test_the_unknown_token_may_be_a_control_token(tmp_path, stated):
    """The unknown token may have the type of a control token, as llama.cpp's converter has written it since 2024."""
    _, keys = sentencepiece()
    before = load_tokenizer(File(keys, {}).write(tmp_path / "before.gguf"))
    types = list(keys["tokenizer.ggml.token_type"][1][1])
    assert types[0] == 2
    keys["tokenizer.ggml.token_type"] = (ARRAY, (I32, [3, *types[1:]]))
    if stated:
        keys["tokenizer.ggml.unknown_token_id"] = (U32, 0)
    tokenizer = load_tokenizer(File(keys, {}).write(tmp_path / "x.gguf"))
    assert (tokenizer.special, tokenizer.vocab) == (before.special, before.vocab)
    assert tokenizer.encode("she saw 👋") == before.encode("she saw 👋")


def test_what_a_gguf_file_cannot_say_of_a_tokenizer_is_told():
    proto = ModelProto()
    proto.ParseFromString(trained_pieces())
    plain = read_sentencepiece(proto.SerializeToString(), path="t")
    proto.normalizer_spec.remove_extra_whitespaces = True
    squeezing = read_sentencepiece(proto.SerializeToString(), path="t")
    assert squeezing.encode("a  b") == plain.encode("a b") != plain.encode("a  b")
    keys = {"tokenizer.ggml.add_eos_token": False}
    assert unkept(plain, keys) == [] and "several spaces" in "".join(unkept(squeezing, keys))
    ending = replace(plain, appended=(2, 2))
    assert "the tokenizer puts </s> </s> after a text" in "".join(unkept(ending, keys))


def model_with(tmp_path: Path, keys: Keys) -> Path:
    """Write a GGUF model with a vocabulary as large as the tokenizer's."""
    vocab = len(keys["tokenizer.ggml.tokens"][1][1])
    config = {**families.FAMILIES["llama-2"], "vocab_size": vocab}
    file = gguf_files.file_of(config, families.random_tensors(config))
    file.keys |= keys
    return file.write(tmp_path / "x.gguf")


def test_a_models_own_tokenizer_goes_before_the_one_beside_it(tmp_path):
    _, keys = sentencepiece()
    keys["tokenizer.ggml.eot_token_id"] = (U32, 7)
    checkpoint = open_checkpoint(model_with(tmp_path, keys))
    assert (checkpoint.bos, checkpoint.stops) == (1, {2, 7})
    (tmp_path / "tokenizer.json").write_text("not this model's")
    assert tokenizer_of(checkpoint, None).vocab == 450
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer_of(checkpoint, tmp_path / "tokenizer.json")


def test_without_one_inside_the_one_beside_it_is_read(tmp_path):
    raw, keys = sentencepiece()
    path = model_with(tmp_path, keys)
    for unread in ({}, {"tokenizer.ggml.model": (STRING, "none")}):
        file = gguf_files.file_of(
            config := {**families.FAMILIES["llama-2"], "vocab_size": 450}, families.random_tensors(config)
        )
        file.keys |= unread
        file.write(path)
        with pytest.raises(CheckpointError, match=r"x\.gguf: is a GGUF file without a tokenizer"):
            load_tokenizer(path)
        (tmp_path / "tokenizer.model").write_bytes(raw)
        assert tokenizer_of(open_checkpoint(path), None).vocab == 450


def test_a_template_inside_goes_before_the_one_beside_it(tmp_path):
    _, keys = sentencepiece()
    (tmp_path / "chat_template.jinja").write_text("beside")
    path = model_with(tmp_path, keys)
    tokenizer = load_tokenizer(path)
    assert find_template(tokenizer, path).source == "beside"
    keys["tokenizer.chat_template"] = (STRING, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    template = find_template(tokenizer, model_with(tmp_path, keys))
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi</s>"
    keys |= {"tokenizer.chat_templates": (ARRAY, (STRING, ["../rag"])), "tokenizer.chat_template.../rag": (STRING, "")}
    with pytest.raises(CheckpointError, match=r"'\.\./rag', expected names of"):
        find_template(tokenizer, model_with(tmp_path, keys))


SPOILED = [
    ("tokenizer.ggml.model", (STRING, "bert"), "tokenizer.ggml.model 'bert' not supported"),
    ("tokenizer.ggml.model", (U32, 3), "is 3, expected a string"),
    ("tokenizer.ggml.tokens", (ARRAY, (STRING, ["a", "b", "a"])), "token 'a' twice"),
    ("tokenizer.ggml.tokens", (ARRAY, (I32, [1])), "tokens is a list expected strings"),
    ("tokenizer.ggml.tokens", (ARRAY, (STRING, [])), "token_type is not a list of 0 integers"),
    ("tokenizer.ggml.scores", (ARRAY, (F32, [0.0])), "scores is not a list of 450 finite numbers"),
    ("tokenizer.ggml.scores", (ARRAY, (F32, [float("nan")] * 450)), "scores is not a list of 450 finite numbers"),
    ("tokenizer.ggml.scores", (ARRAY, (I32, [0] * 450)), "scores is not a list of 450 finite numbers"),
    ("tokenizer.ggml.token_type", (ARRAY, (I32, [1] * 449)), "token_type is not a list of 450 integers from 1 to 6"),
    ("tokenizer.ggml.token_type", (ARRAY, (I32, [9] * 450)), "token_type is not a list of 450 integers from 1 to 6"),
    ("tokenizer.ggml.token_type", (ARRAY, (F32, [1.0] * 450)), "token_type is not a list of 450 integers from 1 to 6"),
    ("tokenizer.ggml.unknown_token_id", (U32, 450), "no unknown token"),
    ("tokenizer.ggml.token_type", (ARRAY, (I32, [2] * 450)), "SentencePiece refuses"),
    ("tokenizer.ggml.bos_token_id", (U32, 450), "bos_token_id 450 outside vocabulary 450"),
    ("tokenizer.ggml.bos_token_id", (F32, 1.0), "bos_token_id 1.0 integer"),
    ("tokenizer.ggml.add_bos_token", (U32, 1), "add_bos_token 1 true false"),
]


@pytest.mark.parametrize(("key", "value", "what"), SPOILED, ids=[f"{i}" for i in range(len(SPOILED))])
def test_a_tokenizer_that_cannot_be_used(tmp_path, key, value, what):
    keys = sentencepiece()[1]
    if key.endswith("unknown_token_id"):
        del keys["tokenizer.ggml.token_type"]
    path = File({**keys, key: value}, {}).write(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(path)
    assert mentions(str(caught.value), what)
    assert str(caught.value).startswith(str(path)) and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tokenizer.ggml.pre": (STRING, "unheard-of")}, "tokenizer.ggml.pre 'unheard-of' not supported"),
        ({"tokenizer.ggml.pre": (U32, 3)}, "is 3, expected a string"),
        ({"tokenizer.ggml.merges": None}, "lacks key tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": (ARRAY, (STRING, ["a", "b"]))}, "merge 0 'a' two tokens"),
        ({"tokenizer.ggml.merges": (ARRAY, (STRING, ["a zz"]))}, "merge 0 'a zz' two tokens"),
        ({"tokenizer.ggml.tokens": (ARRAY, (STRING, [""]))}, "merge 0"),
    ],
)
def test_a_byte_level_tokenizer_that_cannot_be_used(tmp_path, changes, what):
    keys = {**byte_level(LLAMA3, "llama-bpe")[1], **changes}
    keys["tokenizer.ggml.token_type"] = (ARRAY, (I32, [1] * len(keys["tokenizer.ggml.tokens"][1][1])))
    path = File({key: value for key, value in keys.items() if value}, {}).write(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(path)
    assert mentions(str(caught.value), what)


@pytest.mark.parametrize(("pre", "pieces"), [("llama-bpe", ["abc"]), ("gpt-2", ["a", "b", "c"])])
def test_only_llama_3_takes_a_word_that_is_a_token_whole(tmp_path, pre, pieces):
    """Llama 3's tokenizer encodes a word that is in the vocabulary as one token, even if no merges build it.

    GPT-2's tokenizer builds every word by merges. llama.cpp treats both tokenizers in the same way.
    """
    _, keys = byte_level(LLAMA3, pre)
    keys["tokenizer.ggml.tokens"] = (ARRAY, (STRING, [*sorted(pre_tokenizers.ByteLevel.alphabet()), "abc"]))
    keys["tokenizer.ggml.token_type"] = (ARRAY, (I32, [1] * 257))
    keys["tokenizer.ggml.merges"] = (ARRAY, (STRING, []))
    tokenizer = load_tokenizer(File(keys, {}).write(tmp_path / "x.gguf"))
    assert [tokenizer.piece(token) for token in tokenizer.encode("abc")] == pieces
