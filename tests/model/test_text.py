"""Users' text files are read byte for byte, cut only between characters, or refused in one line with a reason."""

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints import CheckpointError
from llamaspec.model.insight.evaluation import text_for
from llamaspec.model.text import LARGEST, read_text
from llamaspec.model.tokenizers.load import load_tokenizer
from tests.support import tiny_tokenizers
from tests.support.random_models import SMALL, random_checkpoint


@given(text=st.text(min_size=1).filter(str.strip), most=st.integers(1, 40) | st.none())
def test_what_is_read_are_the_characters_that_are_whole(tmp_path_factory, text, most):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(text.encode())
    expected = text.encode()[:most].decode(errors="ignore")  # only a cut character at the end is invalid
    if expected.strip():
        assert read_text(path, most=most) == expected
    else:
        with pytest.raises(CheckpointError, match="contains no text"):
            read_text(path, most=most)


@pytest.mark.parametrize("most", [None, 3, 5, 6])
def test_a_file_that_ends_within_a_character_is_refused(tmp_path, most):
    """A file that ends inside a character is refused.

    If reading stops after `most` bytes, a character that is cut there is left out instead.
    """
    path = tmp_path / "text"
    path.write_bytes(b"abc\xe2\x82")
    if most in (3, 5):
        assert read_text(path, most=most) == "abc"
    else:
        with pytest.raises(CheckpointError, match=r"text: .*UTF-8.*byte 3.*0xe2"):
            read_text(path, most=most)


def test_a_file_without_an_end_is_refused_before_it_is_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in ("/dev/zero", pipe):
        for most in (None, 100):
            with pytest.raises(CheckpointError, match=rf"^{path}: is not a regular file: "):
                read_text(path, most=most)


def test_a_file_that_is_too_large_is_refused_unless_its_beginning_is_enough(tmp_path):
    path = tmp_path / "text"
    with open(path, "wb") as file:
        file.write(b"abc")
        file.truncate(LARGEST + 1)
    with pytest.raises(CheckpointError, match=r"text: .*1,073,741,825.*1,073,741,824"):
        read_text(path)
    assert read_text(path, most=3) == "abc"


def swapped(spec: dict) -> dict:
    """Swap the ids of two letters in a tokenizer.json."""
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    return spec


def test_models_that_cut_the_text_differently_are_refused(tmp_path, monkeypatch):
    """`eval` refuses two models if their tokenizers give different ids for the text."""
    checkpoint = random_checkpoint(replace(SMALL, vocab=256), seed=0)
    path, (first, second) = tmp_path / "text", (tmp_path / "one.json", tmp_path / "other.json")
    path.write_text("ab")
    spec = tiny_tokenizers.chatml(())
    first.write_text(spec)
    second.write_text(json.dumps(swapped(json.loads(spec))))
    models = [replace(checkpoint, path=str(file)) for file in (first, second)]
    monkeypatch.setattr("llamaspec.model.insight.evaluation.tokenizer_of", lambda model, _: load_tokenizer(model.path))
    with pytest.raises(ValueError, match=r"token 0\b.*--tokenizer"):
        text_for(models, path)
