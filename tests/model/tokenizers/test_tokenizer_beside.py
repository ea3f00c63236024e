"""Files next to a tokenizer.json: which tokens they add, and which file wins if two of them disagree."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec.model.chat.template import SpecialTokens, template_of, turn_stops
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.tokenizers.huggingface import HuggingFaceTokenizer
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tokenizer import decode
from tests.model.tokenizers.test_tokenizer_json import LLAMAS, PREPEND, UNDERLINE, file_of, metaspace, trained
from tests.model.tokenizers.transformers_process import Transformers, transformers_process
from tests.reference import test_sentencepiece_bpe
from tests.support import tiny_tokenizers
from tests.support.strategies import share_of
from tests.verify.other_pythons import python_with

FIRST = 256  # the first id after the bytes


def write(folder: Path, listed: tuple[str, ...] = ("<s>", "</s>"), **files: Any) -> Path:
    """Write a tokenizer.json with the 256 bytes and the special tokens `listed`. Write `files` next to it."""
    (folder / "tokenizer.json").write_text(tiny_tokenizers.chatml(special=listed))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    files.setdefault("tokenizer_config", {})
    files["tokenizer_config"].setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": content, **plain, **flags}


def ids_of(folder: Path, text: str) -> list[int]:
    """Encode a text as if it came from a chat template: the names of control tokens in it become these tokens."""
    return SpecialTokens(load_tokenizer(folder)).encode(text)


A, B = FIRST + 2, FIRST + 3
CHAT = "<a>Hi<b>"
PLAIN = [*b"<"]

ADDING = {
    "added_tokens_decoder": {"tokenizer_config": {"added_tokens_decoder": {"259": token("<b>"), "258": token("<a>")}}},
    "added_tokens.json": {"added_tokens": {"<b>": 259, "<a>": 258}},
    "special_tokens_map.json": {"special_tokens_map": {"bos_token": "<a>", "eos_token": token("<b>")}},
    "named tokens": {"tokenizer_config": {"eos_token": "<a>", "pad_token": "<b>"}},
    "a key of the model's own": {"tokenizer_config": {"eos_token": "<a>", "image_token": "<b>"}},
    "an object of extra tokens": {"tokenizer_config": {"extra_special_tokens": {"x": "<a>", "y": "<b>"}}},
    "a list of extra tokens": {"tokenizer_config": {"extra_special_tokens": ["<a>", "<b>"]}},
    "the old name of this list": {"tokenizer_config": {"additional_special_tokens": ["<a>", token("<b>")]}},
    "this list in the map": {"special_tokens_map": {"additional_special_tokens": ["<a>", "<b>"]}},
}


@pytest.mark.parametrize("files", ADDING.values(), ids=ADDING)
def test_files_beside_a_tokenizer_add_tokens(files, tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, **files))
    assert (tokenizer.vocab, tokenizer.piece(A), tokenizer.piece(B)) == (260, "<a>", "<b>")
    ids = SpecialTokens(tokenizer).encode(CHAT)
    assert (ids[0], ids[-1], len(ids)) == (A, B, 4)


def test_an_added_tokens_decoder_replaces_the_other_files(tmp_path):
    decoder = {"tokenizer_config": {"added_tokens_decoder": {"258": token("<a>")}, "eos_token": "</s>"}}
    more_files = {"added_tokens": {"<b>": 259}, "special_tokens_map": {"eos_token": "<b>"}}
    tokenizer = load_tokenizer(write(tmp_path, **decoder, **more_files))
    assert (tokenizer.vocab, [*tokenizer.special]) == (259, ["<s>", "</s>"])


def test_the_map_wins_over_the_configuration(tmp_path):
    write(tmp_path, tokenizer_config={"eos_token": "</s>"}, special_tokens_map={"eos_token": "<s>"})
    tokenizer = load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    template = template_of(tokenizer, tmp_path)
    assert template and template.render([]) == "<s>"


def test_flags_of_the_configuration_win(tmp_path):
    write(tmp_path, tokenizer_config={"added_tokens_decoder": {"257": token("</s>", special=True, rstrip=True)}})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.absorbs == {"</s>": (False, True)}
    assert ids_of(tmp_path, "</s> \n") == [257]


def test_a_named_token_that_is_listed_as_not_special_is_a_control_token(tmp_path):
    write(tmp_path, tokenizer_config={"eos_token": "<turn>"})
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["added_tokens"] += [{"id": 258, **token("<turn>")}, {"id": 259, **token("<think>")}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert tokenizer.special["<turn>"] == 258 and "<think>" not in tokenizer.special
    assert turn_stops(tokenizer, template_of(tokenizer, tmp_path)) == {257, 258}
    assert 258 not in tokenizer.encode("a<turn>b") and 258 not in tokenizer.encode("a<turn>b", start=False)
    assert 259 in tokenizer.encode("a<think>b")
    assert tokenizer.bytes_of(258) == b"" and tokenizer.bytes_of(259) == b"<think>"


def test_an_id_that_the_next_token_would_not_have_is_refused(tmp_path):
    write(tmp_path, added_tokens={"<a>": 300})
    with pytest.raises(CheckpointError, match='a file states id 300 for token "<a>", but the'):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"tokenizer_config": {"eos_token": 7}}, "eos_token is 7, expected a string"),
        ({"tokenizer_config": {"extra_special_tokens": ["<a>", 7]}}, "extra_special_tokens is 7, expected a string"),
        ({"tokenizer_config": {"extra_special_tokens": {"x": None}}}, "x is null, expected a string"),
        ({"tokenizer_config": {"eos_token": "x" * 1001}}, "control token.* 1,001 characters"),
        ({"tokenizer_config": {"extra_special_tokens": [f"<{i}>" for i in range(100_001)]}}, "100,00. control tokens"),
        ({"added_tokens": {"<a>": "258"}}, '"<a>".* "258"'),
    ],
    ids=range(6),
)
def test_files_that_cannot_be_used_are_refused(files, what, tmp_path):
    with pytest.raises(CheckpointError, match=what) as caught:
        load_tokenizer(write(tmp_path, **files))
    assert str(caught.value).isprintable()


# Tokens that any file may add, and texts with these tokens doubled and next to white space.
NAMES = ("<a>", "<b>", "a b", "</s>", "жж")
flags = st.fixed_dictionaries(dict.fromkeys(("lstrip", "rstrip", "special"), st.booleans()))
names = st.lists(st.sampled_from(NAMES), max_size=4, unique=True)
named = st.sampled_from(NAMES) | st.builds(lambda name, flags: {**token(name), **flags}, st.sampled_from(NAMES), flags)
texts = st.lists(st.sampled_from([*NAMES, "<s>", "a", " ", "\n", "word", "<"]), max_size=8).map("".join)


@st.composite
def folders(draw) -> dict[str, Any]:
    """Draw the contents of the files next to a tokenizer.json, by file name."""
    config: dict[str, Any] = {}
    files: dict[str, Any] = {"tokenizer_config": config}
    new = [name for name in draw(names) if name != "</s>"]
    ids = {name: FIRST + 2 + i for i, name in enumerate(new)}
    match draw(st.sampled_from(["decoder", "json", "none"])):
        case "decoder":
            config["added_tokens_decoder"] = {str(id): {**token(name), **draw(flags)} for name, id in ids.items()}
        case "json":
            files["added_tokens"] = ids
    for key in draw(st.sets(st.sampled_from(["eos_token", "bos_token", "pad_token", "x_token"]))):
        config[key] = draw(st.sampled_from(NAMES))
    if draw(st.booleans()):
        config[draw(st.sampled_from(["extra_special_tokens", "additional_special_tokens"]))] = draw(names)
    if draw(st.booleans()):
        files["special_tokens_map"] = {"eos_token": draw(named)}
    return files


@pytest.fixture(scope="module")
def transformers() -> Iterator[Transformers]:
    python = python_with("transformers", "jinja2")
    if not python:
        pytest.skip("needs a Python with transformers: set LLAMASPEC_OTHER_PYTHON")
    with transformers_process(python) as process:
        yield process


@settings(max_examples=share_of(60), deadline=None)
@given(files=folders(), drawn=st.lists(texts, min_size=1, max_size=6))
def test_ids_equal_those_of_transformers(transformers, files, drawn):
    with TemporaryDirectory() as name:
        folder = write(Path(name), **files)
        expected = transformers.encode(folder, drawn)
        special = SpecialTokens(load_tokenizer(folder))
        assert [special.encode(text) for text in drawn] == expected


SPACES = ["Hello world", "a  b", " a", "  ", "", "she</s>saw", "</s> b", "x\n y", "▁a"]
SOURCES = {
    "metaspace": file_of(before=[metaspace("first", split=False)], added_tokens=trained()["added_tokens"]),
    "always": file_of(before=[metaspace("always", split=False)], added_tokens=trained()["added_tokens"]),
    "no prefix": file_of(LLAMAS[:3], before=[metaspace("never", split=False)], added_tokens=trained()["added_tokens"]),
    "prepend": file_of(normalizer=[PREPEND, UNDERLINE], added_tokens=trained()["added_tokens"]),
}


def spaced(folder: Path, source: str, **config: Any) -> Path:
    """Write a SentencePiece-style tokenizer.json and a tokenizer_config.json."""
    (folder / "tokenizer.json").write_bytes(SOURCES[source])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
    return folder


@pytest.mark.parametrize("source", SOURCES)
def test_the_configuration_says_whether_texts_begin_with_a_space(source, tmp_path):
    config = {"tokenizer_class": "LlamaTokenizer"}
    without = load_tokenizer(spaced(tmp_path, source, **config, add_prefix_space=False))
    assert not without.dummy_prefix
    for text in SPACES:
        assert without.encode(text) == without.encode(text, start=False) == without.encode_after_special(text)
        assert decode(without, without.encode(text)) == text.replace("▁", " ")
    with_space = load_tokenizer(spaced(tmp_path, source, **config, add_prefix_space=True))
    assert with_space.dummy_prefix and with_space.encode("she") == without.encode(" she")
    assert with_space.encode_after_special("she") == without.encode("she")
    assert decode(with_space, with_space.encode("she")) == "she"


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "llama"),
        ({}, "llama"),
        ({"tokenizer_class": "LlamaTokenizer"}, "mistral"),
        ({"tokenizer_class": "LlamaTokenizer", "add_prefix_space": None}, "llama"),
    ],
)
def test_a_tokenizer_of_another_class_is_as_its_file_says(config, model, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    assert load_tokenizer(spaced(tmp_path, "metaspace", **{"add_prefix_space": False, **config})).dummy_prefix


def test_a_tokenizer_model_has_the_prefix_of_the_configuration(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(test_sentencepiece_bpe.train())
    config = {"tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    before = load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_prefix_space": False}))
    after = load_tokenizer(tmp_path)
    assert before.dummy_prefix and not after.dummy_prefix
    assert after.encode("she saw") == before.encode("she saw", start=False) != before.encode("she saw")


def test_a_byte_level_tokenizer_loses_its_prefix(tmp_path):
    write(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False})
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert decode(load_tokenizer(tmp_path), load_tokenizer(tmp_path).encode("she")) == "she"


def test_a_prefix_that_is_not_true_or_false_is_refused(tmp_path):
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": "no"}
    with pytest.raises(CheckpointError, match=r'add_prefix_space is "no", expected true or false'):
        load_tokenizer(spaced(tmp_path, "metaspace", **config))


@settings(max_examples=share_of(60), deadline=None)
@given(
    source=st.sampled_from(sorted(SOURCES)),
    kind=st.sampled_from(["LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer"]),
    legacy=st.sampled_from([True, False, None]),
    prefix=st.booleans(),
)
def test_prefixes_equal_those_of_transformers(transformers, source, kind, legacy, prefix):
    with TemporaryDirectory() as name:
        config = {"tokenizer_class": kind, "add_prefix_space": prefix, "legacy": legacy}
        folder = spaced(Path(name), source, **{key: value for key, value in config.items() if value is not None})
        special = SpecialTokens(load_tokenizer(folder))
        assert [special.encode(text) for text in SPACES] == transformers.encode(folder, SPACES)
