"""`reference.sentencepiece_bpe` agrees with the sentencepiece library, on published models and on tiny ones."""

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from llamaspec.reference.sentencepiece_bpe import Piece, Vocabulary, decode, encode

CORPUS = """
Once upon a time there was a little girl named Lily. She loved to play outside, on the swings and in the sand.
One day she saw a big, red ball. "Can I play with it?" asked Lily. "Yes, you can!" said the ball's owner, an old man.
    if total > 1999:    return "too much"
Il était une fois une petite fille qui aimait le café. Ein Mädchen hörte die Vögel. Жила-была девочка, и была она добра.
3.14159 2.71828 1,000,000 1984 2024   she said, she said, she saw, she sat
"""

# Half of the draws are made of fragments that the models know, so that there is something to merge.
fragments = [
    "Once",
    "she",
    "sa",
    "the",
    "re",
    "á",
    "été",
    " ",
    "  ",
    "a",
    "h",
    "11",
    "19",
    "\n",
    "▁",
    "<s>",
    "<0x41>",
    "👋",
    "好",
]
texts = st.text() | st.lists(st.sampled_from(fragments)).map("".join)


def train(*, vocab_size: int = 450, byte_fallback: bool = True) -> bytes:
    """Train a tiny SentencePiece model that does not normalize text, like Llama 2's."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=byte_fallback,
        character_coverage=0.99,  # leaves out some characters of the corpus
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def load_model(data: bytes) -> tuple[Vocabulary, SentencePieceProcessor]:
    """Load one model twice: as the reference's vocabulary, and as a processor of the library."""
    proto = ModelProto()
    proto.ParseFromString(data)
    kinds = type(proto.pieces[0])
    spelled = (kinds.NORMAL, kinds.USER_DEFINED, kinds.UNUSED)
    vocabulary = Vocabulary(
        pieces={piece.piece: Piece(i, piece.score) for i, piece in enumerate(proto.pieces) if piece.type in spelled},
        bytes=[i for i, piece in enumerate(proto.pieces) if piece.type == kinds.BYTE],
        unknown=0,
    )
    # tok512.model merges runs of spaces; the reference (and llama2.c) does not.
    proto.normalizer_spec.remove_extra_whitespaces = False
    return vocabulary, SentencePieceProcessor(model_proto=proto.SerializeToString())


@pytest.fixture(scope="module", params=["bytes", "no bytes", "llama2.c's tok512", "Llama 2"])
def model(request):
    match request.param:
        case "bytes":
            return load_model(train())
        case "no bytes":
            return load_model(train(vocab_size=150, byte_fallback=False))
    folder = request.getfixturevalue("data")
    name = "llama2-tokenizer/tokenizer.model" if request.param == "Llama 2" else "stories260K/tok512.model"
    return load_model((folder / name).read_bytes())


@pytest.fixture(scope="module")
def trained():
    return load_model(train())


@given(text=texts)
@example("")
@example(" ")
@example("\0")
@example("aaaaaaa")
def test_ids_are_those_of_sentencepiece(model, text):
    vocabulary, processor = model
    assert encode(text, vocabulary) == processor.encode(text)


@given(text=texts)
def test_decoding_is_that_of_sentencepiece(model, text):
    vocabulary, processor = model
    ids = processor.encode(text)
    assert decode(ids, vocabulary) == processor.decode(ids)


@given(text=texts.filter(lambda text: "▁" not in text), start=st.booleans())
def test_with_bytes_nothing_is_lost(text, start, trained):
    vocabulary, _ = trained
    assert decode(encode(text, vocabulary, start=start), vocabulary, start=start) == text


def test_without_the_space_in_front(trained):
    vocabulary, processor = trained
    proto = ModelProto()
    proto.ParseFromString(processor.serialized_model_proto())
    proto.normalizer_spec.add_dummy_prefix = False
    continuing = SentencePieceProcessor(model_proto=proto.SerializeToString())
    for text in CORPUS.split("\n"):
        assert encode(text, vocabulary, start=False) == continuing.encode(text)


def test_the_names_of_control_tokens_and_bytes_are_plain_text(trained):
    vocabulary, _ = trained
    spelled = {piece.id for piece in vocabulary.pieces.values()}
    ids = encode("<s></s><unk><0x41>", vocabulary)
    assert set(ids) <= spelled | set(vocabulary.bytes)
    assert vocabulary.bytes[0x41] not in ids
