"""Streamed pieces add up to the text, and no piece shows part of a stop string or of a character."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.tokenizers.tokenizer import decode
from llamaspec.serving.forms import spell
from llamaspec.serving.streaming import TextReader
from tests.serving.answer_pieces import pieces_of
from tests.serving.serving_site import EOS, TOKENIZER

IDS = st.lists(st.integers(0, 1023), max_size=40)
STOPS = st.lists(st.text("abe t狐", min_size=1, max_size=4), max_size=3)


def read(ids: Sequence[int], *, cut: int, stop_texts: Sequence[str] = (), begins: bool = True):
    """Read token ids in two parts; return the reader and the streamed pieces."""
    reader = TextReader(TOKENIZER, begins=begins, stop_texts=stop_texts, stops=frozenset({EOS}))
    return reader, pieces_of(reader, ids, [cut])


@given(IDS, st.integers(0, 40), STOPS, st.booleans())
def test_pieces_are_the_text_up_to_the_first_stop_text(ids, cut, stop_texts, begins):
    reader, pieces = read(ids, cut=cut, stop_texts=stop_texts, begins=begins)
    full = decode(TOKENIZER, ids, start=begins)
    text = "".join(piece.text for piece in pieces)
    ends = [at + len(stop) for stop in stop_texts if (at := full.find(stop)) >= 0]
    assert reader.stopped == bool(ends)
    if ends:
        first = min(ends)
        assert text == full[: min(first - len(stop) for stop in stop_texts if full[:first].endswith(stop))]
    else:
        assert text == full
        assert reader.count == len(ids)
    assert reader.length == len(text)


@given(IDS, st.integers(0, 40), STOPS)
def test_tokens_come_out_with_their_text(ids, cut, stop_texts):
    reader, pieces = read(ids, cut=cut, stop_texts=stop_texts)
    placed = [token for piece in pieces for token in piece.tokens]
    text_tokens = [token for token in ids if token != EOS]
    assert [token.token.id for token in placed] == text_tokens[: len(placed)]
    assert all(token.start <= reader.length for token in placed)
    if not reader.stopped:
        assert len(placed) == len(text_tokens)
    out = 0
    for piece in pieces:  # A token is not reported before the piece in which its text begins.
        out += len(piece.text)
        assert all(token.start <= out for token in piece.tokens)


def test_a_token_of_the_stop_text_stays_in():
    ids = TOKENIZER.encode("a bird and a fox")
    reader, pieces = read(ids, cut=2, stop_texts=["rd and"])
    assert "".join(piece.text for piece in pieces) == "a bi"
    assert reader.count <= len(TOKENIZER.encode("a bird and"))
    names = [spell(TOKENIZER, token.token.id, first=token.first) for piece in pieces for token in piece.tokens]
    assert "".join(names).startswith("a bi")


def test_a_token_is_spelled_as_its_text_is():
    first = TOKENIZER.encode("fox")[0]
    assert spell(TOKENIZER, first, first=True) == spell(TOKENIZER, first).removeprefix(" ")
    assert spell(TOKENIZER, EOS) == "</s>"
    half = next(token for token in range(1024) if TOKENIZER.bytes_of(token) == b"\xe7")
    assert spell(TOKENIZER, half) == "bytes:\\xe7"
    assert spell(TOKENIZER, 5000) == ""  # an id beyond the vocabulary, for which models may have rows


@pytest.mark.parametrize("begins", [True, False])
def test_a_space_in_front_belongs_to_a_text_that_goes_on(begins):
    _, pieces = read(TOKENIZER.encode("fox"), cut=0, begins=begins)
    assert pieces[1].text == ("fox" if begins else " fox")
    assert pieces[1].tokens[0].first == begins
