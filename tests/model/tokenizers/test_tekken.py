"""Mistral's tekken.json: ids equal those of Mistral's library, even after conversion to other formats."""

import json

import pytest

from llamaspec.model.chat.template import find_template
from llamaspec.model.checkpoints import CheckpointError, open_checkpoint
from llamaspec.model.convert import convert
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.of_model import tokenizer_if_any, tokenizer_of
from llamaspec.model.tokenizers.tekken import read_tekken
from llamaspec.model.tokenizers.tokenizer import decode
from llamaspec.reference.byte_bpe import LLAMA3
from tests.model.checkpoints import test_mistral_layout
from tests.reference import test_sentencepiece_bpe
from tests.support import tiny_tokenizers
from tests.support.goldens import read_golden
from tests.support.refusals import mentions
from tests.support.tiny_tokenizers import tekken

CASES = read_golden("tekken")["cases"]
BYTES = [bytes([byte]) for byte in range(256)]


def read(file: dict):
    return read_tekken(json.dumps(file).encode(), path="tekken.json")


@pytest.mark.parametrize("version", CASES)
def test_ids_and_pieces_are_those_of_mistrals_library(version, tmp_path):
    golden = CASES[version]
    (tmp_path / "tekken.json").write_text(json.dumps(golden["file"]))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab, tokenizer.bos) == (golden["vocab"], golden["bos"])
    # The library prints U+FFFD for a token that is not a whole character.
    pieces = [name if id in tokenizer.special.values() else decode(tokenizer, [id]) for id, name in named(tokenizer)]
    assert pieces == golden["pieces"]
    for case in golden["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert decode(tokenizer, case["ids"]) == case["text"]


def named(tokenizer) -> list[tuple[int, str]]:
    return [(id, tokenizer.piece(id)) for id in range(tokenizer.vocab)]


def test_a_model_of_mistrals_has_the_same_text_in_every_format(tmp_path):
    config = test_mistral_layout.MISTRAL | {"vocab_size": 384}
    folder = tmp_path / "own"
    test_mistral_layout.write(folder, {"vocab_size": 384}, test_mistral_layout.own_tensors(config))
    checkpoint = open_checkpoint(folder)
    assert tokenizer_if_any(checkpoint, None) is None
    (folder / "tekken.json").write_text(json.dumps(CASES["v3"]["file"]))
    own_tokenizer = tokenizer_of(checkpoint, None)
    for name, to in (("there", "safetensors"), ("there.gguf", "gguf")):
        assert convert(checkpoint, tmp_path / name, to=to) == []
        converted = tokenizer_of(open_checkpoint(tmp_path / name), None)
        assert (
            converted.bos == own_tokenizer.bos == 1
            and converted.special["[INST]"] == own_tokenizer.special["[INST]"] == 3
        )
        for case in CASES["v3"]["texts"]:
            assert converted.encode(case["text"]) == case["ids"]


def test_a_chat_without_a_template_is_what_mistrals_library_renders(tmp_path):
    """Without a template, a chat is rendered as mistral-common 1.13.1 renders it with InstructTokenizerV7."""
    template = find_template(read(tekken([*BYTES, b"she"], LLAMA3, controls=120)), tmp_path)
    turns = [("system", "Be brief."), ("user", " Hi there\n"), ("assistant", " Yes. "), ("user", "Why?")]
    assert template.render([{"role": role, "content": content} for role, content in turns]) == (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST] Hi there\n[/INST] Yes.</s>[INST]Why?[/INST]"
    )


def test_a_tokenizer_model_may_have_a_version_in_its_name(tmp_path):
    """Among several tokenizer.model.vN files, the file with the largest number is used: v11 rather than v3."""
    trained = test_sentencepiece_bpe.train()
    (tmp_path / "tokenizer.model.v11").write_bytes(trained)
    (tmp_path / "tokenizer.model.v3").write_bytes(b"an older one")
    (tmp_path / "tokenizer.model.vendor").write_bytes(b"none")
    assert load_tokenizer(tmp_path).encode("she") == load_tokenizer(tmp_path / "tokenizer.model.v11").encode("she")
    (tmp_path / "tekken.json").write_text(json.dumps(tekken([*BYTES, b"she"], LLAMA3)))
    assert load_tokenizer(tmp_path).vocab == 276


SPOILED = {
    "no pattern": (lambda file: file["config"].pop("pattern"), "config.pattern null string"),
    "a bad pattern": (lambda file: file["config"].update(pattern="(a"), "pattern is not a usable regular expression"),
    "a slow pattern": (lambda file: file["config"].update(pattern="(?:a+)*"), "repeats a group that repeats"),
    "more tokens": (lambda file: file["config"].update(default_vocab_size=278), "258 tokens vocab missing or fewer"),
    "fewer bytes": (lambda file: file["config"].update(default_vocab_size=200), "76 of the 256 bytes have no token"),
    "too many": (lambda file: file["config"].update(default_vocab_size=10**9), "vocabulary 1,000,000,000 tokens"),
    "a negative": (lambda file: file["config"].update(default_num_special_tokens=-9), "-9 control tokens vocab"),
    "another order": (lambda file: file["vocab"].reverse(), "item 0 of vocab not have rank 0"),
    "no base64": (lambda file: file["vocab"][7].update(token_bytes="A?"), "token rank 7 not base64"),
    "a number": (lambda file: file["vocab"][7].update(token_bytes=7), "token rank 7 not base64"),
    "twice": (lambda file: file["vocab"][7].update(token_bytes="AA=="), "token of rank 0 empty or equal"),
    "controls": (lambda file: file.update(special_tokens={"<s>": 1}), "special_tokens object list"),
    "too many controls": (lambda file: file.update(special_tokens=[{}] * 21), "special_tokens at most 20 order ranks"),
    "no names": (lambda file: file.update(special_tokens=[{"rank": 0}]), "special_tokens at most 20 order ranks"),
    "a name of ours": (
        lambda file: file.update(special_tokens=[{"rank": 0, "token_str": "<SPECIAL_7>"}]),
        "two special_tokens name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILED)
def test_a_file_that_cannot_be_used_is_refused(kind):
    spoil, what = SPOILED[kind]
    file = tiny_tokenizers.tekken([*BYTES, b"she"], LLAMA3)
    read(file)
    spoil(file)
    with pytest.raises(CheckpointError) as caught:
        read(file)
    assert str(caught.value).startswith("tekken.json: ") and mentions(str(caught.value), what)
