"""Models written as ONNX files compute what the reference defines, in ONNX's own interpreter of graphs.

The walk compares the result of every named node with its definition in `reference/`, for the node's own inputs.
"""

import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError, Codes, Tensor
from llamaspec.model.checkpoints.codes import dequantized, quantized
from llamaspec.model.checkpoints.onnx import codes as onnx_codes
from llamaspec.model.checkpoints.onnx.graph import llama_graph
from llamaspec.model.checkpoints.onnx.write import write_onnx
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.family import nearest_family
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.tensors import quantizable
from llamaspec.reference import llama
from llamaspec.reference.attention import attention_weights, causal_mask, weighted
from llamaspec.reference.config import Config, for_sequences
from llamaspec.reference.quantizers import affine
from llamaspec.reference.rope import LongRopeScaling
from llamaspec.verify.bounds import running_error as bound
from llamaspec.verify.bounds.running_error import Approx, exactly, gamma
from tests.commands.test_cli import assert_refused
from tests.goldens import make_families
from tests.model.families.test_family_goldens import AGREE, GOLDENS
from tests.support.families import FAMILIES, write_checkpoint
from tests.support.random_models import SMALL, random_checkpoint
from tests.support.refusals import mentions
from tests.support.strategies import assert_within

DOCUMENT = Path(__file__).parents[3] / "docs/onnx.md"
Results = Mapping[str, np.ndarray]

WITH_EXPERTS = ("gpt-oss", "gpt-oss-mxfp4", "qwen2-moe", "qwen3-moe", "mixtral", "qwen3-moe-window")
# `make test` writes these models, which together have every switch and every stored dtype.
FIRST = (
    "gemma2",
    "stablelm2-12b",
    "starcoder2",
    "granite",
    "gemma3-text",
    "olmo3",
    "nemotron",
    "phi4-mini",
    "llama-3.2",
)
MODELS = sorted({*GOLDENS, *FAMILIES} - {*WITH_EXPERTS}, key=lambda name: (name not in FIRST, name))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that makes the checkpoint of a model once, and its ONNX file."""

    @cache
    def of(name: str) -> tuple[Checkpoint, Path]:
        directory = tmp_path_factory.mktemp(name)
        if name in GOLDENS:
            make_families.write_checkpoint(directory, GOLDENS[name])
        else:
            config = FAMILIES[name]
            write_checkpoint(directory, config, dtype=config["dtype" if "dtype" in config else "torch_dtype"])
        checkpoint = open_checkpoint(directory)
        path = directory / "model.onnx"
        write_onnx(checkpoint, path)
        config = checkpoint.config
        if isinstance(config.scaling, LongRopeScaling):
            config = for_sequences(config, config.scaling.original_context)
        return replace(checkpoint, config=config), path

    return of


def run(
    evaluator: ReferenceEvaluator, chunks: list[np.ndarray], config: Config
) -> Iterator[tuple[np.ndarray, Results]]:
    """Run chunks of tokens, each with the cache that the previous one returned.

    Yields the positions of each chunk, and the results of all nodes.
    """
    past, start = empty_cache(config, 1), 0
    for tokens in chunks:
        positions = np.arange(start, start + len(tokens))
        feeds = {"input_ids": tokens[None], "position_ids": positions[None], **past}
        results = evaluator.run(None, feeds, intermediate=True)
        assert isinstance(results, dict)
        yield positions, feeds | results
        past = {name: results[name.replace("past_key_values", "present")] for name in past}
        start += len(tokens)


def empty_cache(config: Config, batch: int) -> dict[str, np.ndarray]:
    names = [f"past_key_values.{i}.{part}" for i in range(config.layers) for part in ("key", "value")]
    return dict.fromkeys(names, np.zeros((batch, config.kv_heads, 0, config.head_dim), np.float32))


def tokens_for(config: Config) -> np.ndarray:
    count = 16 if isinstance(config.scaling, LongRopeScaling) else 24
    return np.random.default_rng(0).integers(0, config.vocab, count)


@pytest.mark.sampled(9, first=True)  # 33 cases, 6 s
@pytest.mark.parametrize("name", MODELS)
def test_every_node_is_within_the_bound_of_its_definition(name, written):
    """Every node is within its bound, and the logits of the model agree, for a prompt and for later tokens."""
    checkpoint, path = written(name)
    onnx.checker.check_model(path, full_check=True)
    config, params = checkpoint.config, load_reference_params(checkpoint)
    tokens = tokens_for(config)
    logits, _ = llama.forward(params, tokens, llama.empty_cache(config), config=config)
    evaluator = ReferenceEvaluator(str(path))
    for chunks in ([tokens[:9], tokens[9:-1], tokens[-1:]], [tokens]):
        for at, results in run(evaluator, chunks, config):
            np.testing.assert_allclose(results["logits"][0], logits[at], rtol=0, atol=AGREE * np.abs(logits).max())
            checked = []
            for node, expected in expected_results(results, params, config, at):
                assert_within(results[node][0], expected.value, expected.error)
                checked.append(node)
            assert len(checked) == len({*checked}) > 10 * config.layers


def test_the_file_has_the_tensors_of_the_checkpoint(written):
    """The weights have the names, shapes, types and bytes of the tensors in the checkpoint's own file."""
    checkpoint, path = written("llama-3.2")
    model = onnx.load(path)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    assert checkpoint.tensors.keys() <= stored.keys()
    for name, tensor in checkpoint.tensors.items():
        assert (tuple(stored[name].dims), stored[name].raw_data) == (tensor.shape, tensor.read().tobytes())
        assert onnx.helper.tensor_dtype_to_np_dtype(stored[name].data_type) == tensor.dtype
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 23)]


def check_nodes(checkpoint: Checkpoint, path: Path) -> onnx.ModelProto:
    """Check every node of a quantized model, with the decoded float32 matrices as its weights; return the model."""
    onnx.checker.check_model(path, full_check=True)
    config = checkpoint.config
    decoded = {name: tensor._replace(codes=None) for name, tensor in checkpoint.tensors.items()}
    params, tokens = load_reference_params(replace(checkpoint, tensors=decoded)), tokens_for(config)
    for at, results in run(ReferenceEvaluator(str(path)), [tokens[:-1], tokens[-1:]], config):
        for node, expected in expected_results(results, params, config, at):
            assert_within(results[node][0], expected.value, expected.error)
    return onnx.load(path)


WIDE = replace(SMALL, dim=128, layers=1, kv_heads=2, head_dim=32, ffn=320, qkv_bias=True)


@pytest.mark.parametrize("scheme", ["q8", "q8_row", "q4"])
def test_codes_stay_codes(scheme, tmp_path):
    checkpoint = quantized(random_checkpoint(WIDE, seed=0), scheme)
    notes = write_onnx(checkpoint, tmp_path / "x.onnx")
    model = check_nodes(checkpoint, tmp_path / "x.onnx")
    assert len(notes) == 1 and sum(node.op_type == "DequantizeLinear" for node in model.graph.node) == 8
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    name = "model.layers.0.mlp.down_proj.weight"
    codes = checkpoint.tensors[name].codes
    assert codes is not None
    [part] = codes.parts()
    np.testing.assert_array_equal(stored[f"{name}.codes"].astype(np.int8), part.codes.T)
    np.testing.assert_array_equal(stored[f"{name}.scales"], part.scales.T)
    assert f"{name}.codes" in stored and name not in stored


def with_codes(checkpoint: Checkpoint, bits: int, *, group: int, rows_at_once: int) -> Checkpoint:
    """Quantize every matrix with zero points, in parts of `rows_at_once` rows."""

    def coded(tensor: Tensor) -> Tensor:
        rows, cols = tensor.shape
        q = affine.quantize(tensor.read(), bits=bits, block=(1, group))

        def parts():
            for start in range(0, rows, rows_at_once):
                yield affine.Affine(*(array[start : start + rows_at_once] for array in q))

        codes = Codes(f"int{bits}", group, zeros=True, bytes=rows * cols * bits // 8, parts=parts)
        return Tensor(tensor.shape, np.dtype(np.float32), lambda: dequantized(codes, tensor.shape), codes)

    matrices = quantizable(checkpoint.config)
    tensors = {name: coded(tensor) if name in matrices else tensor for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("at_once", [1 << 26, 2000])
def test_zero_points_and_matrices_in_many_parts(bits, at_once, tmp_path, monkeypatch):
    """Zero points are written correctly, even if codes are written in blocks that end between two paired rows.

    A matrix with an odd number of rows (here the head) has no pairs of rows, so it gets codes of one byte.
    """
    monkeypatch.setattr(onnx_codes, "AT_ONCE", at_once)
    config = replace(WIDE, vocab=51)
    checkpoint = with_codes(random_checkpoint(config, seed=0), bits, group=32, rows_at_once=7)
    write_onnx(checkpoint, tmp_path / "x.onnx")
    model = check_nodes(checkpoint, tmp_path / "x.onnx")
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert kinds["lm_head.weight.codes"] == onnx.TensorProto.UINT8
    assert kinds["lm_head.weight.zero_points"] == onnx.TensorProto.UINT8
    half = onnx.TensorProto.UINT4 if bits == 4 else onnx.TensorProto.UINT8
    assert kinds["model.layers.0.mlp.down_proj.weight.codes"] == half


@pytest.mark.parametrize(("scheme", "ffn"), [("nf4", 320), ("q4", 300)])
def test_codes_that_onnx_cannot_decode_become_float32(scheme, ffn, tmp_path):
    """ONNX cannot decode levels that are not integers, or a last group that is shorter; we write float32 instead."""
    checkpoint = quantized(random_checkpoint(replace(WIDE, ffn=ffn), seed=0), scheme)
    notes = write_onnx(checkpoint, tmp_path / "x.onnx")
    check_nodes(checkpoint, tmp_path / "x.onnx")
    first, more = ("self_attn.q_proj", " and 7 more") if scheme == "nf4" else ("mlp.down_proj", "")
    assert notes[1] == f"quantized tensors that become float32: model.layers.0.{first}.weight{more}"


def test_a_second_file_has_the_same_bytes(written, tmp_path):
    checkpoint, path = written("llama-3.2")
    write_onnx(checkpoint, tmp_path / path.name)
    for name in (path.name, f"{path.name}.data"):
        assert (tmp_path / name).read_bytes() == path.with_name(name).read_bytes()


def test_rows_of_a_batch_do_not_affect_each_other(written):
    """Two sequences in one batch give the same logits as each of them in its own batch."""
    checkpoint, path = written("gemma2")
    config = checkpoint.config
    tokens = np.random.default_rng(1).integers(0, config.vocab, (2, 9))
    evaluator = ReferenceEvaluator(str(path))

    def logits(rows: np.ndarray) -> np.ndarray:
        positions = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
        feeds = {"input_ids": rows, "position_ids": positions, **empty_cache(config, len(rows))}
        [result] = evaluator.run(["logits"], feeds)
        return np.asarray(result)

    both = logits(tokens)
    atol = AGREE * np.abs(both).max()
    np.testing.assert_allclose(both, np.concatenate([logits(tokens[:1]), logits(tokens[1:])]), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"experts": 2, "experts_per_token": 1}, "experts"),
        ({"sinks": True}, "attention sinks"),
        ({"activation": "clamped_silu"}, "clamped SwiGLU"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_name(changes, what, tmp_path):
    checkpoint = Checkpoint("a.gguf", "gguf-v3", replace(SMALL, **changes), {}, bos=None, stops=frozenset())
    with pytest.raises(CheckpointError, match=f"^a.gguf: ONNX files of models with {what} are not supported yet$"):
        write_onnx(checkpoint, tmp_path / "x.onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_documents_count_the_nodes_of_a_block():
    nodes = llama_graph(open_checkpoint("stories"), data="weights").model.graph.node
    formulas = [n for n in nodes if n.name.startswith("model.layers.0") and n.op_type not in ("Cast", "Transpose")]
    assert f"A block of a Llama has {len(formulas)}:" in DOCUMENT.read_text(encoding="utf-8")


def test_a_model_with_long_rope_is_for_short_sequences(written, tmp_path):
    """The graph has the RoPE angles for short sequences, and a note names the longest sequence that it supports."""
    checkpoint, path = written("phi3-long")
    rows = next(tensor.dims[0] for tensor in onnx.load(path).graph.initializer if tensor.name == "rope.cos")
    assert rows == 16
    assert mentions(write_onnx(checkpoint, tmp_path / "x.onnx")[1], "16 512 LongRoPE")


def test_writing_needs_little_memory_besides_the_mapped_file(tmp_path):
    """NumPy and Python allocate at most 1 MB for a model with a tensor of 3.8 MB, which stays in the mapped file."""
    config = {**FAMILIES["llama-3"], "vocab_size": 40_000}
    write_checkpoint(tmp_path, config, dtype="bfloat16")
    checkpoint = open_checkpoint(tmp_path)
    tracemalloc.start()
    write_onnx(checkpoint, tmp_path / "x.onnx")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert checkpoint.tensors["lm_head.weight"].bytes > 3.8e6 and peak < 1e6


def test_the_command_writes_both_files(run, tmp_path):
    path = tmp_path / "stories.onnx"
    code, out, err = run("convert", "stories", str(path), "--to", "onnx")
    assert (code, out) == (0, "") and mentions(err, f"{path}.data tokenizer")
    onnx.checker.check_model(path, full_check=True)
    for existing in (path, path.with_name("other.onnx.data")):
        existing.touch()
        assert_refused(
            run("convert", "stories", str(existing).removesuffix(".data"), "--to", "onnx"),
            f"{existing}: already exists",
        )


def test_options_of_other_formats_are_refused(run, tmp_path):
    place = str(tmp_path / "x.onnx")
    for option, value in (("--quantize", "q4_k_m"), ("--dtype", "float16"), ("--tokenizer", "stories")):
        assert_refused(run("convert", "stories", place, "--to", "onnx", option, value), option, status=2)


def test_a_missing_package_is_one_line(run, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("llamaspec.model.checkpoints.onnx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    place = str(tmp_path / "x.onnx")
    assert_refused(run("convert", "stories", place, "--to", "onnx"), "onnx is missing: pip install 'llamaspec[onnx]'")


def expected_results(
    results: Results, params: llama.Params, config: Config, at: np.ndarray
) -> Iterator[tuple[str, Approx]]:
    """Yield the name of each node, and the value and error bound of its definition for the inputs in `results`.

    The positions of the tokens are `at`. Each node has the inputs that it has in `reference.llama`.
    """
    names = nearest_family(config).names

    def module(part: str, i: int | None) -> str:
        return names[part].format(layer=i)

    def actual(name: str) -> Approx:
        return exactly(results[name][0])

    def norm(x: str, part: str, i: int | None, weight, bias=None) -> Iterator[tuple[str, Approx]]:
        if weight is not None:
            yield module(part, i), bound.apply_norm(actual(x), weight, bias, config=config)

    def linear(x: str, part: str, i: int | None, layer: llama.Linear) -> tuple[str, Approx]:
        return module(part, i), bound.projected(actual(x), *layer)

    def joined(x: str, added: str, name: str) -> tuple[str, Approx]:
        return name, bound.added(actual(x), scaled(actual(added), config.residual_scale))

    x = module("embedding", None)
    yield x, scaled(exactly(params.embedding[results["input_ids"][0]]), config.embedding_scale)
    for i, layer in enumerate(params.layers):
        block = names["o"].format(layer=i).rsplit(".", 2)[0]
        n = module("attention_norm", i) if config.pre_norms else x
        yield from norm(x, "attention_norm", i, layer.attention_norm, layer.attention_norm_bias)
        for part in "qkv":
            yield linear(n, part, i, getattr(layer, part))
        yield from attention(actual, results, module, layer, config, at, i)
        h = module("o", i)
        yield linear(f"{block}.self_attn", "o", i, layer.o)
        if config.post_norms:
            yield from norm(h, "attention_post_norm", i, layer.attention_post_norm)
            h = module("attention_post_norm", i)
        after = f"{block}.after_attention"
        yield joined(x, h, after)
        if not config.parallel_residual:
            yield from norm(after, "ffn_norm", i, layer.ffn_norm, layer.ffn_norm_bias)
            n = module("ffn_norm", i) if config.pre_norms else after
        assert isinstance(layer.ffn, llama.FeedForward)
        yield linear(n, "up", i, layer.ffn.up)
        up = actual(module("up", i))
        if layer.ffn.gate is None:
            hidden, value = (
                {"gelu_tanh": "gelu", "relu2": "relu2"}[config.activation],
                bound.UNGATED[config.activation](up),
            )
        else:
            yield linear(n, "gate", i, layer.ffn.gate)
            hidden, value = "hidden", bound.GATED[config.activation](actual(module("gate", i)), up)
        yield f"{block}.mlp.{hidden}", value
        h = module("down", i)
        yield linear(f"{block}.mlp.{hidden}", "down", i, layer.ffn.down)
        if config.post_norms:
            yield from norm(h, "ffn_post_norm", i, layer.ffn_post_norm)
            h = module("ffn_post_norm", i)
        yield joined(after, h, block)
        x = block
    yield from norm(x, "norm", None, params.norm, params.norm_bias)
    logits = bound.projected(actual(module("norm", None)), params.head)
    logits = scaled(logits, 1 / config.logit_divisor)
    yield "logits", logits if config.logit_cap is None else bound.soft_capped(logits, config.logit_cap)


def attention(
    actual, results: Results, module, layer: llama.Layer, config: Config, at: np.ndarray, i: int
) -> Iterator[tuple[str, Approx]]:
    """Yield the nodes of attention between the projections, as `expected_results` does."""
    block = module("o", i).rsplit(".", 1)[0]
    sources, heads = {}, {"q": config.heads, "k": config.kv_heads}
    for part, count in heads.items():
        x = actual(module(part, i)).map(lambda a, count=count: a.reshape(len(at), count, -1))
        weight = getattr(layer, f"{part}_norm")
        sources[part] = module(part, i)
        if weight is not None and config.head_qk_norm:
            sources[part] = f"{block}.{part}_layernorm.rows"
            heads_of = zip(np.split(weight, count), range(count), strict=True)
            normalized = [
                bound.layer_normalized(x.map(lambda a, h=h: a[:, h]), w, None, eps=config.eps) for w, h in heads_of
            ]
            yield sources[part], Approx(*(np.concatenate(parts, axis=-1) for parts in zip(*normalized, strict=True)))
        elif weight is not None and config.wide_qk_norm:
            sources[part] = module(f"{part}_norm", i)
            yield sources[part], bound.normalized(flat(x), weight, eps=config.eps)
        elif weight is not None:
            sources[part] = f"{block}.{part}_norm.rows"
            yield sources[part], flat(bound.normalized(x, weight, eps=config.eps))
    if config.uses_rope(i):
        local = replace(config, theta=config.local_theta, scaling=None) if config.is_local(i) else config
        for part, count in heads.items():
            x = actual(sources[part]).map(lambda a, count=count: a.reshape(len(at), count, -1))
            yield f"{block}.{part}", flat(bound.turned(x, at, local))
            sources[part] = f"{block}.{part}"
    k, v = (results[f"present.{i}.{part}"][0].swapaxes(0, 1) for part in ("key", "value"))  # [keys, kv_heads, head_dim]
    for present, name in ((k, sources["k"]), (v, module("v", i))):
        np.testing.assert_array_equal(present[at].reshape(len(at), -1), results[name][0])
    q = results[sources["q"]][0].reshape(len(at), config.heads, config.head_dim)
    mask = causal_mask(len(at), len(k), offset=int(at[0]), window=config.window(i))
    yield block, flat(attended(q, k, v, mask, config))


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, config: Config) -> Approx:
    """Compute attention as ONNX defines it: q and k are both multiplied by the root of the scale.

    The two roots and the two products round, so a score has four roundings in addition to the roundings of its sum.
    """
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    value = weighted(attention_weights(q, k, mask, scale=scale, cap=config.attention_cap), v)
    group = config.heads // config.kv_heads
    queries = q.swapaxes(0, 1).astype(np.float64)  # [heads, queries, head_dim]
    keys, values = (np.repeat(a.swapaxes(0, 1), group, axis=0).astype(np.float64) for a in (k, v))
    sizes = scale * np.abs(queries) @ np.abs(keys).swapaxes(1, 2)
    scores = Approx(scale * queries @ keys.swapaxes(1, 2), gamma(config.head_dim + 4) * sizes)
    if config.attention_cap is not None:
        scores = bound.soft_capped(scores, config.attention_cap)
    p, p_error = bound.softmaxed(scores.value + mask, np.where(np.isneginf(mask), 0, scores.error))
    error = (p + p_error) @ np.abs(values) * (1 + gamma(len(k) + 1)) - p @ np.abs(values)
    return Approx(value, error.swapaxes(0, 1))


def scaled(x: Approx, factor: float) -> Approx:
    """Multiply by a constant, or divide by the inverse of it. The constant and the result are rounded."""
    product = x.map(lambda part: part * factor)
    return product if factor == 1 else bound.rounded(product, gamma(2))


def flat(x: Approx) -> Approx:
    return x.map(lambda part: part.reshape(len(part), -1))
