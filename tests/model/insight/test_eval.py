"""Perplexity and divergence, compared with sums by hand, mathematical laws, and transformers (goldens/eval.json)."""

import itertools
import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints import CheckpointError, open_checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.insight.evaluation import EvalText, choose_stride, compare, evaluate, recorded, text_for, windows
from llamaspec.model.insight.evaluation_by_tensor import check_alike, compare_by_tensor, decoded
from llamaspec.model.insight.evaluation_report import as_json, as_text
from llamaspec.model.llama import load_backend
from llamaspec.model.options import RunOptions
from llamaspec.model.running.jax_backend import JaxBackend
from llamaspec.model.running.reference_backend import ReferenceBackend
from llamaspec.model.text import read_text
from llamaspec.model.tokenizers.load import load_tokenizer
from tests.commands.test_cli import assert_refused
from tests.support import tiny_tokenizers
from tests.support.goldens import read_golden
from tests.support.random_models import CONFIGS, SMALL, random_checkpoint
from tests.support.strategies import roundoff, seeds

GOLDEN = read_golden("eval")


class Bigrams:
    """A model that looks up the next token's logits by the last token."""

    def __init__(self, logits: np.ndarray, *, part: int = 3):
        self.table, self.part = logits, part

    def logits_in_parts(self, ids, *, after=0):
        for start in range(after, len(ids), self.part):
            yield self.table[list(ids[start : start + self.part])]

    def with_weights(self, checkpoint, *, read_from=None):
        raise NotImplementedError


@given(tokens=st.integers(2, 60), context=st.integers(2, 20), data=st.data())
def test_windows_score_every_token_but_the_first_once(tokens, context, data):
    stride = data.draw(st.integers(1, context - 1))
    cut = list(windows(tokens, context=context, stride=stride))
    assert [t for w in cut for t in range(w.scored, w.end)] == list(range(1, tokens))
    for before, window in itertools.pairwise(cut):
        assert window.begin == before.begin + stride
        assert window.scored - window.begin >= context - stride
    assert all(w.end - w.begin <= context and w.scored > w.begin for w in cut)


@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(2, 40), context=st.integers(2, 12), data=st.data())
def test_windows_do_not_matter_if_only_the_last_token_counts(seed, tokens, context, data):
    """Loss and divergence do not depend on the windows if logits depend only on the last token.

    The test computes both from a table of logits, as sums over the pairs of neighboring tokens.
    """
    stride = data.draw(st.integers(1, context - 1))
    rng = np.random.default_rng(seed)
    p, q = (rng.normal(size=(7, 7)) for _ in range(2))
    ids = rng.integers(0, 7, tokens).tolist()
    text = EvalText(ids, bytes=2 * tokens)
    result = compare(Bigrams(q), Bigrams(p), text, context=context, stride=stride)

    def probabilities(logits):
        return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)

    pairs = list(itertools.pairwise(ids))
    for evaluation, table in ((result.model, q), (result.base, p)):
        bits = -sum(math.log2(probabilities(table)[a, b]) for a, b in pairs)
        assert evaluation.loss == pytest.approx(bits * math.log(2) / len(pairs))
        assert evaluation.perplexity == pytest.approx(2 ** (bits / len(pairs)))
        assert evaluation.bits_per_byte == pytest.approx(bits / (2 * tokens))
    a, b = probabilities(p)[ids[:-1]], probabilities(q)[ids[:-1]]
    divergences = (a * np.log(a / b)).sum(axis=-1)
    assert result.divergence.mean == pytest.approx(divergences.mean())
    assert result.divergence.median == pytest.approx(np.median(divergences))
    assert result.divergence.p99 == pytest.approx(np.quantile(divergences, 0.99))
    assert result.divergence.most == pytest.approx(divergences.max())
    assert result.divergence.same_top == np.mean(a.argmax(axis=-1) == b.argmax(axis=-1))


class Counting:
    """A model with logits that depend only on the position."""

    def __init__(self, logits: np.ndarray):
        self.table = logits

    def logits_in_parts(self, ids, *, after=0):
        yield self.table[after : len(ids)]

    def with_weights(self, checkpoint, *, read_from=None):
        raise NotImplementedError


@given(seed=seeds, tokens=st.integers(2, 40), context=st.integers(2, 12), data=st.data())
def test_a_token_is_predicted_from_all_before_it_in_its_window(seed, tokens, context, data):
    stride = data.draw(st.integers(1, context - 1))
    rng = np.random.default_rng(seed)
    model, ids = Counting(rng.normal(size=(context, 7))), rng.integers(0, 7, tokens).tolist()
    log_p = model.table - np.log(np.exp(model.table).sum(axis=-1, keepdims=True))
    read = [t - w.begin for w in windows(tokens, context=context, stride=stride) for t in range(w.scored, w.end)]
    losses = [-log_p[count - 1, id] for count, id in zip(read, ids[1:], strict=True)]
    result = evaluate(model, EvalText(ids, tokens), context=context, stride=stride)
    assert result.loss == pytest.approx(np.mean(losses))
    assert result.tokens == tokens - 1


def test_a_model_is_no_distance_from_itself():
    model = Bigrams(np.random.default_rng(0).normal(size=(5, 5)))
    result = compare(model, model, EvalText([0, 1, 2, 3, 4], 5), context=4)
    assert result.model == result.base
    assert result.divergence == (0, 0, 0, 0, 1)


def test_a_constant_added_to_all_logits_does_not_matter():
    rng = np.random.default_rng(0)
    table, text = rng.normal(size=(5, 5)), EvalText([0, 1, 2, 3, 4], 5)
    moved = table + 1e4 * rng.normal(size=(5, 1))
    comparison = compare(Bigrams(moved), Bigrams(table), text, context=4)
    # Each moved logit is rounded, and so is its difference to the largest.
    bound = 2 * roundoff(np.float64) * np.abs(moved).max()
    assert abs(comparison.model.loss - comparison.base.loss) <= 2 * bound
    assert comparison.divergence.most <= 2 * bound


def test_weights_that_overflow_are_reported():
    with pytest.raises(FloatingPointError, match="overflow"):
        evaluate(Bigrams(np.full((3, 3), np.inf)), EvalText([0, 1, 2], 3), context=3)


def loss_bound(golden: dict) -> float:
    """Return twice the largest error that a logit may have. This error is 1e-5 times the largest logit.

    See tests/model/test_model_against_reference.py.
    """
    return 2e-5 * golden["largest_logit"]


@pytest.mark.parametrize("backend", [pytest.param("jax", marks=pytest.mark.slow), "reference"])
def test_perplexity_and_divergence_are_those_of_transformers(run, data, tmp_path, backend):
    """Loss and divergence of a q4 model equal transformers' values within a bound.

    The divergence is the expected log p - log q of a token drawn from p. Here p and q are the probabilities of the
    unquantized and of the q4 model. If no logit is off by more than d, log p - log q is off by at most 4 d, and p by at
    most a factor of exp(2 d).
    """
    folder, text = data / "stories260K", tmp_path / "text"
    text.write_text(GOLDEN["text"])
    model = str(folder / "stories260K.bin")
    request = ["--text", str(text), "--tokenizer", str(folder / "tok512.model"), "--backend", backend, "--json"]
    code, out, err = run("eval", model, "--quantize", "q4", "--against", model, *request)
    assert code == 0, err
    report = json.loads(out)
    assert report["tokens"] == len(GOLDEN["ids"]) - 1
    assert report["bytes"] == len(GOLDEN["text"].encode())
    assert (report["context"], report["stride"]) == (512, 256)
    bound = loss_bound(GOLDEN)
    assert abs(report["base"]["loss"] - GOLDEN["losses"][0]["model"]) <= bound
    assert abs(report["loss"] - GOLDEN["losses"][0]["q4"]) <= bound
    expected, actual = GOLDEN["divergence"], report["divergence"]
    for name in ("mean", "median", "p99", "most"):
        assert abs(actual[name] - expected[name]) <= 2 * bound + math.expm1(bound) * (expected["most"] + 2 / math.e)
    assert actual["same_top"] == pytest.approx(expected["same_top"])


def test_windows_are_those_of_transformers(data):
    checkpoint = open_checkpoint(data / "stories260K" / "stories260K.bin")
    model, text = (
        load_backend(checkpoint, RunOptions(backend="reference")),
        EvalText(GOLDEN["ids"], len(GOLDEN["text"])),
    )
    for golden in GOLDEN["losses"]:
        if golden["stride"] > 1:  # stride 1 has hundreds of windows
            result = evaluate(model, text, context=golden["context"], stride=golden["stride"])
            assert abs(result.loss - golden["model"]) <= loss_bound(GOLDEN)


def test_the_divergence_of_each_tensor_is_reported():
    """`compare_by_tensor` lists each quantized tensor with the divergence that quantizing only this tensor causes."""
    base = random_checkpoint(SMALL, seed=1)
    model = quantized(base, "q4")
    running = load_backend(decoded(base), RunOptions(backend="reference"))
    text = EvalText(np.random.default_rng(2).integers(0, SMALL.vocab, 30).tolist(), 30)
    total, costs = compare_by_tensor(
        load_backend(model, RunOptions(backend="reference")), running, model, base, text, context=16
    )
    assert total == compare(load_backend(model, RunOptions(backend="reference")), running, text, context=16)
    assert [cost.name for cost in costs] == [name for name, tensor in model.tensors.items() if tensor.codes]
    assert all(0 < cost.relative_error < 1 and cost.divergence.mean > 0 for cost in costs)
    tensors = {**base.tensors, costs[3].name: model.tensors[costs[3].name]._replace(codes=None)}
    exchanged = load_backend(replace(base, tensors=tensors), RunOptions(backend="reference"))
    assert compare(exchanged, running, text, context=16).divergence == costs[3].divergence
    assert compare_by_tensor(running, running, base, base, text, context=16)[1] == []


def test_the_base_is_computed_once_for_all_tensors(monkeypatch):
    base = random_checkpoint(SMALL, seed=1)
    running = load_backend(decoded(base), RunOptions(backend="reference"))
    text, models = EvalText([1, 2, 3, 4, 5], 5), []
    computed = ReferenceBackend.logits_in_parts

    def counted(model, ids, *, after=0):
        models.append(model)
        return computed(model, ids, after=after)

    monkeypatch.setattr(ReferenceBackend, "logits_in_parts", counted)
    model = quantized(base, "q8")
    costs = compare_by_tensor(
        load_backend(model, RunOptions(backend="reference")), running, model, base, text, context=8
    )[1]
    assert (models.count(running), len(models)) == (1, len(costs) + 2)


@pytest.mark.parametrize("in_memory", [0, 1, 1 << 20])
def test_what_is_recorded_is_read_again_bit_for_bit(monkeypatch, in_memory):
    monkeypatch.setattr("llamaspec.model.insight.evaluation.IN_MEMORY", in_memory)
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(rows, 7)).astype(dtype) for rows, dtype in ((3, np.float32), (1, np.float64))]
    with recorded(iter(parts)) as record:
        for triple in zip(record, record, parts, strict=True):  # by two readers at once
            assert all(np.array_equal(part, triple[2]) and part.dtype == triple[2].dtype for part in triple)


def test_a_full_disk_is_one_line(monkeypatch):
    monkeypatch.setattr("tempfile.SpooledTemporaryFile", lambda max_size: open("/dev/full", "w+b"))
    with (
        pytest.raises(CheckpointError, match=r"^[^\n]*: No space left on device$"),
        recorded([np.zeros((1, 1))]) as record,
    ):
        list(record)


@pytest.mark.slow  # 9 s each
@pytest.mark.parametrize("config", ["1 to 1, biases, scaled, tied", "experts"])
def test_one_tensor_is_exchanged_and_no_other_is_read_again(config):
    """`with_weights` reads only the tensor that differs between the new checkpoint and `read_from`, and replaces it.

    `read_from` may be a copy of the checkpoint from which the model was loaded.
    """
    base, second = (random_checkpoint(CONFIGS[config], seed=seed) for seed in (1, 2))
    model = load_backend(decoded(base))
    assert isinstance(model, JaxBackend)
    base, ids = decoded(base), list(range(40))
    for name in base.tensors:
        changed = replace(base, tensors={**base.tensors, name: second.tensors[name]})
        exchanged = model.with_weights(changed, read_from=base)
        np.testing.assert_array_equal(exchanged.logits(ids), model.with_weights(changed).logits(ids), err_msg=name)
        arrays = [jax.tree.leaves(backend_now._params._replace(rope=None)) for backend_now in (model, exchanged)]
        own = [b for a, b in zip(*arrays, strict=True) if a is not b]
        assert len({id(array) for array in own}) == 1, name


@pytest.mark.sampled(1)  # 2 s each
@pytest.mark.parametrize("backend", ["jax", "reference"])
def test_logits_in_parts_are_the_logits(backend):
    checkpoint = random_checkpoint(replace(CONFIGS["3 to 1, q/k norms, window"], layers=1, windows=(3,)), seed=3)
    model = load_backend(checkpoint, RunOptions(backend=backend))
    assert isinstance(model, JaxBackend | ReferenceBackend)
    ids = np.random.default_rng(4).integers(0, 50, 64).tolist()
    full = model.logits(ids)
    later_rows = np.concatenate(list(model.logits_in_parts(ids, after=40)))
    np.testing.assert_allclose(later_rows, full[40:], atol=1e-5 * np.abs(full).max())
    second = random_checkpoint(checkpoint.config, seed=5)
    assert np.array_equal(
        model.with_weights(second).logits(ids), load_backend(second, RunOptions(backend=backend)).logits(ids)
    )
    assert np.array_equal(model.logits(ids), full)


def test_text_for_a_person(run, tmp_path):
    text, folder = tmp_path / "text", tmp_path / "model"
    text.write_text("Once upon a time")
    spelt = tmp_path / "tokenizer.json"
    spelt.write_text(tiny_tokenizers.chatml())
    write_huggingface(random_checkpoint(replace(SMALL, vocab=load_tokenizer(spelt).vocab), seed=0), folder)
    spelt.rename(folder / spelt.name)
    model, request = str(folder), ("--text", str(text), "--context", "8", "--backend", "reference")
    code, out, err = run("eval", model, *request)
    assert (code, err) == (0, "")
    assert [line.split("  ")[0] for line in out.splitlines()] == ["tokens", "perplexity", "bits per byte"]
    code, out, err = run("eval", model, "--quantize", "q4", "--against", model, "--by-tensor", *request)
    assert (code, err) == (0, "")
    assert "same top token" in out
    assert len([line for line in out.splitlines() if line.startswith("model.layers.0.")]) == 7


def test_what_json_and_text_hold():
    comparison = compare(Bigrams(np.eye(3)), Bigrams(np.eye(3) * 2), EvalText([0, 1, 2], 3), context=3)
    report = as_json(comparison, [], model="a")
    assert json.loads(json.dumps(report)) == report
    assert f"against {comparison.base.perplexity:.4f}" in as_text(report)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "contains no text"),
        (b" \n", "contains no text"),
        (b"abc\xffdef", "is not UTF-8: its byte 3 is 0xff"),
        (b"\xe2\x82", "is not UTF-8: its byte 0"),
    ],
)
def test_a_file_that_is_no_text_is_refused(run, tmp_path, raw, what):
    path = tmp_path / "text"
    path.write_bytes(raw)
    assert_refused(run("eval", "--text", str(path)), str(path), what)
    with pytest.raises(CheckpointError, match=what):
        read_text(path)


def test_other_bad_input_is_refused(run, tmp_path):
    path = tmp_path / "text"
    path.write_text("One day")
    assert_refused(run("eval", "--text", str(tmp_path / "none")), "none: No such file")
    assert_refused(run("eval", "--text", str(tmp_path)), "Is a directory")
    assert_refused(run("eval"), "--text", status=2)
    assert_refused(run("eval", "--text", str(path), "--by-tensor"), "--by-tensor needs --against", status=2)
    assert_refused(run("eval", "--text", str(path), "--context", "1"), "at least 2")
    assert_refused(
        run("eval", "--text", str(path), "--context", "8", "--stride", "8"), "stride must be between 1 and 7"
    )
    assert_refused(
        run("eval", "--text", str(path), "--context", "8", "--stride", "0"), "stride must be between 1 and 7"
    )
    assert_refused(run("eval", "none", "--text", str(path)), "none: ")
    assert choose_stride(1, 2) == 1


def test_a_model_of_another_vocabulary_is_refused(run, tmp_path, data):
    path, folder = tmp_path / "text", data / "stories260K"
    path.write_text("One day")
    small = tmp_path / "small.gguf"
    tokenizer = ("--tokenizer", str(folder / "tok512.model"))
    assert run("convert", str(folder / "stories260K.bin"), str(small), "--to", "gguf", *tokenizer)[0] == 0
    words = (str(small), " 1024 ", " 512 ", "vocabularies")
    assert_refused(run("eval", "--against", str(small), "--text", str(path)), *words)


def test_a_token_without_a_prediction_is_not_counted(tmp_path):
    """The first token counts only if BOS predicts it; a text of one token without BOS is refused."""
    path, spelt = tmp_path / "text", tmp_path / "tokenizer.json"
    spelt.write_text(tiny_tokenizers.chatml())
    tokenizer = load_tokenizer(spelt)
    assert tokenizer.bos is None
    checkpoint = random_checkpoint(replace(SMALL, vocab=tokenizer.vocab), seed=0)
    path.write_text("\u00e9x")
    text = text_for([checkpoint], path, tokenizer=spelt)
    assert text.bytes == len("\u00e9x".encode()) - len(tokenizer.bytes_of(text.ids[0]))
    path.write_text("x")
    with pytest.raises(CheckpointError, match="text: has only one token"):
        text_for([checkpoint], path, tokenizer=spelt)


def test_models_of_other_shapes_are_refused():
    base = random_checkpoint(SMALL, seed=1)
    wide = random_checkpoint(CONFIGS["2 to 1, wide, tied"], seed=1)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight.*\[50, 24\].*\[50, 128\]"):
        check_alike(base, wide)
    with pytest.raises(ValueError, match="only one of them has"):
        check_alike(base, random_checkpoint(replace(SMALL, layers=1), seed=1))
