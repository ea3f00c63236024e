"""libggml and llama.cpp agree with the reference, on weights and files that have no goldens.

LLAMASPEC_OTHER_PYTHON lists Pythons; libggml runs in the first one that has llama_cpp and gguf.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec import SamplingOptions, load
from llamaspec.model.checkpoints import open_checkpoint
from llamaspec.model.checkpoints.gguf.imatrix import ImportanceMatrix
from llamaspec.model.checkpoints.gguf.mixtures import MIXTURES
from llamaspec.model.checkpoints.gguf.write import of_tensors, write_gguf
from llamaspec.model.convert import convert
from llamaspec.model.llama import load_backend
from llamaspec.model.options import RunOptions
from llamaspec.model.quantize.calibration import importances
from llamaspec.reference.quantizers import ggml
from llamaspec.reference.quantizers.ggml import READABLE, TYPES
from llamaspec.reference.quantizers.ggml_activations import ROUNDING_OF, ROUNDINGS
from llamaspec.reference.rope import LongRopeScaling
from llamaspec.verify.bounds import running_error
from tests.goldens import make_eval_gguf, make_gguf
from tests.goldens.make_gguf_stories import COUNT, prompts, write_story
from tests.goldens.quantizers.make_ggml import TYPES as EXACT
from tests.goldens.quantizers.make_ggml import UNDEFINED, importance, random_blocks
from tests.goldens.quantizers.make_ggml_lattices import BYTES
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.model.checkpoints.gguf.libggml import Libggml, libggml
from tests.model.checkpoints.gguf.test_gguf_goldens import distance
from tests.model.checkpoints.gguf.test_gguf_writing import raw_tensors
from tests.support import gguf_files
from tests.support.random_models import SMALL, random_checkpoint
from tests.support.strategies import assert_within
from tests.verify.test_verify_others import python_with

QUANTIZED = [*make_eval_gguf.TYPES["random"], *make_eval_gguf.SUPERBLOCKS]
FROM_ZERO = {"TQ1_0": 1, "TQ2_0": 1, "Q3_K": 4, "Q6_K": 32}  # offset that is subtracted from a stored code in products

weights = st.builds(Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-40, 20))


@pytest.fixture(scope="module")
def live() -> Iterator[Libggml]:
    python = python_with("gguf", "llama_cpp")
    if not python:
        pytest.skip("needs a Python with llama_cpp and gguf: set LLAMASPEC_OTHER_PYTHON")
    with libggml(python) as process:
        yield process


@given(
    name=st.sampled_from(EXACT),
    weights=weights,
    rows=st.integers(1, 2),
    blocks=st.integers(1, 3),
    seed=st.none() | st.integers(0, 2**32 - 1),
)
def test_bytes_are_those_of_ggml(live, name, weights, rows, blocks, seed):
    """Our encoder writes the same bytes as ggml, with and without importances of the columns.

    It refuses a scale beyond float16, which ggml stores as infinity.
    """
    if (name, weights.kind) in UNDEFINED:
        return
    w = weights(rows, 256 * blocks)
    c = None if seed is None else importance(256 * blocks, seed=seed)
    expected = live.quantize(w, name, c)
    try:
        actual = ggml.encode(w, name, c)
    except ValueError as error:
        assert "the largest float16 is 65504" in str(error)
        with np.errstate(invalid="ignore"):
            assert not np.isfinite(ggml.decode(expected, name)).all()
        return
    np.testing.assert_array_equal(actual, expected)


@given(name=st.sampled_from([*EXACT, *BYTES]), seed=st.integers(0, 2**32 - 1))
def test_weights_are_those_of_ggml(live, name, seed):
    """The weights that ggml decodes equal the exact weights, rounded once to float32."""
    kind = READABLE[name]
    blocks = random_blocks(name, kind.bytes, 256 // kind.weights, seed=seed)
    exact = ggml.decode(blocks.reshape(1, -1), name)[0]
    with np.errstate(over="ignore"):  # MXFP4's powers of two exceed float32
        np.testing.assert_array_equal(live.dequantize(blocks, name), exact.astype(np.float32))


MIXED = {"llama": replace(SMALL, dim=256, ffn=512, heads=4, kv_heads=1, head_dim=64, layers=2, vocab=64)}
MIXED["tied, rows of other lengths"] = replace(MIXED["llama"], dim=160, ffn=72, tied=True)
MIXED["experts"] = replace(MIXED["llama"], ffn=256, experts=8, experts_per_token=2, layers=1)
MIXED["fused"] = replace(MIXED["llama"], scaling=LongRopeScaling((1.0,) * 32, (2.0,) * 32, 16, 1.0, False))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("to", MIXTURES)
@pytest.mark.parametrize("name", MIXED)
def test_mixtures_are_the_files_of_llama_cpp(live, tmp_path, name, to, weighted):
    """A model that we write in a mixture has the bytes that llama.cpp writes if it quantizes our float32 file."""
    checkpoint, single, actual, expected = random_checkpoint(MIXED[name], seed=0), *map(tmp_path.joinpath, "abc")
    write_gguf(checkpoint, single, to="float32")
    columns: dict[str, np.ndarray] = {}
    if weighted:
        shapes = {name: shape for name, (shape, _, _) in raw_tensors(single).items() if len(shape) > 1}
        sizes = {name: (shape[0] if len(shape) == 3 else 1, shape[-1]) for name, shape in shapes.items()}
        sizes.pop("output.weight", None)
        columns = {name: importance(int(np.prod(size)), seed=1) for name, size in sizes.items()}
    write_gguf(checkpoint, actual, to=to, importances=ImportanceMatrix("x", columns) if weighted else None)
    live.mix_file(single, expected, MIXTURES[to].file_type, columns)
    assert raw_tensors(actual) == raw_tensors(expected)


def test_calibration_sees_the_inputs_of_llama_cpp(live, tmp_path):
    """The importances of a text are the mean squares of the vectors that llama.cpp multiplies by each matrix."""
    checkpoint, ids = random_checkpoint(MIXED["llama"], seed=0), [1, 17, 42, 63, 5, 5, 30, 21]
    path = tmp_path / "x.gguf"
    write_gguf(checkpoint, path, to="float32", vocabulary={"tokenizer.ggml.model": "none"})
    actual = of_tensors(checkpoint, importances(checkpoint, np.array([ids], np.int32)))
    for name, (x, _) in live.products(path, ids).items():
        if name != "output":
            np.testing.assert_allclose(actual[f"{name}.weight"], np.mean(x**2, axis=0), rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("form", ["float32", "q8_0"])
def test_the_built_in_model_computes_the_same_in_llama_cpp(live, tmp_path, form):
    """Our logits differ from llama.cpp's by a relative error below 1e-5.

    If activations are rounded (q8_0), only the first position is compared, because rounding ties change the later ones.
    """
    path, ids = tmp_path / "stories.gguf", [1, *range(300, 324)]
    quantize, dtype, emulate = (None, form, None) if form == "float32" else (form, None, "ggml")
    convert(open_checkpoint("stories"), path, to="gguf", quantize=quantize, dtype=dtype)
    own_logits = load_backend(
        open_checkpoint(path), RunOptions(backend="reference", emulate_activations=emulate)
    ).logits(ids)
    distances = [distance(a, b) for a, b in zip(own_logits, live.logits(path, ids), strict=True)]
    assert max(distances if form == "float32" else distances[:1]) < 1e-5


@pytest.mark.parametrize("type", make_gguf.WRITTEN)
def test_a_file_of_ours_tells_the_same_story_in_llama_cpp(live, tmp_path, type):
    """llama.cpp generates our greedy story from our GGUF file of each type; rounding cannot change these stories."""
    write_story(path := tmp_path / "stories.gguf", type)
    llama, greedy = load(path, backend="reference"), SamplingOptions(temperature=0.0)
    for prompt in prompts():
        tokens = llama.generate(prompt, sampling=greedy, max_new_tokens=COUNT)
        assert [token.id for token in tokens] == live.greedy(path, prompt, COUNT)[-COUNT:]


@pytest.mark.parametrize("type", QUANTIZED)
def test_every_product_is_that_of_llama_cpp(live, tmp_path, type):
    """Our matrix products of llama.cpp's own inputs equal llama.cpp's products within float32's roundoff.

    No input is at a rounding tie. The bound counts one rounding for each column in a sum, and a few for the scales.
    """
    make_eval_gguf.model("random").write(tmp_path / "float32.gguf")
    live.quantize_file(tmp_path / "float32.gguf", path := tmp_path / "x.gguf", type)
    rounding = ROUNDINGS[ROUNDING_OF[type]]
    stored, compared = raw_tensors(path), 0
    for name, (x, product) in live.products(path, make_eval_gguf.IDS).items():
        (rows, cols), kind, raw = stored[f"{name}.weight"]
        assert kind == type
        numbers, w = rounding(x), weights_of(raw, type, rows=rows)
        rounded, sums = numbers[:, :cols], numbers[:, cols:]
        shift = shifts_of(raw, type, rows=rows)
        exact = rounded @ w.T - (sums @ shift[:, ::32].T if sums.size else 0)
        bound = running_error.gamma(cols + 8) * np.abs(rounded) @ (np.abs(w + shift) + np.abs(shift)).T
        assert_within(product.astype(np.float64), exact, bound)
        compared += product.size
    assert compared == len(make_eval_gguf.IDS) * (2 * (256 * 3 + 128 * 2 + 512 * 2) + 64)


def weights_of(raw: bytes, type: str, *, rows: int) -> np.ndarray:
    if type in gguf_files.DTYPES:
        return np.frombuffer(raw, gguf_files.DTYPES[type]).astype(np.float64).reshape(rows, -1)
    return ggml.decode(np.frombuffer(raw, np.uint8).reshape(rows, -1), type)


def shifts_of(raw: bytes, type: str, *, rows: int) -> np.ndarray:
    """Return scale * code - weight for each weight, for types with unsigned codes. For other types, return 0."""
    if type not in TYPES:
        return np.zeros(())
    q = TYPES[type].unpack(np.frombuffer(raw, np.uint8).reshape(rows, -1, TYPES[type].bytes))
    if type in FROM_ZERO:
        return TYPES[type].dequantize(q._replace(codes=np.full_like(q.codes, FROM_ZERO[type])))
    if "minima" not in q._fields:
        return np.zeros(())
    return TYPES[type].dequantize(q._replace(minima=np.zeros_like(q.minima))) - TYPES[type].dequantize(q)
