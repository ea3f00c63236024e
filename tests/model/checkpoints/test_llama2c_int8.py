"""int8 files of llama2.c and KuiperLLama: we read the codes of both, and write llama2.c's format."""

import numpy as np
import pytest

from llamaspec.model.checkpoints import open_checkpoint
from llamaspec.model.checkpoints.codes import dequantized, exact_parts
from llamaspec.model.checkpoints.llama2c.write import write_llama2c
from tests.model.checkpoints.test_checkpoints import assert_holds
from tests.support import llama2c_files
from tests.support.families import is_matrix
from tests.support.llama2c_files import Sizes
from tests.support.refusals import load, refusal

KUIPER = 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(ffn=16, layers=1)])
def test_kuiperllamas_files_are_read(tmp_path, tied, sizes):
    """We read KuiperLLama's files, even if the head is tied; KuiperLLama itself reads a tied head wrongly."""
    path = llama2c_files.write(tmp_path / "model.bin", KUIPER, sizes=sizes, tied=tied)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.format, checkpoint.config.tied) == ("kuiper-int8", tied)
    assert_holds(checkpoint, llama2c_files.expected_tensors(KUIPER, sizes, tied=tied))


@pytest.mark.parametrize("group", [0, -8, 7, 2**31 - 1, -(2**31)])
def test_kuiperllamas_groups_that_do_not_fit(tmp_path, group):
    raw = llama2c_files.file_bytes(KUIPER, tied=False)
    header = llama2c_files.header(Sizes(), version=KUIPER, tied=False, group=group)
    (tmp_path / "model.bin").write_bytes(header + raw[32:])
    assert "header implies" in refusal(tmp_path / "model.bin")


@pytest.mark.parametrize("cut", [31, 32, 33, 1000, -1])
def test_kuiperllamas_files_cut_short(tmp_path, cut):
    (tmp_path / "model.bin").write_bytes(llama2c_files.file_bytes(KUIPER)[:cut])
    assert "header implies" in refusal(tmp_path / "model.bin")


def test_kuiperllamas_scales_that_are_not_finite(tmp_path):
    raw = bytearray(llama2c_files.file_bytes(KUIPER, tied=False))
    end_of_wq = 32 + 256 + 4 * 32
    raw[end_of_wq - 4 : end_of_wq] = np.float32(np.nan).tobytes()
    (tmp_path / "model.bin").write_bytes(raw)
    assert "model.layers.0.self_attn.q_proj.weight[15, 8] is nan" in refusal(tmp_path / "model.bin")


@pytest.mark.parametrize("at_once", [70, 1 << 20])
@pytest.mark.parametrize("version", [2, KUIPER])
def test_codes_stand_for_the_weights(tmp_path, monkeypatch, version, at_once):
    monkeypatch.setattr("llamaspec.model.checkpoints.llama2c.read.AT_ONCE", at_once)
    path = llama2c_files.write(tmp_path / "model.bin", version, tied=False)
    quantized = 0
    for name, tensor in open_checkpoint(path).tensors.items():
        if tensor.codes is None:
            assert not is_matrix(name)
            continue
        np.testing.assert_array_equal(dequantized(tensor.codes, tensor.shape), tensor.read())
        np.testing.assert_array_equal(np.concatenate(list(exact_parts(tensor))).astype(np.float32), tensor.read())
        quantized += 1
    assert quantized == 7 * Sizes().layers + 1 + (version == 2)  # KuiperLLama does not quantize the embedding


def test_groups_that_span_rows_are_read_as_floats(tmp_path):
    """A matrix is decoded to floats if its quantization groups span several rows.

    export.py writes such groups for stories260K, because its hidden dimension is not a multiple of 64.
    """
    sizes = Sizes(ffn=24)
    path = llama2c_files.write(tmp_path / "model.bin", 2, sizes=sizes, group=16)
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["model.layers.0.mlp.down_proj.weight"].codes is None
    assert checkpoint.tensors["model.layers.0.mlp.up_proj.weight"].codes is not None
    assert_holds(checkpoint, llama2c_files.expected_tensors(2, sizes, tied=True, group=16))


@pytest.mark.parametrize("tied", [True, False])
def test_int8_is_written_as_export_writes_it(tmp_path, tied):
    source = open_checkpoint(llama2c_files.write(tmp_path / "source.bin", 0, tied=tied))
    write_llama2c(source, tmp_path / "ours.bin", int8=True)
    expected = llama2c_files.file_bytes(2, tied=tied, group=8)  # the largest group that divides 16 and 24
    assert (tmp_path / "ours.bin").read_bytes() == expected
    load(tmp_path / "ours.bin")


def test_progress_adds_up(tmp_path):
    source = open_checkpoint(llama2c_files.write(tmp_path / "source.bin", 0))
    sizes: list[int] = []
    write_llama2c(source, tmp_path / "ours.bin", int8=True, progress=lambda name, size: sizes.append(size))
    assert sum(sizes) == (tmp_path / "ours.bin").stat().st_size - 256
