"""GGUF files from llama.cpp's own quantizer, all matrices of one type (goldens/eval_gguf.json).

Our quantizer writes the same bytes. The logits of JAX agree with the reference's. If we round activations as
llama.cpp does, our logits also agree with llama.cpp's.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from llamaspec.model.checkpoints import Checkpoint, open_checkpoint
from llamaspec.model.llama import load_backend
from llamaspec.model.options import RunOptions
from llamaspec.model.running.programs import Programs
from llamaspec.model.weights.loading import abstract_params
from tests.goldens import make_eval_gguf
from tests.goldens.make_eval_gguf import IDS, MULTIPLIED, STORED_LOGITS, stored_logits
from tests.model.checkpoints.gguf.test_gguf_goldens import distance
from tests.support.goldens import read_golden

GOLDENS = read_golden("eval_gguf")
FILES = [(model, type) for model, types in make_eval_gguf.TYPES.items() for type in types]

# These positions differ, because a number is within float32's noise of a tie (see test_eval_emulation.py); they differ
# by at most one step. float16 has ties every 2^-11, so all of its positions do.
APART = {
    ("random", "F16"): (range(len(IDS)), 2.0**-11), ("random", "BF16"): ([5], 2.0**-8),
    ("random", "Q4_1"): ([4], 2.0**-6), ("random", "Q5_1"): ([7], 2.0**-6),
}  # fmt: skip

FileMaker = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def model_file(request, tmp_path_factory) -> FileMaker:
    """Return a function that writes the GGUF file of a model in a type, with the bytes that llama.cpp wrote.

    A second call for the same model and type returns the same file.
    """
    folder = tmp_path_factory.mktemp("gguf")

    def path(model: str, type: str) -> Path:
        if not (file := folder / f"{model}-{type}.gguf").exists():
            data = request.getfixturevalue("data") if model == "stories260K" else None
            quantized, digest = make_eval_gguf.quantized(make_eval_gguf.model(model, data), type)
            assert digest == GOLDENS["models"][model][type]["sha256"]
            quantized.write(file)
        return file

    return path


def llama_cpp_logits(model: str, type: str) -> np.ndarray:
    raw = base64.b64decode(GOLDENS["models"][model][type]["logits"])
    return np.frombuffer(raw, "<f4").reshape(len(IDS), STORED_LOGITS).astype(np.float64)


def test_every_type_that_is_read_is_there():
    from llamaspec.reference.quantizers.ggml import TYPES

    assert {type for _, type in FILES} == {*TYPES, "F16", "BF16"}


@pytest.mark.sampled(6)  # 23 cases, 6 s
@pytest.mark.parametrize(("model", "type"), FILES)
def test_logits_are_those_of_llama_cpp(model_file, model, type):
    """Our logits differ from llama.cpp's by a relative error below 1e-5, if we round activations as llama.cpp does.

    At the positions in `APART`, an activation is near a rounding tie, so llama.cpp may round it to the other side.
    There the error may be as large as `APART` states. Without rounded activations the error is about 0.01, except for
    float types.
    """
    rows = load_backend(
        open_checkpoint(model_file(model, type)), RunOptions(backend="reference", emulate_activations="ggml")
    ).logits(IDS)
    distances = [distance(a, b) for a, b in zip(stored_logits(rows), llama_cpp_logits(model, type), strict=True)]
    apart, most = APART.get((model, type), ((), 0.0))
    assert all(distance_at < (most if i in apart else 1e-5) for i, distance_at in enumerate(distances)), distances


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Return a dict of compiled JAX backends, by the shapes of their arrays."""
    return {}


def unused(*arguments: Any) -> Any:
    raise AssertionError("logits are of another program")


def in_jax(checkpoint: Checkpoint, compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Compute logits in JAX. Files with arrays of the same shapes share one compiled program."""
    arrays = abstract_params(checkpoint.config, dtype=np.dtype(np.float32), positions=1, tensors=checkpoint.tensors)
    if (shapes := repr(jax.tree.flatten(arrays))) in compiled:
        return compiled[shapes].with_weights(checkpoint).logits(IDS)
    monkeypatch.setattr(
        "llamaspec.model.running.load.compile_programs", lambda *arguments, **options: Programs(unused, unused, unused)
    )
    compiled[shapes] = load_backend(checkpoint, RunOptions(context=16, dtype="float32"))
    return compiled[shapes].logits(IDS)


@pytest.mark.sampled(1)  # 4 s each
@pytest.mark.parametrize(("model", "type"), FILES)
def test_jax_computes_what_the_reference_does(model_file, compiled, monkeypatch, model, type):
    """JAX and the reference compute the same logits at every position, in float32 with the decoded weights."""
    checkpoint = open_checkpoint(model_file(model, type))
    expected = load_backend(checkpoint, RunOptions(backend="reference")).logits(IDS)
    actual = in_jax(checkpoint, compiled, monkeypatch).astype(np.float64)
    assert max(distance(a, b) for a, b in zip(actual, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("type", MULTIPLIED)
@pytest.mark.parametrize("model", ["random", "stories260K"])
def test_the_command_line_has_the_logits_of_llama_cpp(run, model_file, tmp_path, model, type):
    ids, out = ",".join(map(str, IDS)), str(tmp_path / "x.npy")
    arguments = ["--model", str(model_file(model, type)), "--tokens", ids, "--out", out, "--backend", "reference"]
    assert run("logits", *arguments, "--emulate-activations", "q8_0")[0] == 0
    emulated = stored_logits(np.load(out))
    assert run("logits", *arguments)[0] == 0
    plain = stored_logits(np.load(out))
    for position, expected in enumerate(llama_cpp_logits(model, type)):
        assert distance(emulated[position], expected) < 1e-5 < 1e-4 < distance(plain[position], expected)


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize("type", MULTIPLIED)
def test_the_command_line_evaluates_as_llama_cpp_predicts(run, tmp_path, type):
    """`eval` reports llama.cpp's perplexity and divergence if activations are rounded as in llama.cpp.

    The divergence is from the float32 model. Without this rounding, both numbers differ.
    """
    golden, text = GOLDENS["text"], tmp_path / "text"
    expected = golden["types"][type]
    text.write_text(golden["text"])
    source = make_eval_gguf.reader()
    quantized, digest = make_eval_gguf.quantized(source, type)
    assert digest == expected["sha256"]
    paths = str(quantized.write(tmp_path / "a.gguf")), str(source.write(tmp_path / "b.gguf"))
    arguments = ["eval", paths[0], "--against", paths[1], "--text", str(text), "--backend", "reference", "--json"]
    code, out, _ = run(*arguments, "--emulate-activations", "q8_0")
    assert code == 0
    emulated, plain = json.loads(out), json.loads(run(*arguments)[1])
    assert emulated["tokens"] == len(golden["ids"]) - 1
    assert emulated["base"]["loss"] == plain["base"]["loss"] == pytest.approx(golden["loss"], rel=1e-5)
    for report, equal in ((emulated, True), (plain, False)):
        mean, most = np.mean(expected["divergences"]), max(expected["divergences"])
        assert (report["loss"] == pytest.approx(expected["loss"], rel=1e-5)) == equal
        assert (report["perplexity"] == pytest.approx(np.exp(expected["loss"]), rel=1e-4)) == equal
        assert (report["divergence"]["mean"] == pytest.approx(mean, rel=1e-5)) == equal
        assert (report["divergence"]["most"] == pytest.approx(most, rel=1e-5)) == equal
