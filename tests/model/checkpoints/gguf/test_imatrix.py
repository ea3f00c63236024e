"""Importance matrices of llama.cpp: both formats are read, and improve mixtures; wrong files are refused."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamaspec.model.checkpoints import CheckpointError, open_checkpoint
from llamaspec.model.checkpoints.gguf.file import read_header
from llamaspec.model.checkpoints.gguf.imatrix import ImportanceMatrix, read_imatrix
from llamaspec.model.checkpoints.gguf.write import of_tensors, write_gguf
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.ops.emulated import RoundingArray
from llamaspec.model.quantize.calibration import importances
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.reference.llama import FeedForward, Linear, empty_cache, forward
from llamaspec.reference.quantizers import ggml
from tests.commands.test_cli import assert_refused
from tests.model.checkpoints.gguf.test_gguf_writing import raw_tensors
from tests.support.gguf_files import CODES, STRING, File, Tensor
from tests.support.random_models import SMALL, random_checkpoint
from tests.support.refusals import mentions

UP, DOWN = "blk.0.ffn_up.weight", "blk.0.ffn_down_exps.weight"
SUMS = {UP: np.arange(1, 9, dtype="<f4"), DOWN: np.arange(12, dtype="<f4").reshape(3, 4)}
COUNTS = {UP: np.array([4], "<f4"), DOWN: np.array([2, 0, 1], "<f4")}
EXPECTED = {UP: SUMS[UP] / 4, DOWN: np.array([0, 0.5, 1, 1.5, 1, 1, 1, 1, 8, 9, 10, 11], np.float32)}


def in_gguf(path: Path, sums: dict[str, np.ndarray], counts: dict[str, np.ndarray]) -> str:
    tensors: dict[str | bytes, Tensor] = {}
    for name in sums:
        tensors[f"{name}.in_sum2"] = Tensor(sums[name].shape, sums[name].tobytes(), CODES["F32"])
        tensors[f"{name}.counts"] = Tensor((counts[name].size, 1), counts[name].tobytes(), CODES["F32"])
    return str(File({"general.type": (STRING, "imatrix")}, tensors).write(path))


def dat(entries: dict[str, tuple[int, np.ndarray]]) -> bytes:
    """Return the older format of importance matrices, which ends with the number of chunks and the text's name."""
    parts = [struct.pack("<i", len(entries))]
    for name, (calls, values) in entries.items():
        parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", calls, values.size)]
        parts.append(values.astype("<f4").tobytes())
    return b"".join(parts) + struct.pack("<ii", 2, 5) + b"x.txt"


def test_both_formats_are_read(tmp_path):
    read = read_imatrix(in_gguf(tmp_path / "x.gguf", SUMS, COUNTS))
    assert read.values.keys() == EXPECTED.keys()
    for name, values in EXPECTED.items():
        np.testing.assert_array_equal(read.values[name], values)
    path = tmp_path / "x.dat"
    path.write_bytes(dat({UP: (3, np.array([3.0, 1.0])), DOWN: (0, np.array([5.0]))}))
    old = read_imatrix(str(path)).values
    np.testing.assert_array_equal(old[UP], np.array([1, np.float32(1) / np.float32(3)], np.float32))
    np.testing.assert_array_equal(old[DOWN], np.array([5], np.float32))
    assert read.of_shapes({DOWN: (3, 7, 4)})[DOWN].shape == (3, 4)


GOOD = dat({UP: (3, np.array([3.0, 1.0]))})


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"hello, this is a text", "is not an importance matrix"),
        (File({"general.type": (STRING, "model")}, {}).bytes(), "its general.type is not"),
        (GOOD[:40], "truncated: the file has 40 bytes, but entry 'blk.0.ffn_up.weight' ends at byte 43"),
        (
            struct.pack("<i", 2) + GOOD[4:-13] + struct.pack("<i", -5),
            "the name of entry 1 has -5 bytes, outside 1 to 1000",
        ),
        (struct.pack("<ii", 1, 19) + UP.encode() + struct.pack("<ii", 1, 2**31 - 1), "truncated"),
        (struct.pack("<ii", 1, 19) + UP.encode() + struct.pack("<ii", 1, -1), "truncated"),
        (
            dat({UP: (1, np.array([1.0, np.nan]))}),
            "finite and not negative, but 'blk.0.ffn_up.weight' has some that are not",
        ),
        (dat({UP: (1, np.array([1.0, -1.0]))}), "finite and not negative"),
        (
            File({"general.type": (STRING, "imatrix")}, {f"{UP}.in_sum2": Tensor((4,), bytes(16), 0)}).bytes(),
            "'blk.0.ffn_up.weight' needs the tensors in_sum2 and counts in F32",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, content, what):
    path = tmp_path / "x.dat"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        read_imatrix(str(path))
    assert what in str(error.value) and "\n" not in str(error.value)


def test_sums_that_matrices_cannot_share_are_refused(tmp_path):
    path = in_gguf(tmp_path / "x.gguf", {UP: np.ones(8, "<f4")}, {UP: np.ones(3, "<f4")})
    with pytest.raises(CheckpointError, match="has 8 sums, expected a multiple of 3"):
        read_imatrix(path)


MIXED = replace(SMALL, dim=256, ffn=256, layers=2, heads=4, kv_heads=2, head_dim=64, vocab=32)


def test_experts_have_their_own_importances(tmp_path):
    config = replace(MIXED, layers=1, experts=4, experts_per_token=2)
    checkpoint, name = random_checkpoint(config, seed=0), "blk.0.ffn_up_exps.weight"
    values = np.random.RandomState(0).uniform(size=(4, 256)).astype(np.float32)
    matrix = ImportanceMatrix("x.gguf", {name: values.reshape(-1)})
    written = write_gguf(checkpoint, tmp_path / "x.gguf", to="q3_k_m", importances=matrix)
    assert name not in written.unweighted and "blk.0.attn_q.weight" in written.unweighted
    _, kind, data = raw_tensors(tmp_path / "x.gguf")[name]
    experts = [checkpoint.tensors[f"model.layers.0.block_sparse_moe.experts.{e}.w3.weight"].read() for e in range(4)]
    assert data == b"".join(ggml.encode(w, kind, c).tobytes() for w, c in zip(experts, values, strict=True))
    metadata = read_header(MappedFile(tmp_path / "x.gguf")).metadata
    assert metadata.string("quantize.imatrix.file") == "x.gguf"
    assert metadata.integer("quantize.imatrix.entries_count") == 1


@pytest.fixture(scope="module")
def story_imatrix(tmp_path_factory) -> tuple[str, dict[str, np.ndarray]]:
    """Return an importance matrix for one matrix of the built-in model, and its values."""
    cols = open_checkpoint("stories").tensors["model.layers.0.mlp.up_proj.weight"].shape[1]
    values = {UP: np.random.RandomState(0).uniform(size=cols).astype("<f4")}
    return in_gguf(tmp_path_factory.mktemp("imatrix") / "i.gguf", values, {UP: np.ones(1, "<f4")}), values


def test_a_file_of_importances_on_the_command_line(run, tmp_path, story_imatrix):
    path, values = story_imatrix
    command = ["convert", "stories", str(tmp_path / "x.gguf"), "--to", "gguf", "--quantize", "q2_k", "--imatrix", path]
    code, _, err = run(*command)
    assert code == 0 and mentions(err, "has no importances for 69 of the quantized matrices blk.0.attn_q.weight"), err
    _, kind, data = raw_tensors(tmp_path / "x.gguf")[UP]
    w = open_checkpoint("stories").tensors["model.layers.0.mlp.up_proj.weight"].read()
    assert data == ggml.encode(w, kind, values[UP]).tobytes() != ggml.encode(w, kind).tobytes()


@pytest.mark.parametrize(
    ("name", "size", "what"),
    [
        (UP, 8, "i.dat: blk.0.ffn_up.weight has 8 importances, expected"),
        ("blk.0.mlp.weight", 8, "has importances for none of the model's matrices, but for tensors such as 'blk.0.mlp"),
    ],
)
def test_importances_of_another_model_are_refused(run, tmp_path, name, size, what):
    path = tmp_path / "i.dat"
    path.write_bytes(dat({name: (1, np.ones(size))}))
    command = ["convert", "stories", str(tmp_path / "x.gguf"), "--to", "gguf", "--quantize", "q2_k"]
    assert_refused(run(*command, "--imatrix", str(path)), what)
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--to", "gguf", "--quantize", "q8_0", "--imatrix", "x"], "--imatrix works only with --quantize q2_k,"),
        (["--to", "gguf", "--imatrix", "x"], "--imatrix works only with --quantize q2_k,"),
        (
            ["--to", "gguf", "--quantize", "q6_k", "--imatrix", "x", "--calibration", "y"],
            "--imatrix and --calibration exclude each other",
        ),
        (["--to", "gguf", "--quantize", "q8_0", "--calibration", "y"], "--calibration works only with --quantize awq,"),
    ],
)
def test_options_that_exclude_each_other(run, tmp_path, options, what):
    assert_refused(run("convert", "stories", str(tmp_path / "x"), *options), what, status=2)


def test_calibration_measures_mean_squares():
    """`importances` are the mean squares of the vectors that the reference multiplies by each matrix."""
    checkpoint = random_checkpoint(replace(SMALL, kv_heads=2), seed=0)
    params, seen = load_reference_params(checkpoint), {}

    def observed(name: str, linear: Linear | None) -> Linear:
        assert linear
        matrix = np.asarray(linear.weight).view(RoundingArray)
        matrix.rounding = lambda x: seen.setdefault(name, []).append(np.asarray(x)) or x
        return linear._replace(weight=matrix)

    layers = []
    for i, layer in enumerate(params.layers):
        ffn = layer.ffn
        assert isinstance(ffn, FeedForward)
        parts = {part: observed(f"{i}.self_attn.{part}_proj", getattr(layer, part)) for part in "qkvo"}
        names = {part: observed(f"{i}.mlp.{part}_proj", getattr(ffn, part)) for part in ("gate", "up", "down")}
        layers.append(layer._replace(**parts, ffn=ffn._replace(**names)))
    windows = np.array([[1, 5, 7, 2], [1, 9, 3, 3]], np.int32)
    for ids in windows:
        forward(params._replace(layers=layers), ids, empty_cache(checkpoint.config), config=checkpoint.config)
    expected = {name: np.mean(np.concatenate(parts) ** 2, axis=0) for name, parts in seen.items()}
    actual = importances(checkpoint, windows)
    assert {f"model.layers.{name}.weight" for name in expected} == actual.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[f"model.layers.{name}.weight"], values, rtol=1e-4)


def test_joined_and_stacked_matrices_share_their_importances():
    config = replace(SMALL, experts=3, experts_per_token=1)
    checkpoint = random_checkpoint(config, seed=0)
    values = of_tensors(checkpoint, importances(checkpoint, np.array([[1, 2, 3]], np.int32)))
    assert values["blk.0.ffn_down_exps.weight"].shape == (3 * config.ffn,)
    assert values["blk.1.attn_output.weight"].shape == (config.heads * config.head_dim,)
    assert not {"output.weight", "blk.0.ffn_gate_inp.weight"} & values.keys()


def test_calibration_on_the_command_line(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a little girl. She liked to play with her red ball. " * 30)
    command = ["convert", "stories", str(tmp_path / "x.gguf"), "--to", "gguf", "--quantize", "q4_k_m"]
    code, _, err = run(*command, "--calibration", str(text))
    assert code == 0 and "no importances" not in err, err
    w = open_checkpoint("stories").tensors["model.layers.0.mlp.up_proj.weight"].read()
    _, kind, data = raw_tensors(tmp_path / "x.gguf")[UP]
    assert data != ggml.encode(w, kind).tobytes()
