"""`model.tokenizers` reads four kinds of files with one interface. We test small files, and Llama 2's own files."""

import base64
import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.tokenizers.huggingface import read_huggingface
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tokenizer import Decoder, decode
from llamaspec.reference.byte_bpe import LLAMA3
from tests.reference import test_byte_bpe as byte_level
from tests.reference import test_sentencepiece_bpe as sentencepiece
from tests.support import tiny_tokenizers
from tests.support.processes import REPOSITORY

NAMES = ["<s>", "</s>", "<unk>", "[INST]", "<|eot_id|>", "<|begin_of_text|>", "<0x41>"]
fragments = [*sentencepiece.fragments, *byte_level.fragments, *NAMES, "👩‍👩‍👧", "\0", "\ufeff"]
words = st.lists(st.sampled_from(fragments)).map("".join)
texts = (st.text() | words).filter(lambda text: "▁" not in text)  # SentencePiece cannot tell "▁" from a space


def llama2c(proto) -> bytes:
    """Build the tokenizer.bin that llama2.c's tokenizer.py writes."""
    pieces = [piece.piece.replace("▁", " ").encode() for piece in proto.pieces]
    pieces[1:3] = [b"\n<s>\n", b"\n</s>\n"]
    records = [
        struct.pack("<fI", piece.score, len(text)) + text for piece, text in zip(proto.pieces, pieces, strict=True)
    ]
    return struct.pack("<I", max(map(len, pieces))) + b"".join(records)


def sentencepiece_json(proto, *, metaspace: bool) -> str:
    """Build the tokenizer.json that transformers makes from a Llama's tokenizer.model, with merges ordered by score."""
    pieces = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == piece.NORMAL}
    splits = [(a, b) for merged in sorted(scores, key=lambda s: -scores[s]) for a, b in halves(merged, scores)]
    tokenizer = Tokenizer(models.BPE(pieces, splits, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


def halves(piece: str, pieces) -> list[tuple[str, str]]:
    cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
    return [(a, b) for a, b in cuts if a in pieces and b in pieces]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Write a folder for each kind of tokenizer, and return their parent folder."""
    folder = tmp_path_factory.mktemp("tokenizers")

    def write(name: str, data: bytes):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    proto = ModelProto()
    proto.ParseFromString(sentencepiece.train())
    write("sentencepiece/tokenizer.model", proto.SerializeToString())
    write("llama2c/tokenizer.bin", llama2c(proto))
    write("prepend/tokenizer.json", sentencepiece_json(proto, metaspace=False).encode())
    write("metaspace/tokenizer.json", sentencepiece_json(proto, metaspace=True).encode())

    trained = byte_level.train(LLAMA3)
    ranks = sorted(byte_level.ranks_of(trained).items(), key=lambda item: item[1])
    # Llama 3's ranks are also its ids, and single bytes come first.
    write("llama3/tokenizer.model", b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks))
    write("tekken/tekken.json", json.dumps(tiny_tokenizers.tekken([token for token, _ in ranks], LLAMA3)).encode())
    trained.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    write("byte-level/tokenizer.json", trained.to_str().encode())
    trained.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 450)]
    )
    write("byte-level-bos/tokenizer.json", trained.to_str().encode())
    return folder


KINDS = {
    "sentencepiece": "tokenizer.model",
    "llama2c": "tokenizer.bin",
    "prepend": "tokenizer.json",
    "metaspace": "tokenizer.json",
    "llama3": "tokenizer.model",
    "tekken": "tekken.json",
    "byte-level": "tokenizer.json",
}
SENTENCEPIECE = ("sentencepiece", "llama2c", "prepend", "metaspace")


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request, folder):
    return load_tokenizer(folder / request.param)


def round_trip(tokenizer, text: str) -> str:
    """Encode `text`, decode the ids, and return the decoded text.

    A Metaspace tokenizer drops one leading space of `text`, because it takes this space for the one that it adds
    itself.
    """
    metaspace = tokenizer.encode(" a") == tokenizer.encode("a")
    return text.removeprefix(" ") if metaspace else text


@given(text=texts, start=st.booleans())
@example("", True)
@example(" ", True)
@example("  a", True)
@example("\0\0", True)
@example("".join(NAMES), True)
def test_decoding_inverts_encoding(tokenizer, text, start):
    ids = tokenizer.encode(text, start=start)
    assert decode(tokenizer, ids, start=start) == (round_trip(tokenizer, text) if start else text)
    assert all(0 <= token < tokenizer.vocab for token in ids)
    assert not set(ids) & set(tokenizer.special.values())  # names of control tokens are plain text


@given(text=texts, lone=st.integers(0xD800, 0xDFFF).map(chr))
@example("", "\udc80")
@example("", "\udcff")
def test_what_is_not_unicode_is_refused(tokenizer, text, lone):
    """Text with a lone surrogate is refused. Python creates one from a byte of stdin that is not UTF-8."""
    with pytest.raises(ValueError, match=f"character {len(text)} is a lone surrogate, U\\+{ord(lone):X}") as caught:
        tokenizer.encode(text + lone)
    hint = f" (the byte {ord(lone) - 0xDC00:02X}, which is not UTF-8)" if "\udc80" <= lone <= "\udcff" else ""
    assert str(caught.value).partition(f"U+{ord(lone):X}")[2] == hint


@given(text=texts)
@example("👋👩‍👩‍👧 好")
def test_a_stream_never_breaks_a_character(tokenizer, text):
    decoder = Decoder(tokenizer)
    parts = [decoder.feed(token) for token in tokenizer.encode(text)]
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text
    assert "".join(parts) == round_trip(tokenizer, text)
    assert decoder.finish() == ""


@given(text=texts, cut=st.integers(0, 200))
def test_a_text_may_be_decoded_in_two_parts(tokenizer, text, cut):
    ids = tokenizer.encode(text)
    first, second = b"".join(map(tokenizer.bytes_of, ids[:cut])), b"".join(map(tokenizer.bytes_of, ids[cut:]))
    assert (first + second).decode() == " " * (tokenizer.dummy_prefix and text != "") + round_trip(tokenizer, text)


@given(first=texts, second=texts)
def test_a_text_may_be_encoded_in_two_parts(tokenizer, first, second):
    ids = tokenizer.encode(first) + tokenizer.encode(second, start=not first)
    assert decode(tokenizer, ids) == round_trip(tokenizer, first + second)


@given(ids=st.lists(st.integers(-1, 600)))
def test_any_ids_can_be_shown(tokenizer, ids):
    decode(tokenizer, ids)
    assert all(isinstance(tokenizer.piece(token), str) for token in ids)
    beyond = tokenizer.vocab  # a model may have more rows than its tokenizer has ids
    assert (tokenizer.bytes_of(beyond), tokenizer.piece(beyond), tokenizer.bytes_of(-1)) == (b"", "", b"")


def test_control_tokens_are_no_text_and_do_not_begin_it(tokenizer):
    for name, token in tokenizer.special.items():
        assert (tokenizer.piece(token), tokenizer.bytes_of(token)) == (name, b"")
    control = next(iter(tokenizer.special.values()))
    assert decode(tokenizer, [control, *tokenizer.encode("she saw"), control]) == "she saw"


def test_half_a_character_becomes_one_replacement(tokenizer):
    ids = tokenizer.encode("she👋", start=True)
    assert decode(tokenizer, ids[:-1]) == "she\ufffd"


@given(text=texts)
@example(" 👋  <s> éa")
def test_all_sentencepiece_files_agree(folder, text):
    tokenizers = {kind: load_tokenizer(folder / kind) for kind in SENTENCEPIECE}
    ids = {kind: tokenizer.encode(round_trip(tokenizer, text)) for kind, tokenizer in tokenizers.items()}
    assert round_trip(tokenizers["metaspace"], text) != text or len({tuple(tokens) for tokens in ids.values()}) == 1, (
        ids
    )
    within = [tokenizer.encode(text, start=False) for tokenizer in tokenizers.values()]
    assert all(tokens == within[0] for tokens in within)


@given(text=texts)
def test_both_byte_level_files_agree(folder, text):
    assert load_tokenizer(folder / "byte-level").encode(text) == load_tokenizer(folder / "llama3").encode(text)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_sentencepiece_control_tokens(folder, kind):
    tokenizer = load_tokenizer(folder / kind)
    assert (tokenizer.vocab, tokenizer.bos, tokenizer.special) == (450, 1, {"<s>": 1, "</s>": 2})
    assert tokenizer.dummy_prefix
    assert (tokenizer.piece(3 + 0x41), tokenizer.bytes_of(3 + 0x41)) == ("<0x41>", b"A")


def test_llama3s_control_tokens_follow_the_ranks(folder):
    tokenizer = load_tokenizer(folder / "llama3")
    assert (tokenizer.vocab, tokenizer.bos, tokenizer.dummy_prefix) == (450 + 256, 450, False)
    # With its 128,000 ranks, Llama 3 has 128000, 128001, 128006, 128007, 128008, 128009, 128010 and 128255.
    names = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag"]
    assert [tokenizer.special[f"<|{name}|>"] - 450 for name in names] == [0, 1, 6, 7, 8, 9, 10]
    assert tokenizer.special["<|reserved_special_token_245|>"] == 450 + 255
    assert len(tokenizer.special) == 256


@pytest.mark.parametrize("begins", [False, True])
def test_ids_after_a_text_come_from_the_template(begins):
    spec = json.loads(tiny_tokenizers.chatml())
    special = {
        id: {"id": id, "ids": [256 + i], "tokens": [id]} for i, id in enumerate(("<|endoftext|>", "<|im_start|>"))
    }
    end, start = ({"SpecialToken": {"id": id, "type_id": 0}} for id in special)
    single = [*([start] if begins else []), {"Sequence": {"id": "A", "type_id": 0}}, end]
    spec["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}
    tokenizer = read_huggingface(json.dumps(spec).encode(), path="tokenizer.json")
    assert (tokenizer.appended, tokenizer.bos) == ((256,), 257 if begins else None)
    assert (
        256 not in tokenizer.encode("she")
        and read_huggingface(tiny_tokenizers.chatml().encode(), path="t").appended == ()
    )


def test_bos_is_what_the_template_says_or_else_tokenizer_config(folder, tmp_path):
    assert load_tokenizer(folder / "byte-level-bos").bos == 450
    shutil.copy(folder / "byte-level" / "tokenizer.json", tmp_path)

    def bos(**config):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(tmp_path).bos

    assert load_tokenizer(tmp_path).bos is None
    assert bos(add_bos_token=True, bos_token="<|eot_id|>") == 451
    assert bos(add_bos_token=True, bos_token={"content": "<|eot_id|>"}) == 451
    assert bos(add_bos_token=True, bos_token=None) is None
    assert bos(add_bos_token=False, bos_token="<|eot_id|>") is None
    assert bos(bos_token="<|eot_id|>") is None
    assert bos(add_bos_token=True, bos_token="<x>") == load_tokenizer(tmp_path).vocab - 1  # which adds the token


def test_truncation_and_padding_in_a_file_do_not_apply(folder, tmp_path):
    tokenizer = Tokenizer.from_file(str(folder / "byte-level" / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_token="<|eot_id|>", pad_id=451)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for text in ("1 2 3 4 5 6 7 8 9", "1"):
        assert load_tokenizer(tmp_path).encode(text) == load_tokenizer(folder / "byte-level").encode(text)


@pytest.mark.sampled(1)  # 1 to 2 s each
def test_long_texts(tokenizer):
    # Merging one pair per pass, or decoding from the start for each token, would take minutes for these texts.
    for text in ("she saw " * 2_500, "a" * 20_000, " " * 20_000, "\n" * 20_000, "👋" * 5_000):
        assert decode(tokenizer, tokenizer.encode(text)) == round_trip(tokenizer, text)


def test_a_vocabulary_of_llama_3s_size(tmp_path):
    # 128,000 tokens, each made by a merge that is stored as a list, as in newer files: the largest JSON of all files.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in alphabet for b in alphabet]
    triples = [(a + b, c) for a, b in pairs[:500] for c in alphabet[:125]]
    merges = pairs + triples
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"), pretty=False)
    loaded = load_tokenizer(tmp_path)
    assert loaded.vocab == len(vocab) == 128_292
    assert loaded.encode("it's 12") == tokenizer.encode("it's 12").ids


def test_white_space_without_end(folder):
    # tiktoken's regular expressions overflow on several 100,000 spaces in a row.
    tokenizer = load_tokenizer(folder / "llama3")
    text = "she" + " " * 1_000_000 + "saw"
    assert b"".join(map(tokenizer.bytes_of, tokenizer.encode(text))) == text.encode()


# Llama 2's own tokenizer, and llama2.c's.


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.bin"])
def test_llama_2s_ids_are_metas(data, name):
    tokenizer = load_tokenizer(data / "llama2-tokenizer" / name)
    vectors = json.loads((data / "llama2-tokenizer" / "vectors.json").read_text())
    assert len(vectors) == 8
    for vector in vectors:
        bos = [tokenizer.bos] if vector["bos"] else []
        assert bos + tokenizer.encode(vector["text"]) == vector["ids"]
        assert decode(tokenizer, vector["ids"]) == vector["text"]


@given(text=texts)
def test_llama_2s_two_files_agree(data, text):
    a, b = (load_tokenizer(data / "llama2-tokenizer" / name) for name in ("tokenizer.model", "tokenizer.bin"))
    assert a.encode(text) == b.encode(text)


@given(text=texts)
def test_tok512s_two_files_agree(data, text):
    model, llama2c = (load_tokenizer(data / "stories260K" / name) for name in ("tok512.model", "tok512.bin"))
    assert (model.vocab, model.bos, model.special) == (llama2c.vocab, llama2c.bos, llama2c.special)
    # The model was trained to merge spaces, which llama2.c's format cannot express.
    text = " ".join(text.split(" ")).strip(" ")
    while "  " in text:
        text = text.replace("  ", " ")
    assert model.encode(text) == llama2c.encode(text)
    assert decode(model, llama2c.encode(text)) == text


# Unusable files.


def refused(path: Path) -> str:
    """Return the one-line error message that refuses a tokenizer file."""
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(path)
    message = str(caught.value)
    assert "\n" not in message and str(path.parent) in message
    return message


JSON = '{"version": "1.0", "model": {"type": "BPE", "vocab": %s, "merges": []}, "decoder": %s, "pre_tokenizer": %s}'
LEVEL = '{"type": "ByteLevel", "add_prefix_space": %s, "trim_offsets": true, "use_regex": true}'
RECORD = struct.pack("<fI", 0, 5) + b"<unk>"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"\n", "not a tokenizer"),
        (b"<!DOCTYPE html><html>Sign in</html>", "is an HTML or XML page"),
        (b"\n  <html>", "is an HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n", "is a Git LFS pointer"),
        (b"hello", "not a tokenizer"),
        (b"\xff" * 100, "not a tokenizer"),
        (b"\0" * 100, "has 12 pieces, but .* more than"),
        (b"PK\x03\x04" + bytes(100), "not a tokenizer"),
        # JSON
        (b"{", "is not JSON"),
        (b"{}", "not a usable tokenizer.json"),
        (b'{"model_type": "llama", "hidden_size": 64}', "not a usable tokenizer.json"),
        (b'{"a": "\xff"}', "is not JSON: byte 7 is not valid UTF-8"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":[' + b"[]," * 2_000_000, "more than 700,000 lists"),
        (b"{" + b'"a":1' * 14_000_000, "70,000,001 bytes, expected at most"),
        (b'{"a": ' + b"1" * 5_000 + b"}", "is not usable JSON: Exceeds"),
        ((JSON % ('{"a": 0, "a": 1}', LEVEL % "false", LEVEL % "false")).encode(), '"a" .*twice'),
        ((JSON % ('{"a": -1}', LEVEL % "false", LEVEL % "false")).encode(), "not a usable tokenizer.json"),
        ((JSON % ('{"a": 0, "b": 0}', LEVEL % "false", LEVEL % "false")).encode(), "same id"),
        ((JSON % ("{}", LEVEL % "false", LEVEL % "false")).encode(), "the vocabulary is empty"),
        ((JSON % ('{"a": 0}', LEVEL % "true", "null")).encode(), "decoder .*ByteLevel.* pre_tokenizer"),
        ((JSON % ('{"a": 0}', "null", "null")).encode(), "has no decoder, expected ByteLevel"),
        ((JSON % ('{"a": 0}', '{"type": "Fuse"}', "null")).encode(), "decoder .*Fuse"),
        (b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}', "model.type .*WordLevel"),
        # llama2.c
        (struct.pack("<I", 7), "has 0 pieces, but .* more than"),
        (struct.pack("<I", 7) + RECORD, "has 1 pieces, but .* more than"),
        (struct.pack("<I", 7) + RECORD[:-1], "ends within piece 0"),
        (struct.pack("<I", 7) + RECORD + b"\0", "ends within piece 1"),
        (struct.pack("<I", 7) + RECORD * 300, "pieces 0 and 1 are both"),
        (struct.pack("<IfI", 7, 0, 2**32 - 1), "piece 0 .*4294967295 bytes.* 7$"),
        (struct.pack("<Ifi", 2**16 - 1, 0, -1), "piece 0 .*4294967295 bytes.* 65535$"),
        (struct.pack("<IfI", 2**16 - 1, 0, 60_000), "ends within piece 0"),
        (struct.pack("<IfI", 7, float("nan"), 1) + b"a", "score of piece 0 is nan"),
        (struct.pack("<IfI", 7, 0, 1) + b"\xff", "piece 0 is not valid UTF-8"),
        # ranks
        (b"IQ== 0\nIg== 2\n", "line 2"),
        (b"IQ== 0\nIQ== 1\n", "the token of rank 0 is empty, or equal to another"),
        (b"IQ== 0\nIg==\n", "line 2"),
        (b"IQ== 0\nI! 1\n", "not base64"),
        (b"IQ== 0\n" + b"9" * 5000 + b" " + b"9" * 5000, "line 2"),
        (b"IQ== 0\n", "255 of the 256 bytes have no token.* 0x00"),
        (b"IQ== -1\n", "not a tokenizer|line 1"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, data, why):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    message = refused(path)
    assert re.search(why, message), message


def test_json_that_the_library_takes_and_trips_over_is_refused(folder, tmp_path):
    text = (folder / "prepend" / "tokenizer.json").read_text()
    path = tmp_path / "tokenizer.json"
    path.write_text(text.replace('"SpecialToken":{"id":"<s>"', '"SpecialToken":{"id":"<t>"'))
    assert '"<t>"' in refused(path)


def test_a_sentencepiece_model_of_another_kind_is_refused(folder, tmp_path):
    def message(change) -> str:
        proto = ModelProto()
        proto.ParseFromString((folder / "sentencepiece" / "tokenizer.model").read_bytes())
        change(proto)
        path = tmp_path / "tokenizer.model"
        path.write_bytes(proto.SerializeToString())
        return refused(path)

    def suffix(proto):
        proto.trainer_spec.treat_whitespace_as_suffix = True

    assert "treat_whitespace_as_suffix" in message(suffix)
    assert "the SentencePiece library refuses this model" in message(
        lambda proto: proto.pieces.append(proto.pieces[300])
    )  # twice
    assert "the SentencePiece library refuses this model" in message(
        lambda proto: proto.pieces.pop(3 + 0x41)
    )  # a byte is missing
    assert "incomplete" in message(lambda proto: proto.ClearField("pieces"))


def test_places_without_a_tokenizer_are_refused(tmp_path):
    assert "No such file" in refused(tmp_path / "nowhere" / "tokenizer.model")
    (tmp_path / "empty").mkdir()
    assert "tokenizer.json, tekken.json, tokenizer.model, tokenizer.bin" in refused(tmp_path / "empty")
    (tmp_path / "odd" / "tokenizer.json").mkdir(parents=True)
    assert "is a directory, not a file" in refused(tmp_path / "odd")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)  # takes no space
    assert "1,099,511,627,776 bytes, expected at most" in refused(tmp_path / "huge")
    assert "not a regular file" in refused(Path("/dev/zero"))


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_is_refused_or_is_a_smaller_vocabulary(folder, tmp_path_factory, kind, name, fraction):
    content = (folder / kind / name).read_bytes()
    path = tmp_path_factory.mktemp("cut") / name
    path.write_bytes(content[: int(fraction * len(content))])
    try:
        tokenizer = load_tokenizer(path)
    except CheckpointError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        # These two formats do not store the number of tokens, so a cut between two tokens cannot be detected.
        content = load_tokenizer(folder / kind)
        smaller = kind in ("llama2c", "llama3") and tokenizer.vocab < content.vocab
        assert smaller or [tokenizer.piece(i) for i in range(450)] == [content.piece(i) for i in range(450)]


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
@given(place=st.floats(0, 1, exclude_max=True), byte=st.binary(min_size=1, max_size=4))
def test_damage_is_refused_or_harmless(folder, tmp_path_factory, kind, name, place, byte):
    damaged = bytearray((folder / kind / name).read_bytes())
    at = int(place * len(damaged))
    damaged[at : at + len(byte)] = byte
    path = tmp_path_factory.mktemp("damaged") / name
    path.write_bytes(damaged)
    try:
        tokenizer = load_tokenizer(path)
    except CheckpointError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        decode(tokenizer, tokenizer.encode("she saw\n 👋 1999"))


def test_jax_is_not_needed(folder):
    code = "import sys; from llamaspec.model.tokenizers.load import load_tokenizer\n"
    code += "for path in sys.argv[1:]: load_tokenizer(path)\nassert 'jax' not in sys.modules"
    command = [sys.executable, "-W", "error", "-c", code, *(str(folder / kind) for kind in KINDS)]
    subprocess.run(command, check=True, cwd=REPOSITORY)
