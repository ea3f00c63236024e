"""tokenizer.json: ids and text equal those of the `tokenizers` library, or the error names the unsupported part."""

import base64
import copy
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given, seed, settings
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]
from tokenizers import Tokenizer

from llamaspec.model.chat.template import SpecialTokens
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.tokenizers.huggingface import HuggingFaceTokenizer, read_huggingface
from llamaspec.model.tokenizers.rust_library import without_panic_lines
from llamaspec.model.tokenizers.tokenizer import decode, encode_text
from tests.model.tokenizers.test_tokenizers import sentencepiece_json
from tests.reference import test_sentencepiece_bpe
from tests.support import bounded, tiny_tokenizers
from tests.support.strategies import share_of

PREPEND = {"type": "Prepend", "prepend": "▁"}
UNDERLINE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
DOUBLE = {"type": "Replace", "pattern": {"Regex": r"\A▁"}, "content": "▁▁"}
SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def metaspace(scheme: str, *, split: bool) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


METASPACE = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True}
REPLACED_SPACE = {"type": "Replace", "pattern": {"String": "_"}, "content": " "}
METASPACES = [metaspace(scheme, split=split) for scheme in ("first", "always", "never") for split in (True, False)]
LLAMAS = [SPACE, FALLBACK, FUSE, STRIP]
DECODERS = [
    LLAMAS,
    [SPACE, FALLBACK, FUSE],
    [SPACE],
    [SPACE, FUSE, STRIP],
    [{"type": "Replace", "pattern": {"Regex": "▁|_"}, "content": " "}, FALLBACK, FUSE, STRIP],
    [{"type": "Replace", "pattern": {"String": "a"}, "content": "bb"}, *LLAMAS],
    [metaspace("always", split=True)],
    [metaspace("first", split=True), FALLBACK],
    [metaspace("never", split=False), FUSE, STRIP],
]
NORMALIZERS = [
    None,
    [UNDERLINE],
    [PREPEND, UNDERLINE],
    [UNDERLINE, PREPEND],
    [UNDERLINE, DOUBLE],
    [{"type": "NFC"}, {"type": "Lowercase"}, PREPEND, UNDERLINE],
    [{"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}, PREPEND, UNDERLINE],
]


def added(id: int, content: str, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": id, "content": content, **plain, **flags}


ADDED = [added(450, "▁▁▁▁"), added(451, "<tool>"), added(452, "<end>", special=True, rstrip=True)]


@cache
def trained() -> dict[str, Any]:
    proto = ModelProto()
    proto.ParseFromString(test_sentencepiece_bpe.train())
    return json.loads(sentencepiece_json(proto, metaspace=True))


def sequence(parts: list[dict[str, Any]] | None, key: str) -> dict[str, Any] | None:
    return {"type": "Sequence", key: parts} if parts else None


def file_of(
    decoder: list[dict[str, Any]] = LLAMAS,
    normalizer: list[dict[str, Any]] | None = None,
    before: list[dict[str, Any]] | None = None,
    **parts: Any,
) -> bytes:
    """Build a tokenizer.json with 450 trained pieces, the added tokens `ADDED`, and the given parts."""
    spec = trained() | {
        "normalizer": sequence(normalizer, "normalizers"),
        "pre_tokenizer": sequence(before, "pretokenizers"),
        "decoder": sequence(decoder, "decoders"),
        "added_tokens": [*trained()["added_tokens"], *ADDED],
    }
    return json.dumps(spec | parts).encode()


def read(data: bytes) -> HuggingFaceTokenizer:
    return read_huggingface(data, path="nowhere/tokenizer.json")


variants = st.builds(
    file_of,
    decoder=st.sampled_from(DECODERS),
    normalizer=st.sampled_from(NORMALIZERS),
    before=st.sampled_from([None, [SPLIT], *([metaspace] for metaspace in METASPACES), [METASPACES[0], SPLIT]]),
)
pieces = ["she", " saw", "  ", "   ", " ", "\n", "é", "👋", "<tool>", "▁", "_", "a", "    x", "A"]
texts = st.lists(st.sampled_from(pieces), max_size=8).map("".join)


@settings(max_examples=share_of(150), deadline=None)
@given(data=variants, text=texts, ids_to_decode=st.lists(st.integers(0, 452), max_size=8))
@example(file_of(before=[METASPACES[1]]), " she", [])
@example(file_of(before=[METASPACES[1]]), "  two", [])
@example(file_of(before=[METASPACES[1]]), "   ", [])
@example(file_of(before=[METASPACES[3]], normalizer=[UNDERLINE, DOUBLE]), " she", [])
@example(file_of([SPACE, FALLBACK, FUSE], [UNDERLINE], [SPLIT]), "a    b", [450])
@example(file_of([REPLACED_SPACE, FALLBACK, FUSE, STRIP], None, [METASPACE]), " she saw", [])
@example(file_of([METASPACE], None, [METASPACE]), "she saw", [])
def test_ids_and_text_equal_the_librarys(data, text, ids_to_decode):
    tokenizer, library = read(data), Tokenizer.from_buffer(data)
    library.encode_special_tokens = True
    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert encode_text(tokenizer, text) == library.encode(text, add_special_tokens=True).ids
    for ids in (ids_to_decode, tokenizer.encode(text)):
        expected = library.decode(ids, skip_special_tokens=True)
        # The library also replaces valid bytes next to invalid ones, and needs the later bytes to decode.
        assert decode(tokenizer, ids) == expected or ("\ufffd" in expected and "\ufffd" in decode(tokenizer, ids))


STRANGE = [
    None, True, 0, 1, -1, 450, 2**32 - 1, 2**40, 0.5, "", "a", "▁", "first", "Replace", "Isolated", [], {}, [[]],
    {"String": ""}, {"Regex": "a*"}, {"type": "Fuse"}, {"type": "Lowercase"}, {"type": "NFKC"}, {"type": "Whitespace"},
    {"type": "Digits", "individual_digits": True}, {"type": "Strip", "strip_left": True, "strip_right": True},
]  # fmt: skip


def places(value: Any) -> list[tuple[dict[str, Any] | list[Any], Any]]:
    """List (owner, key) for all values of a JSON object and its nested objects, except for the vocabulary's values."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [])
    inside = [place for key, inner in items if key not in ("vocab", "merges") for place in places(inner)]
    return [*((value, key) for key, _ in items), *inside]


@seed(8)
@settings(max_examples=share_of(300), database=None, deadline=None, phases=[Phase.generate, Phase.shrink])
@given(
    data=variants, changes=st.lists(st.tuples(st.integers(0, 999), st.sampled_from(STRANGE)), min_size=1, max_size=2)
)
def test_a_changed_file_is_refused_or_read_as_the_library_reads_it(data, changes):
    spec = json.loads(data)
    for place, value in changes:
        owner, key = (paths := places(spec))[place % len(paths)]
        owner[key] = copy.deepcopy(value)
    changed = json.dumps(spec).encode()
    try:
        tokenizer = read(changed)
        ids = [tokenizer.encode(text) for text in CHANGED]
    except CheckpointError as error:
        assert str(error).isprintable()
        return
    library = Tokenizer.from_buffer(changed)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    assert ids == [library.encode(text, add_special_tokens=False).ids for text in CHANGED]
    assert [decode(tokenizer, row) for row in ids] == [library.decode(row) for row in ids]


CHANGED = ["she saw", " she", "  two", "a_b▁c\n", "é👋 <tool>x"]


LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
BYTE_LEVEL = {
    "GPT-2's": [LEVEL],
    "after a Split": [SPLIT, LEVEL | {"use_regex": False}],
    "after digits": [{"type": "Digits", "individual_digits": True}, LEVEL],
}


@pytest.mark.parametrize("cuts", BYTE_LEVEL.values(), ids=BYTE_LEVEL)
@settings(max_examples=share_of(100), deadline=None)
@given(parts=st.lists(texts, max_size=4), names=st.lists(st.sampled_from(["<think>", "<s>"]), min_size=4, max_size=4))
@example([], ["<s>"] * 4)
@example(["a", " b", "\n"], ["<think>", "<s>", "<s>", "<s>"])
def test_a_byte_level_prefix_is_the_librarys(cuts, parts, names):
    """With add_prefix_space, a space is put before a text, and before the text after an added or control token."""
    data = json.loads(tiny_tokenizers.chatml(special=("<s>",)))
    data["added_tokens"].append(added(257, "<think>"))
    data["pre_tokenizer"] = sequence(cuts, "pretokenizers")
    text = json.dumps(data)
    tokenizer, library = read(text.encode()), Tokenizer.from_str(text)
    assert tokenizer.dummy_prefix
    rendered = "".join(part + name for part, name in zip(parts, names, strict=False))
    ids = SpecialTokens(tokenizer).encode(rendered)
    assert ids == library.encode(rendered, add_special_tokens=False).ids
    assert decode(tokenizer, ids) == library.decode(ids)
    library.encode_special_tokens = True
    assert tokenizer.encode(rendered) == library.encode(rendered, add_special_tokens=False).ids
    assert decode(tokenizer, tokenizer.encode("b", start=False)) == "b"


@settings(max_examples=share_of(100), deadline=None)
@given(data=variants, parts=st.lists(texts, min_size=1, max_size=4), ends=st.lists(st.sampled_from(["<s>", "<end>"])))
@example(file_of(before=[METASPACES[1]]), [" Hello", " Hi"], ["<s>"])
@example(file_of(), ["a", "\n b"], ["<end>"])
def test_conversations_equal_the_librarys(data, parts, ends):
    """Chat text with control tokens gets the same ids as from the `tokenizers` library.

    The library itself finds the control tokens in the text.
    """
    rendered = "".join(part + end for part, end in zip(parts, [*ends, *["</s>"] * 4], strict=False))
    library = Tokenizer.from_buffer(data)
    assert SpecialTokens(read(data)).encode(rendered) == library.encode(rendered, add_special_tokens=False).ids


@pytest.mark.parametrize("normalizer", NORMALIZERS[:5])
@pytest.mark.parametrize("before", [None, *METASPACES])
def test_text_within_a_text_gets_no_space(normalizer, before):
    tokenizer = read(file_of([SPACE, FALLBACK, FUSE], normalizer or [UNDERLINE], before and [before]))
    for text in (" she", "she", "  "):
        assert decode(tokenizer, tokenizer.encode(text, start=False), start=False) == text


def test_dropout_is_ignored():
    spec = json.loads(file_of())
    spec["model"]["dropout"] = 0.9
    text = "she said she saw the ball"
    assert {tuple(read(json.dumps(spec).encode()).encode(text)) for _ in range(5)} == {
        tuple(read(file_of()).encode(text))
    }


def test_eos_after_a_text_is_left_out():
    """EOS that a tokenizer.json adds after a text is left out, because the model is to continue the text."""
    plain, bos_and_eos = read(file_of()), read(file_of(post_processor=template("<s>", after=("</s>",))))
    after = read(file_of(post_processor=template(after=("</s>",))))
    assert (bos_and_eos.bos, after.bos) == (1, None)
    assert encode_text(bos_and_eos, "she") == [1, *plain.encode("she")] and after.encode("she") == plain.encode("she")


def test_a_byte_order_mark_is_not_part_of_the_file():
    assert read(b"\xef\xbb\xbf" + file_of()).encode("she") == read(file_of()).encode("she")


def template(*before: str, after: tuple[str, ...] = ()) -> dict[str, Any]:
    named = {name: {"id": name, "ids": [id], "tokens": [name]} for name, id in (("<s>", 1), ("</s>", 2))}
    parts = [{"SpecialToken": {"id": name, "type_id": 0}} for name in (*before, *after)]
    single = [*parts[: len(before)], {"Sequence": {"id": "A", "type_id": 0}}, *parts[len(before) :]]
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": named}


WORD_PIECE = {"vocab": {"a": 0}, "unk_token": "a", "max_input_chars_per_word": 9, "continuing_subword_prefix": ""}
BROKEN = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\x08\0\0\0" + b"\xff" * 9).decode()}
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BAD = {
    "BOS twice": (file_of(post_processor=template("<s>", "<s>")), "post_processor must put one id before a text"),
    "spaces stripped on the right": (
        file_of([SPACE, FALLBACK, FUSE, STRIP | {"stop": 1}]), r'the part Strip \(content " ", start 1, stop 1\)',
    ),
    "spaces stripped of each token": (file_of([SPACE, FALLBACK, STRIP]), "the part ByteFallback is"),
    "a replacement in the whole text": (file_of([SPACE, FALLBACK, FUSE, SPACE]), "the part Replace "),
    "a byte before its replacement": (file_of([FALLBACK, SPACE, FUSE]), "the part ByteFallback is"),
    "a decoder of another kind": (
        file_of([SPACE, {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}]),
        r'the part CTC \(pad_token "<pad>"',
    ),
    "an added token in single words": (
        file_of(added_tokens=[added(450, "<x>", special=True, single_word=True)]), '"<x>" has single_word',
    ),
    "a prefix of subwords": (
        file_of(model=trained()["model"] | {"continuing_subword_prefix": "####"}),
        "model.continuing_subword_prefix is not supported",
    ),
    "a broken charsmap": (file_of(normalizer=[BROKEN]), "precompiled_charsmap .* is damaged"),
    "nested replacements": (file_of(normalizer=[DOUBLING] * 40), "1,000 times as long"),
    "an expression that backtracks": (
        file_of(normalizer=[{"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}]), "repeats a group",
    ),
    "an expression of 250,000 groups": (
        file_of(normalizer=[{"type": "Replace", "pattern": {"Regex": "(a+)" * 240_000 + "((a+))*"}, "content": ""}]),
        "repeats a group",
    ),
    "classes without end": (
        file_of(before=[{**SPLIT, "pattern": {"Regex": "[" * 400_000 + "]" * 400_000}}]), "tokenizer.json",
    ),
    "a normalizer nested deeply": (
        b'{"model": {"type": "BPE", "vocab": {}, "merges": []}, "normalizer": ' + b"[" * 2_000 + b"]" * 2_000 + b"}",
        "tokenizer.json",
    ),
    "an expression that is copied": (
        file_of(before=[{**SPLIT, "pattern": {"Regex": "((a{1000}){1000}){1000}"}}]), "more than 1,000,000 repeats",
    ),
    "a control token of 1 MB": (
        file_of(added_tokens=[added(450, "x" * 1_000_000, special=True)]), "1,000,000 characters.* 1,000",
    ),
    "a model of no stated type": (
        file_of(model=WORD_PIECE),
        r'model\.type is "WordPiece", which is not',
    ),
    "a vocabulary of 600,000": (
        file_of(model={"type": "BPE", "vocab": {f"{i:x}": i for i in range(600_000)}, "merges": []}),
        "has 600,000 tokens, .* 500,000",
    ),
    "a vocabulary of 1.5 million": (
        b'{"model": {"vocab": {' + b'"token": 3,' * 1_500_000 + b'"a": 3}}}',
        "1,000,000 tokens",
    ),
    "a million merges": (
        b'{"model": {"merges": [' + b'["a", "b"],' * 1_000_000 + b"[]]}}", "700,000 lists",
    ),
    "a merge that makes no token": (
        file_of(model={"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}), '"ab".*vocab',
    ),
    "a merge that makes no token, as a list": (
        file_of(model={"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}), '"ab"',
    ),
    "600,000 merges of what is no token": (
        file_of(model={"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "c"]] * 600_000}),
        r'a merge in model\.merges makes "ac", which is',
    ),
    "49 MB of numbers": (b'{"model": [' + b"300," * 12_000_000 + b"1]}", "3,000,000 values"),
}  # fmt: skip


def load(path: str) -> None:
    read_huggingface(Path(path).read_bytes(), path=path).encode("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab")


@pytest.mark.sampled(4)  # 12 cases, 9 s
@pytest.mark.parametrize("kind", BAD)
def test_a_part_that_cannot_be_followed_is_refused(kind, tmp_path):
    """Unsupported parts of a tokenizer.json are refused in one line, within the limits of `tests.support.bounded`."""
    data, what = BAD[kind]
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    message = bounded.process().refusal(load, str(path))
    assert message and message.startswith(str(path)) and message.isprintable()
    with pytest.raises(CheckpointError, match=what):
        raise CheckpointError(message)


PANICKING = {"an expression that backtracks": {"Regex": "(a|aa)+$"}, "an empty string": {"String": ""}}


@pytest.mark.parametrize("kind", PANICKING)
def test_a_panic_of_the_library_is_one_line(kind, tmp_path, capfd):
    """A part that passes our check, but makes the library panic, gives a one-line error, and Rust prints nothing."""
    replace = {"type": "Replace", "pattern": PANICKING[kind], "content": "x"}
    spec = json.loads(tiny_tokenizers.chatml()) | {"normalizer": replace}
    with pytest.raises(CheckpointError, match=r"(cannot encode this text|not a usable tokenizer.json): \S") as caught:
        read(json.dumps(spec).encode()).encode("a" * 60 + "b")
    assert str(caught.value).isprintable()
    assert capfd.readouterr() == ("", "")


def test_added_tokens_over_which_the_library_panics_give_one_line(capfd):
    """If the library panics over added tokens, the error is one line.

    It panics if a token of white space has lstrip, and the token before it has absorbed the white space.
    """
    spec = json.loads(tiny_tokenizers.chatml())
    first = len(spec["model"]["vocab"]) + len(spec["added_tokens"])
    spec["added_tokens"] += [added(first, "<x>", rstrip=True), added(first + 1, "\n\n", lstrip=True)]
    with pytest.raises(CheckpointError, match=r"cannot encode this text: \S"):
        read(json.dumps(spec).encode()).encode("a<x>\n\n\n\n")
    assert capfd.readouterr() == ("", "")


def test_a_decoder_that_panics_gives_one_line(capfd):
    spec = json.loads(file_of([{"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": " "}, FALLBACK, FUSE]))
    spec["added_tokens"].append(added(453, "a" * 60 + "b"))
    tokenizer = read(json.dumps(spec).encode())
    with pytest.raises(CheckpointError, match="cannot decode a token"):
        decode(tokenizer, [tokenizer.vocab - 1])
    assert capfd.readouterr() == ("", "")


def test_other_output_to_stderr_is_kept(capfd):
    """Lines that other code prints to stderr during a call of the library appear after the call."""
    with without_panic_lines():
        os.write(2, b"one\n\nthread '<unnamed>' panicked at src/lib.rs:1:2:\na\nb\nnote: run with `RUST_BACKTRACE=1`\n")
        os.write(2, b"two\n")
    assert capfd.readouterr() == ("", "one\ntwo\n")
