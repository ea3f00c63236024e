"""Texts of users: bit for bit, in whole characters, or one line that says why not."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.checkpoints import CheckpointError
from model.text import LARGEST, read_text


@given(text=st.text(min_size=1).filter(str.strip), most=st.integers(1, 40) | st.none())
def test_what_is_read_are_the_characters_that_are_whole(tmp_path_factory, text, most):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(text.encode())
    expected = text.encode()[:most].decode(errors="ignore")  # what is cut is at the end, and ignored there
    if expected.strip():
        assert read_text(path, most=most) == expected
    else:
        with pytest.raises(CheckpointError, match="holds no text"):
            read_text(path, most=most)


@pytest.mark.parametrize("most", [None, 3, 5, 6])
def test_a_file_that_ends_within_a_character_is_refused(tmp_path, most):
    """Unless no more of it was to be read."""
    path = tmp_path / "text"
    path.write_bytes(b"abc\xe2\x82")
    if most in (3, 5):
        assert read_text(path, most=most) == "abc"
    else:
        with pytest.raises(CheckpointError, match=r"text: is not UTF-8: its byte 3 is 0xe2$"):
            read_text(path, most=most)


def test_a_file_without_an_end_is_refused_before_it_is_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in ("/dev/zero", pipe):
        for most in (None, 100):
            with pytest.raises(CheckpointError, match=rf"^{path}: is no regular file: "):
                read_text(path, most=most)


def test_a_file_that_is_too_large_is_refused_unless_its_beginning_is_enough(tmp_path):
    path = tmp_path / "text"
    with open(path, "wb") as file:
        file.write(b"abc")
        file.truncate(LARGEST + 1)
    with pytest.raises(CheckpointError, match=r"text: is of 1,073,741,825 bytes, and a text may have 1,073,741,824 at"):
        read_text(path)
    assert read_text(path, most=3) == "abc"
