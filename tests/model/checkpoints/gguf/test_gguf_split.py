"""Models split over several GGUF files, as llama-gguf-split writes them, and the errors for invalid splits."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamaspec.model.checkpoints.open import open_checkpoint
from tests.support import families, gguf_files
from tests.support.gguf_files import I32, U16, File
from tests.support.refusals import refusal

CONFIG = families.FAMILIES["llama-3.1"]  # with rope_freqs.weight


def split(folder: Path, count: int = 3, *, twice: str | None = None) -> list[Path]:
    """Write a model as one GGUF file, and again split into `count` files; the first of these has only the metadata.

    With `twice`, the last file also contains the tensor `twice`, which an earlier file contains, too.
    """
    full = gguf_files.file_of(CONFIG, families.random_tensors(CONFIG))
    full.write(folder / "whole.gguf")
    names = np.array_split(list(full.tensors), count - 1)
    paths = []
    for number in range(count):
        of_split: dict[str | bytes, tuple[int, Any]] = {
            "split.no": (U16, number),
            "split.count": (U16, count),
            "split.tensors.count": (I32, len(full.tensors)),
        }
        tensors: dict[str | bytes, gguf_files.Tensor] = {}
        if number:
            tensors |= {str(name): full.tensors[str(name)] for name in names[number - 1]}
        if twice and number == count - 1:
            tensors[twice] = full.tensors[twice]
        stated = {**of_split, **(full.keys if not number else {})}
        paths.append(File(stated, tensors).write(folder / f"model-{number + 1:05}-of-{count:05}.gguf"))
    return paths


def test_split_files_load_as_one_model(tmp_path):
    first, *_ = split(tmp_path)
    full, parts = open_checkpoint(tmp_path / "whole.gguf"), open_checkpoint(first)
    assert (parts.config, parts.bos, parts.stops) == (full.config, full.bos, full.stops)
    assert parts.config.scaling is not None
    assert list(parts.tensors) == list(full.tensors)
    for name, tensor in full.tensors.items():
        np.testing.assert_array_equal(parts.tensors[name].read(), tensor.read())
    with parts.scattered() as read_at_once:
        read_at_once(parts.tensors["model.norm.weight"].read())
    parts.release()


def test_another_part_than_the_first_names_the_first(tmp_path):
    _, second, _ = split(tmp_path)
    assert "model-00001-of-00003.gguf" in refusal(second)


def test_a_part_under_another_name(tmp_path):
    first, *_ = split(tmp_path)
    assert "is one of 3 parts of a model, but its name" in refusal(first.rename(tmp_path / "model.gguf"))


def test_a_part_that_is_missing(tmp_path):
    first, *_, last = split(tmp_path)
    last.unlink()
    assert "model-00003-of-00003.gguf: No such file" in refusal(first, named=str(last))


def test_a_part_of_another_model(tmp_path):
    first, second, last = split(tmp_path)
    shutil.copy(second, last)
    assert re.search("split.no 1 and split.count 3 .* 2 and 3", refusal(first, named=str(last)))


def test_a_tensor_in_two_parts(tmp_path):
    first, _, last = split(tmp_path, twice="token_embd.weight")
    message = refusal(first, named=str(last))
    assert "'token_embd.weight'" in message and "model-00002-of-00003.gguf" in message


def test_a_count_of_tensors_that_is_wrong(tmp_path):
    first, *_ = split(tmp_path)
    raw = first.read_bytes()
    at = raw.index(b"split.tensors.count") + len("split.tensors.count") + 4
    first.write_bytes(raw[:at] + (7).to_bytes(4, "little") + raw[at + 4 :])
    assert "split.tensors.count is 7" in refusal(first)


@pytest.mark.parametrize("count", [10_001, 65_535])
def test_parts_without_end(tmp_path, count):
    file = gguf_files.file_of(CONFIG, families.random_tensors(CONFIG))
    file.keys["split.count"] = (U16, count)
    assert "expected at most 10000 parts" in refusal(file.write(tmp_path / f"x-00001-of-{count:05}.gguf"))


def test_a_link_out_of_the_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    first, *_, last = split(tmp_path / "here")
    last.rename(tmp_path / "elsewhere" / "x")
    last.symlink_to(tmp_path / "elsewhere" / "x")
    assert "is a link to" in refusal(first, named=str(last))
