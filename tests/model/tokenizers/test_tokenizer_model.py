"""tokenizer.model with the files next to it: added tokens, BOS, and text after a control token."""

import json
from pathlib import Path

import pytest
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from llamaspec.model.chat.template import SpecialTokens, find_template
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tokenizer import decode
from tests.reference import test_sentencepiece_bpe
from tests.support import bounded, tiny_tokenizers
from tests.support.refusals import mentions

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


@pytest.fixture(scope="module")
def trained() -> bytes:
    return test_sentencepiece_bpe.train()


def with_pieces(raw: bytes, **types: int) -> bytes:
    proto = ModelProto()
    proto.ParseFromString(raw)
    for name, kind in types.items():
        proto.pieces.add(piece=f"[{name}]", score=0.0, type=kind)
    return proto.SerializeToString()


def write(folder: Path, raw: bytes, **files: object) -> Path:
    (folder / "tokenizer.model").write_bytes(raw)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_added_tokens_are_tokens(trained, tmp_path):
    """Tokens that only added_tokens.json defines are found in a text.

    OpenHermes 2.5 defines <|im_start|> only in that file.
    """
    before = load_tokenizer(write(tmp_path, trained))
    added = {"<|im_end|>": 450, "<|im_start|>": 451, "<s>": 1}
    tokenizer = load_tokenizer(write(tmp_path, trained, added_tokens=added))
    assert tokenizer.vocab == 452
    assert tokenizer.special == {"<s>": 1, "</s>": 2, "<|im_end|>": 450, "<|im_start|>": 451}
    assert [tokenizer.piece(id) for id in (450, 451)] == ["<|im_end|>", "<|im_start|>"]
    text = "she <|im_start|> saw"
    assert tokenizer.encode(text) == before.encode(text)  # a user's text spells no control token
    assert decode(tokenizer, [451, *tokenizer.encode(text)]) == text
    rendered = find_template(tokenizer, tmp_path).render([{"role": "user", "content": "she"}])
    ids = SpecialTokens(tokenizer).encode(rendered)
    assert [id for id in ids if id >= 450] == [451, 450, 451]


def test_tokens_stated_in_tokenizer_config(trained, tmp_path):
    stated = {
        "450": {"content": "<tool>", "special": False},
        "452": {"content": "<end>", "special": True, "rstrip": True},
    }
    tokenizer = load_tokenizer(write(tmp_path, trained, tokenizer_config={"added_tokens_decoder": stated}))
    assert (tokenizer.vocab, tokenizer.special["<end>"], tokenizer.piece(451)) == (453, 452, "[PAD451]")
    assert "<tool>" not in tokenizer.special and 450 in tokenizer.encode("she <tool> saw")
    assert decode(tokenizer, tokenizer.encode("she <tool> saw")) == "she <tool> saw"
    after = tokenizer.encode_after_special("saw")
    assert SpecialTokens(tokenizer).encode("<end>\n saw") == [452, *after]


@pytest.mark.parametrize(
    ("config", "bos"),
    [
        ({}, 1),
        ({"legacy": False}, 1),
        ({"add_bos_token": False, "bos_token": "<s>"}, None),
        ({"bos_token": {"content": "</s>"}}, 2),
        ({"add_bos_token": True, "bos_token": None}, 1),
    ],
)
def test_bos_is_what_the_configuration_says(trained, tmp_path, config, bos):
    assert load_tokenizer(write(tmp_path, trained, tokenizer_config=config)).bos == bos


@pytest.mark.parametrize(
    ("control", "config", "space"),
    [
        (False, {}, False),  # as in transformers 5 and in Mistral's encoder
        (False, {"legacy": None}, False),
        (False, {"legacy": True}, True),
        (False, {"legacy": False}, False),
        (True, {}, False),
        (True, {"legacy": True}, True),
    ],
)
def test_text_after_a_control_token(trained, tmp_path, control, config, space):
    raw = with_pieces(trained, INST=CONTROL, **{"/INST": CONTROL}) if control else trained
    tokenizer = load_tokenizer(write(tmp_path, raw, tokenizer_config=config))
    special = SpecialTokens(tokenizer)
    assert special.encode("</s>she") == [2, *tokenizer.encode("she", start=space)]
    assert special.encode("she")[:1] == tokenizer.encode("she")[:1]
    if control and config == {}:
        rendered = find_template(tokenizer, tmp_path).render([{"role": "user", "content": "she"}])
        assert special.encode(rendered) == [1, 450, *tokenizer.encode("she"), 451]  # one space, and BOS once


BAD: dict[str, tuple[dict[str, object], str]] = {
    "an id far away": ({"added_tokens": {"<x>": 10**9}}, "id 1000000000 far beyond 450 pieces"),
    "an id that another has": ({"added_tokens": {"<x>": 3}}, '"<x>" id 3 "<0x00>"'),
    "a negative id": ({"added_tokens": {"<x>": -1}}, '"<x>" -1'),
    "an id that is no number": ({"added_tokens": {"<x>": "7"}}, '"<x>" "7"'),
    "a name that is another's": ({"added_tokens": {"▁she": 450}}, "SentencePiece refuses"),
    "a list": ({"tokenizer_config": {"added_tokens_decoder": []}}, "added_tokens_decoder list object"),
    "no content": ({"tokenizer_config": {"added_tokens_decoder": {"450": {}}}}, "has no content"),
    "a flag that is none": (
        {"tokenizer_config": {"added_tokens_decoder": {"450": {"content": "<x>", "special": 1}}}},
        "special 1 true",
    ),
    "two ids": (
        {"added_tokens": {"<x>": 450}, "tokenizer_config": {"added_tokens_decoder": {"451": {"content": "<x>"}}}},
        'token "<x>" id 451 450 added_tokens.json',
    ),
    "a BOS that is no token": ({"tokenizer_config": {"bos_token": "<x>"}}, 'vocabulary bos_token "<x>"'),
    "a name of 1 MB": ({"added_tokens": {"x" * 1_000_000: 450}}, "1,000,000 characters 1,000"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_added_tokens_that_cannot_be_used(kind, trained, tmp_path):
    files, what = BAD[kind]
    write(tmp_path, trained, **files)
    message = bounded.process().refusal(load, str(tmp_path))
    assert message and message.startswith(str(tmp_path)) and mentions(message, what) and message.isprintable()


def load(path: str) -> None:
    load_tokenizer(path)


def spoiled_charsmap(raw: bytes) -> bytes:
    proto = ModelProto()
    proto.ParseFromString(raw)
    proto.normalizer_spec.precompiled_charsmap = (1024).to_bytes(4, "little") + b"\x7f" * 1024 + b"a\0"
    return proto.SerializeToString()


def test_a_charsmap_is_checked(trained, data, tmp_path):
    message = bounded.process().refusal(load, str(write(tmp_path, spoiled_charsmap(trained))))
    assert message and "damaged" in message
    load_tokenizer(data / "stories260K" / "tok512.model")  # has SentencePiece's usual normalization


LARGE = {
    "pieces": (b"\n\x00" * 12_000_000, "SentencePiece model has more than 500,000 tokens"),
    "records": (tiny_tokenizers.llama2c() + b"\0\0\0\0\x01\0\0\0x" * 5_000_000, "vocabulary 500,001 tokens"),
    "ranks": (b"IQ== 0\n" * 5_000_000, "vocabulary 5,000,000 tokens"),
}


@pytest.mark.parametrize("kind", LARGE)
def test_vocabularies_without_end_are_refused_soon(kind, tmp_path):
    """Tokenizers with huge vocabularies are refused within the limits of `tests.support.bounded`."""
    data, what = LARGE[kind]
    message = bounded.process().refusal(load, str(write(tmp_path, data)))
    assert message and mentions(message, what)


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED, CONTROL])
def test_a_marker_inside_a_tokenizer_model_is_a_control_token(trained, tmp_path, kind):
    """A chat marker inside a tokenizer.model is a control token, even if its stated type is different."""
    proto = ModelProto()
    proto.ParseFromString(trained)
    for name in ("<|im_start|>", "<|im_end|>", "<end_of_turn>", "<tool>", "<|>"):
        proto.pieces.add(piece=name, score=0.0, type=USER_DEFINED if name in ("<tool>", "<|>") else kind)
    tokenizer = load_tokenizer(write(tmp_path, proto.SerializeToString()))
    markers = {"<|im_start|>": 450, "<|im_end|>": 451, "<end_of_turn>": 452}
    assert tokenizer.special == {"<s>": 1, "</s>": 2, **markers}
    text = "she<|im_end|><|im_start|><end_of_turn>"
    assert not {*markers.values()} & {*tokenizer.encode(text)} and decode(tokenizer, tokenizer.encode(text)) == text
    assert {453, 454} <= {*tokenizer.encode("<tool> she <|>")}
    ids = SpecialTokens(tokenizer).encode("<|im_start|>she<|im_end|>")
    assert (ids[0], ids[-1]) == (450, 451) and tokenizer.bytes_of(451) == b""


def test_a_piece_that_is_not_utf_8_is_refused(trained, tmp_path):
    raw = trained.replace("▁saw".encode(), b"\xe2\x96\x81s\xffw")
    with pytest.raises(CheckpointError, match=r"tokenizer.model: piece \d+ is not valid UTF-8: b'.*s.xffw'"):
        load_tokenizer(write(tmp_path, raw))
