"""`reference.byte_bpe` agrees with tiktoken and Hugging Face's tokenizers, on a vocabulary trained by tokenizers."""

import itertools
from typing import NamedTuple

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from llamaspec.reference.byte_bpe import GPT2, LLAMA3, QWEN2, TEKKEN, decode, encode, split

CORPUS = [
    "Once upon a time there was a little girl named Lily. She loved to play outside in the park, in the sand.",
    'One day she saw a big, red ball. "Can I play with it?" asked Lily. "Yes, you can!" said the ball\'s owner.',
    '    if total > 1999:\n        return "too much"\n\n\nx == y, y != z == ==',
    "Il était une fois une petite fille qui aimait le café. Ein Mädchen hörte die Vögel. Жила-была девочка.",
    "3.14159 2.71828 1,000,000 1984 2024   she said, she'll say, SHE'LL SAY, we've said, you're 199 19 99",
]

# Half of the draws are made of fragments in the vocabulary, so that there is something to merge.
fragments = [
    "Once",
    "she",
    "sa",
    "the",
    "été",
    "'ll",
    "'S",
    "'ſ",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "a",
    "h",
    "1",
    "199",
    "?!",
    "👋",
    "好",
]


# We leave out unassigned characters, since each library has its own version of Unicode.
characters = st.characters(exclude_categories=["Cs", "Cn"])
texts = st.text(characters) | st.lists(st.sampled_from(fragments)).map("".join)
PATTERNS = {"GPT-2": GPT2, "Llama 3": LLAMA3, "Qwen2": QWEN2, "Tekken": TEKKEN}


def train(pattern: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Map the bytes of each token to its rank; the library prints each byte as one character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    byte = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(unprintable)}
    return {bytes(byte[c] for c in token): i for token, i in tokenizer.get_vocab().items()}


class Kind(NamedTuple):
    pattern: str
    ranks: dict[bytes, int]
    huggingface: Tokenizer
    tiktoken: tiktoken.Encoding


@pytest.fixture(scope="module", params=PATTERNS)
def kind(request):
    pattern = PATTERNS[request.param]
    tokenizer = train(pattern)
    ranks = ranks_of(tokenizer)
    encoding = tiktoken.Encoding("trained", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return Kind(pattern, ranks, tokenizer, encoding)


@given(text=texts)
@example("")
@example("\0")
@example("=====")  # ties: "==" is a token, "====" is not
@example("'ſ 'S 's")  # the long s matches s if case is ignored
def test_ids_are_those_of_tiktoken_and_of_hugging_face(kind, text):
    ids = encode(text, kind.ranks, pattern=kind.pattern)
    assert ids == kind.tiktoken.encode_ordinary(text)
    assert ids == kind.huggingface.encode(text).ids


@given(ids=st.lists(st.integers(0, 449)))
def test_decoding_is_that_of_tiktoken(kind, ids):
    assert decode(ids, kind.ranks) == kind.tiktoken.decode_bytes(ids)


@given(text=st.text() | texts)
def test_decoding_inverts_encoding(kind, text):
    assert "".join(split(text, pattern=kind.pattern)) == text
    assert decode(encode(text, kind.ranks, pattern=kind.pattern), kind.ranks).decode() == text


def test_a_chunk_that_is_a_token_needs_no_merges():
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"bc": 256, b"abcd": 257}
    encoding = tiktoken.Encoding("made up", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})
    for text in ("abcd", "abcde"):
        assert encode(text, ranks, pattern=LLAMA3) == encoding.encode_ordinary(text)


@given(text=texts)
@example("SHE'LL don't 2024\n\n  x")
def test_gpt2s_pattern_is_the_one_built_into_hugging_face(text):
    chunks = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True).pre_tokenize_str(text)
    ends = [end for _, (_, end) in chunks]
    assert split(text, pattern=GPT2) == [text[a:b] for a, b in itertools.pairwise([0, *ends])]


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("HE'LLO don't", ["HE", "'LL", "O", " don", "'t"]),
        ("2024 12345", ["202", "4", " ", "123", "45"]),
        ("a  b\t\tc", ["a", " ", " b", "\t", "\tc"]),
        ("end.\n\n  x \n", ["end", ".\n\n", " ", " x", " \n"]),
        ("(one) -- $two", ["(one", ")", " --", " $", "two"]),
    ],
)
def test_llama3s_pattern_by_hand(text, chunks):
    assert split(text, pattern=LLAMA3) == chunks


def test_tekken_by_hand():
    chunks = ["camel", "Case", " HTTPServer", "2", "0", "2", "4", " //\n"]
    assert split("camelCase HTTPServer2024 //\n", pattern=TEKKEN) == chunks


def test_qwen2_takes_digits_one_by_one():
    assert split("2024 x", pattern=QWEN2) == ["2", "0", "2", "4", " x"]
