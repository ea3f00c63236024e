"""Added and control tokens of SentencePiece models and GGUF files are found where llama.cpp and transformers find them.

The libraries run if LLAMASPEC_OTHER_PYTHON names a Python that has them.
"""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]
from tokenizers import AddedToken, Tokenizer, models

from llamaspec.model.chat.template import SpecialTokens
from llamaspec.model.checkpoints import CheckpointError, open_checkpoint
from llamaspec.model.checkpoints.gguf.write import write_gguf
from llamaspec.model.tokenizers.added_tokens import Leftmost, LongestFirst
from llamaspec.model.tokenizers.gguf_writer import vocabulary_keys
from llamaspec.model.tokenizers.huggingface import read_huggingface
from llamaspec.model.tokenizers.huggingface_writer import tokenizer_files
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.sentencepiece_model import read_sentencepiece
from llamaspec.model.tokenizers.tokenizer import Tokenizer as AnyTokenizer
from llamaspec.model.tokenizers.tokenizer import decode
from llamaspec.model.tokenizers.tokenizer_config import Added
from llamaspec.reference.byte_bpe import LLAMA3
from tests.model.tokenizers.test_gguf_tokenizers import Keys, model_with, trained_merges, trained_pieces
from tests.reference import test_byte_bpe, test_sentencepiece_bpe
from tests.support import bounded, gguf_files, tiny_tokenizers
from tests.support.gguf_files import ARRAY, BOOL, F32, I32, STRING, U32, File
from tests.support.random_models import SMALL, random_checkpoint

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

NAMES = ["  ", "   ", "\n\n", "\t\t", "<tool>", "total income", "Größe", "she ", " sawn", "▁theme", "a▁b", "<think>"]
CONTROLS = ["<|im_start|>", "<|im_end|>", "<|user|>"]
white = st.sampled_from(["", " ", "  ", "    ", "\n", "\n\n\n", "\t", " \n"])
parts = st.sampled_from([*NAMES, *test_sentencepiece_bpe.fragments, "total", "income", "theme", "Gr"]) | white
texts = st.lists(parts | st.text(test_byte_bpe.characters, max_size=3), max_size=8).map("".join)


def with_added(keys: Keys, names: dict[str, int]) -> Keys:
    """Add tokens to a tokenizer's GGUF keys; `names` maps each token's text to its type."""
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
# With at most 16 names, llama.cpp finds the smaller id first if two names have equal length in bytes, such as " sawn"
# and "a▁b". So the files that are called Phi-3 have fewer names.
SPACED = {name: kind for name, kind in TYPES.items() if name not in ("\t\t", "<think>", "Größe")}
# llama.cpp needs these tokens in a model that is called Phi-3.
PHI_3 = dict.fromkeys(["<|endoftext|>", "<unk>", "<s>", "</s>"], CONTROL)
GGUF: dict[str, Keys] = {
    "llama": with_added(sentencepiece_keys(), TYPES),
    "llama, no space": with_added(sentencepiece_keys(), TYPES) | named(add_space_prefix=(BOOL, False)),
    "llama, Phi-3": with_added(sentencepiece_keys(), SPACED | {"<|endoftext|>": CONTROL})
    | {"general.name": (STRING, "Phi-3 mini")},
    "gpt2": with_added(byte_level_keys(), TYPES),
    "gpt2, phi3": with_added(byte_level_keys(), SPACED | PHI_3) | {"general.name": (STRING, "my-PHI3-model")},
}
LEGACY = {"transformers, legacy": True, "transformers": False}


def gguf(folder: Path, keys: Keys) -> Path:
    keys = {"general.architecture": (STRING, "llama"), "tokenizer.ggml.bos_token_id": (U32, 1), **keys}
    return File(keys, {}).write(folder / "x.gguf")


def folder_with(folder: Path, names: list[str], **config: Any) -> Path:
    """Write a tokenizer.model, and the two files from which transformers reads added tokens."""
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
    paths = {kind: gguf(tmp_path_factory.mktemp("gguf"), keys) for kind, keys in GGUF.items()}
    return paths | {
        kind: folder_with(tmp_path_factory.mktemp("folder"), NAMES, legacy=legacy) for kind, legacy in LEGACY.items()
    }


@pytest.fixture(scope="module")
def tokenizer(folders) -> Callable[[str], AnyTokenizer]:
    loaded = {kind: load_tokenizer(path) for kind, path in folders.items()}
    return lambda kind: loaded[kind]


def spelled(tokenizer: AnyTokenizer, text: str) -> list[str]:
    """Encode a text; return its added tokens, and the strings between them."""
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
    """Added tokens are found before the rest of a text is split into pieces.

    Earlier versions failed in all these cases: they searched for a token's name with "▁" in place of its spaces, or did
    not treat the text after an added token as the beginning of a text.
    """
    assert spelled(tokenizer(kind), text) == spelling


def brute_force(text: str, names: dict[str, Added]) -> list[str | int]:
    """Split a text as llama.cpp does: search for one name after another, the longest name first, then by ids."""
    parts: list[str | int] = [text]
    for name in sorted(names, key=lambda name: (-len(name.encode()), names[name].id)):
        unsplit, parts = parts, []
        for part in unsplit:
            pieces = part.split(name) if isinstance(part, str) else [part]
            for piece in pieces[:-1]:
                parts += [piece, names[name].id]
            parts.append(pieces[-1])
    return [part for part in parts if part != ""]


@given(text=st.text("abé", max_size=30), names=st.sets(st.text("abé", min_size=1, max_size=4), max_size=6))
@example("bab", {"ab", "ba"})
def test_the_longest_name_is_found_first(text, names):
    added = {name: Added(id, special=False) for id, name in enumerate(sorted(names))}
    assert LongestFirst(added).split(text) == brute_force(text, added)


@given(
    text=st.text("ab é1 \n", max_size=30),
    names=st.sets(st.text("ab é", min_size=1, max_size=4), max_size=6),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@example("  ", {" "}, (True, True, False))
@example("   ", {" "}, (True, True, False))
def test_names_are_found_as_the_tokenizers_library_finds_them(text, names, flags):
    lstrip, rstrip, single_word = flags
    library = Tokenizer(models.BPE({}, []))
    library.add_tokens([AddedToken(n, lstrip=lstrip, rstrip=rstrip, single_word=single_word) for n in sorted(names)])
    added = {name: Added(id, False, lstrip, rstrip, False, single_word) for id, name in enumerate(sorted(names))}
    ids = [part for part in Leftmost(added).split(text) if isinstance(part, int)]
    assert ids == library.encode(text).ids


CONTROL_FLAGS = {"<|user|>": (False, True), "<|end|>": (True, False), "<|both|>": (True, True)}
WHITE_NAMES = ["\n\n", "  ", "\t"]


@settings(max_examples=500)
@given(
    text=st.lists(st.sampled_from([*CONTROL_FLAGS, *WHITE_NAMES, " ", "\n", "a", "\xa0"]), max_size=8).map("".join),
    normalized=st.booleans(),
    controls=st.booleans(),
)
@example("<|user|>\n\na", False, False)
@example("<|user|> \n\n\na", False, False)
@example("a\n\n <|end|>", False, False)
@example("<|user|>\n\na", True, False)
@example("<|user|>\n\na", True, True)
@example("a\n\n <|end|>", True, True)
def test_white_space_next_to_control_tokens_is_the_librarys(text, normalized, controls):
    """A control token with `lstrip` or `rstrip` absorbs white space next to it, as in the tokenizers library.

    An added token that consists of white space is not absorbed if it is found before the text is normalized, or if the
    control token is also found in the normalized text. `normalized` and `controls` say whether the normalized text is
    searched for the added and for the control tokens.
    """
    spec = json.loads(tiny_tokenizers.chatml(special=()))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": controls, "special": True}
    spec["added_tokens"] = [
        {"id": 256 + i, "content": name, **plain, "lstrip": lstrip, "rstrip": rstrip}
        for i, (name, (lstrip, rstrip)) in enumerate(CONTROL_FLAGS.items())
    ]
    spec["added_tokens"] += [
        {"id": 259 + i, "content": name, **plain, "special": False, "normalized": normalized}
        for i, name in enumerate(WHITE_NAMES)
    ]
    data = json.dumps(spec)
    tokenizer = read_huggingface(data.encode(), path="nowhere/tokenizer.json")
    ids = Tokenizer.from_str(data).encode(text, add_special_tokens=False).ids
    assert SpecialTokens(tokenizer).encode(text) == ids


@pytest.mark.parametrize("names", [Leftmost, LongestFirst])
@pytest.mark.parametrize("space", ["", " ", "\t\n"])
def test_white_space_at_the_end_of_a_text_is_absorbed(names, space):
    assert names({"<x>": Added(7, special=False, rstrip=True)}).split(f"a<x>{space}") == ["a", 7]


HOSTILE = {
    "each name begins with another": (["a" * n for n in range(1, 1001)], "a" * 100_000),
    "names with a common beginning": ([f"e{i:05}" for i in range(100_000)], "tree " * 20_000),
    "names of all lengths": (["e" + "x" * n + "y" for n in range(900)], "exxx" * 25_000),
    "every place is a match": ([chr(c) for c in range(97, 123)], "abcdefghij" * 10_000),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_many_names_take_no_longer(kind):
    """Splitting 100,000 characters by many token names stays within the limits of `tests.support.bounded`."""
    assert bounded.process().refusal(split_both, kind) is None


def split_both(kind: str) -> None:
    names, text = HOSTILE[kind]
    added = {name: Added(id, special=False) for id, name in enumerate(names)}
    assert len(Leftmost(added).split(text)) > 0 < len(LongestFirst(added).split(text))


MISTAKES = {"normal": NORMAL, "user-defined": USER_DEFINED, "no types": None}
MARKERS = [
    ("<|im_start|>", "<|im_end|>"),
    ("<start_of_turn>", "<end_of_turn>"),
    ("<|start_header_id|>", "<|eot_id|>"),
    ("<|user|>", "<|end|>"),
    ("<｜User｜>", "<｜end▁of▁sentence｜>"),
]


@pytest.mark.parametrize("make", [sentencepiece_keys, byte_level_keys])
@pytest.mark.parametrize("names", MARKERS, ids=lambda names: names[0])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_control_tokens_are_known_by_name(tmp_path, make, names, mistake):
    """Control tokens are recognized by name, even if the file states a different type for them.

    Plain text is never encoded to a control token, and generation stops at the token `end`.
    """
    begin, end = names
    keys = with_added(make(), dict.fromkeys(names, MISTAKES[mistake] or NORMAL))
    tokens = keys["tokenizer.ggml.tokens"][1][1]
    if mistake == "no types":
        del keys["tokenizer.ggml.token_type"]
    checkpoint = open_checkpoint(model_with(tmp_path, keys))
    tokenizer = load_tokenizer(tmp_path / "x.gguf")
    ids = {name: tokens.index(name) for name in names}
    assert ids.items() <= tokenizer.special.items() and ids[end] in checkpoint.stops
    assert not {*ids.values()} & {*tokenizer.encode(f"she {end}{begin} saw")}
    assert decode(tokenizer, [*tokenizer.encode("she"), ids[end]]) == "she"
    assert SpecialTokens(tokenizer).encode(f"{begin}she{end}")[:: len(tokenizer.encode_after_special("she")) + 1] == [
        *ids.values()
    ]


def test_tokens_that_merges_make_stay_text(tmp_path):
    """Tokens that merges make stay text even if they look like chat markers, because code has such operators."""
    keys = with_added(byte_level_keys(), {"<|": NORMAL, "|>": NORMAL, "<|x|>": NORMAL, "x|>": NORMAL, "<|>": NORMAL})
    merges = keys["tokenizer.ggml.merges"][1][1]
    keys |= named(merges=(ARRAY, (STRING, ["< |", "| >", "x |>", "<| x|>", *merges])))
    tokenizer = load_tokenizer(gguf(tmp_path, keys))
    assert spelled(tokenizer, "<|x|>") == ["<|x|>"] and not {"<|x|>", "<|>"} & tokenizer.special.keys()


def test_a_message_of_gpt_oss_ends_no_answer(tmp_path):
    keys = with_added(byte_level_keys(), dict.fromkeys(["<|end|>", "<|return|>", "<|call|>"], CONTROL))
    tokens = keys["tokenizer.ggml.tokens"][1][1]
    assert open_checkpoint(model_with(tmp_path, keys)).stops == {tokens.index("<|return|>"), tokens.index("<|call|>")}


@pytest.mark.parametrize("kind", [kind for kind in GGUF if "Phi" not in kind and "phi" not in kind] + [*LEGACY])
def test_converted_they_are_the_same_tokens(tmp_path, tokenizer, kind):
    """A tokenizer that is converted to a folder and to a GGUF file gives the same tokens when it is read again."""
    before = tokenizer(kind)
    files = tokenizer_files(before, named={}, templates={})
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    # With `legacy`, transformers puts no second space after an added token, as llama.cpp does.
    once = " " if kind != "llama" else ""
    for text in [f"red  <tool>{once}total income\n\nred", f"<tool>red<tool>{once}red", "  red"]:
        assert load_tokenizer(tmp_path).encode(text) == before.encode(text)
        assert load_tokenizer(tmp_path).encode_after_special(text) == before.encode_after_special(text)


def test_more_ends_than_there_are_keys_for_are_written(tmp_path):
    """All five end tokens of Qwen's files are the same after a conversion to GGUF.

    GGUF's key eot_token_id names the end of a turn, <|im_end|>. llama.cpp recognizes some others by their names.
    """
    ends = ["<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
    keys = with_added(byte_level_keys(), dict.fromkeys(ends, CONTROL))
    first = open_checkpoint(model_with(tmp_path, keys))
    assert len(first.stops) == 5
    tokenizer = load_tokenizer(tmp_path / "x.gguf")
    write_gguf(first, tmp_path / "y.gguf", vocabulary=vocabulary_keys(first, tokenizer))
    assert open_checkpoint(tmp_path / "y.gguf").stops == first.stops
    assert vocabulary_keys(first, tokenizer)["tokenizer.ggml.eot_token_id"] == tokenizer.special["<|im_end|>"]


def test_users_tokens_of_a_model_are_found_by_llama_cpp(tmp_path):
    """A model's user-defined tokens are written to GGUF in a spelling that llama.cpp finds.

    SentencePiece replaces spaces by "▁" before it searches a text for these tokens; llama.cpp searches the text as it
    is.
    """
    proto = ModelProto()
    proto.ParseFromString(trained_pieces())
    names = {piece.piece: piece for piece in proto.pieces}
    for name in ("▁▁", "▁▁▁", "<tool>"):
        piece = names[name] if name in names else proto.pieces.add(piece=name, score=0.0)
        piece.type = USER_DEFINED
    proto.normalizer_spec.add_dummy_prefix = False
    before = read_sentencepiece(proto.SerializeToString(), path=str(tmp_path / "tokenizer.model"))
    checkpoint = random_checkpoint(replace(SMALL, vocab=before.vocab), seed=0)
    write_gguf(checkpoint, tmp_path / "x.gguf", vocabulary=vocabulary_keys(checkpoint, before))
    after = load_tokenizer(tmp_path / "x.gguf")
    for text in ["red  <tool>   red", "  red", "red    red"]:
        assert after.encode(text) == before.encode(text)


def test_letters_of_an_added_token_are_text(tmp_path):
    """The letters of an added token decode as text, even in a byte-level vocabulary, in which "ö" stands for the byte
    F6.
    """
    keys = with_added(byte_level_keys(), {"Größe": USER_DEFINED, "<ö>": USER_DEFINED})
    tokenizer = load_tokenizer(gguf(tmp_path, keys))
    assert decode(tokenizer, tokenizer.encode("x Größe y <ö>")) == "x Größe y <ö>"


def test_a_control_token_of_whole_words_is_refused(tmp_path):
    """A control token that may only match whole words is refused, because we would find it within words, too.

    tokenizer.json is refused in the same way.
    """
    folder_with(tmp_path, ["<x>"])
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["450"] |= {"special": True, "single_word": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match='the control token "<x>" has single_word true'):
        load_tokenizer(tmp_path)


def test_tokens_that_only_added_tokens_json_names(tmp_path):
    """A token that only added_tokens.json names is found in a text, unless it is a control token.

    A chat marker is a control token, and so is a token that tokenizer_config.json names, such as eos_token.
    """
    (tmp_path / "tokenizer.model").write_bytes(trained_pieces())
    added = {"total income": 450, "<|im_start|>": 451, "<end>": 452}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert {"<|im_start|>": 451, "<end>": 452}.items() <= tokenizer.special.items()
    ids = tokenizer.encode("total income<|im_start|><end>")
    assert [id for id in ids if id >= 450] == [450]


def unigram() -> bytes:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(test_sentencepiece_bpe.CORPUS.splitlines()),
        model_writer=model,
        model_type="unigram",
        vocab_size=300,
        hard_vocab_limit=False,
        user_defined_symbols="<,>",  # so that the model knows all characters of "<s>"
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def unigram_json(raw: bytes) -> dict[str, Any]:
    """Convert a SentencePiece Unigram model to a tokenizer.json."""
    proto = ModelProto()
    proto.ParseFromString(raw)
    vocabulary = [[piece.piece, piece.score] for piece in proto.pieces]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": vocabulary[i][0], "special": True, **flags} for i in range(3)]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False}
    parts = {"pre_tokenizer": metaspace, "decoder": metaspace, "normalizer": None, "post_processor": None}
    return {"version": "1.0", "added_tokens": added, **parts, "model": model}


def test_a_unigram_tokenizer_json_is_read(tmp_path):
    spec = unigram_json(unigram())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer, library = load_tokenizer(tmp_path), Tokenizer.from_str(json.dumps(spec))
    for text in ["She loved to play outside", "she said, she sat", "好 she"]:
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert decode(tokenizer, tokenizer.encode("She loved to play")) == "She loved to play"
    assert tokenizer.special == {"<s>": 1, "</s>": 2}
    # The library's model has pieces with the names of control tokens, and finds them in text.
    assert 1 in library.encode("she <s>", add_special_tokens=False).ids
    assert decode(tokenizer, tokenizer.encode("she <s> her")) == "she <s> her" and 1 not in tokenizer.encode("she <s>")


UNIGRAM: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"vocab": {}}, r"not a usable tokenizer\.json: model\.vocab is"),
    "an infinite score": ({"vocab": [["<unk>", 0.0], ["a", float("-inf")]]}, r"model\.vocab contains"),
    "no pair": ({"vocab": [["<unk>"]]}, r"model\.vocab contains"),
    "a token twice": ({"vocab": [["<unk>", 0], ["a", 0], ["a", 0]]}, r"a token appears twice in model\.vocab"),
    "no such unknown token": ({"unk_id": 3, "vocab": [["<unk>", 0]]}, r"model\.unk_id is 3, outside the vocabulary of"),
}


@pytest.mark.parametrize("kind", UNIGRAM)
def test_a_unigram_that_cannot_be_used(tmp_path, kind):
    changes, what = UNIGRAM[kind]
    spec = unigram_json(unigram())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"model": spec["model"] | changes, "added_tokens": []}))
    with pytest.raises(CheckpointError, match=what):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_unigram_has_no_form_in_gguf(tmp_path, name):
    """Writing a Unigram tokenizer to GGUF is refused. Earlier it was written as BPE, which gave other ids."""
    raw = unigram()
    (tmp_path / name).write_bytes(raw if name == "tokenizer.model" else json.dumps(unigram_json(raw)).encode())
    tokenizer = load_tokenizer(tmp_path)
    checkpoint = random_checkpoint(replace(SMALL, vocab=tokenizer.vocab), seed=0)
    with pytest.raises(CheckpointError, match="its tokenizer has type Unigram"):
        vocabulary_keys(checkpoint, tokenizer)


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
    """Ids equal transformers' for all texts that do not begin with a space.

    If a text begins with a space, transformers 5 does not put the usual space before the text.
    """
    assert SpecialTokens(tokenizer(kind)).encode(text) == transformers.transformers(folders[kind], text)[0]
