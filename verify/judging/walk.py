"""Walk through a whole model, op by op, and find the first op that is out of bounds.

Each op and its definition both get the result of the previous op, so we find an error in the op that causes it. The
caller passes the model, its caches and its ops; we read their arrays with NumPy.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from llamaspec.reference.attention import causal_mask
from llamaspec.reference.config import Config
from llamaspec.reference.llama import Params
from llamaspec.reference.rope import LinearScaling
from llamaspec.verify.bounds import running_error as bound
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.bounds.running_error import Approx, exactly
from llamaspec.verify.judging.examination import Examination
from llamaspec.verify.judging.judge import Finding
from llamaspec.verify.judging.runner import Report

# Switches beyond Llama: first the switches that `trace` supports, then all for which we have bounds.
TRACED = ("activation", "gated", "layer_norm", "parallel_residual", "head_qk_norm", "rotary_dim")
BOUNDED = (*TRACED, "sinks", "expert_bias")
PROMPT = 24  # tokens of the first chunk, if the context has room


class OpError(NamedTuple):
    """Error of one result of one op, compared with its definition."""

    layer: int | None  # None after the last block
    op: str
    output: str
    error: float  # the largest error
    size: float  # magnitude of the largest exact value
    ratio: float  # the largest error divided by its bound: above 1 is a bug
    compared: int  # numbers that have a bound

    @property
    def name(self) -> str:
        place = "" if self.layer is None else f"layer {self.layer} "
        return place + self.op + (f" ({self.output})" if self.output else "")


@runtime_checkable
class Walkable(Protocol):
    """A model with ops that can be called one by one, such as `model.candidates.walking.WalkableModel`.

    NumPy must be able to read its arrays.
    """

    @property
    def params(self) -> Any:
        """The weights in the form that the ops take, with the fields embedding, layers and norm."""
        ...

    @property
    def exact(self) -> Params:
        """The exact values of the weights, for the reference."""
        ...

    @property
    def ops(self) -> Any:
        """The five ops of a block, moe_add and norm_logits."""
        ...

    @property
    def cache(self) -> Callable[[int], list[Any]]:
        """A function that makes a cache for each layer, with k and v [batch kv_heads rows head_dim] for `rows` rows."""
        ...

    @property
    def positions(self) -> Callable[[np.ndarray], Any]:
        """A function that converts positions [batch seq] to the form that the ops take."""
        ...

    @property
    def array(self) -> Callable[[np.ndarray], Any]:
        """A function that converts a NumPy array to an array of the ops' library."""
        ...


class Result(NamedTuple):
    """One result of one op for every token of a chunk, with the exact result."""

    layer: int | None  # None after the last block
    op: str
    output: str  # q, k or v; "" if the op has one result
    input: np.ndarray  # the first argument of the op [seq ...]
    actual: np.ndarray  # [seq ...]
    expected: Approx  # [seq ...]


def walk(
    model: Walkable, chunks: list[np.ndarray], *, config: Config, unit: float, blocks: int = 1
) -> Iterator[OpError]:
    """Compare every result of `results` with its exact value. Takes the arguments of `results`."""
    for result in results(model, chunks, config=config, unit=unit, blocks=blocks):
        yield _step(result)


def results(
    model: Walkable,
    chunks: list[np.ndarray],
    *,
    config: Config,
    unit: float,
    blocks: int = 1,
    layers: Collection[int] | None = None,
) -> Iterator[Result]:
    """Run `chunks` of tokens [seq] in order, for example a prompt and then single tokens. Yield the results of all ops.

    Each result comes with its exact value. `unit` is the relative error of rounding an op's output. Attention reads a
    cache in at most `blocks` parts. Layers outside `layers` run, but we compute no exact values for them. Raises
    ValueError for an option of `config` that we have no bound for.
    """
    config.check_llama("walks", known=BOUNDED)
    caches = model.cache(sum(len(tokens) for tokens in chunks))
    start = 0
    for tokens in chunks:
        at = start + np.arange(len(tokens))
        used = start + len(tokens)
        positions = model.positions(at[None].astype(np.int32))
        x = model.array(_read(model.params.embedding[tokens])[None])
        for i, layer in enumerate(model.params.layers):
            included = layers is None or i in layers
            defined = model.exact.layers[i] if included else None
            q, caches[i] = model.ops.norm_qkv(x, layer, caches[i], positions, config=config)
            window = config.window(i)
            sinks = {"sinks": layer.sinks} if config.sinks else {}
            h = model.ops.attend(q, caches[i], positions, window=window, config=config, **sinks)
            if defined:
                k, v = (_read(a)[0].swapaxes(0, 1) for a in caches[i])
                expected = bound.norm_qkv(_single_sequence(x), defined, at, config=config, unit=unit)
                for name, actual, part in zip("qkv", (_read(q)[0], k[at], v[at]), expected, strict=True):
                    yield Result(i, "norm_qkv", name, _read(x)[0], actual, part)
                mask = causal_mask(len(tokens), used, offset=start, window=window)
                cached = exactly(k[:used]), exactly(v[:used])
                part = bound.attend(_single_sequence(q), *cached, mask, unit=unit, blocks=blocks, sinks=defined.sinks)
                yield Result(i, "attend", "", _read(q)[0], _read(h)[0], part)

            first, x = x, model.ops.project_add(h, layer, x)
            if defined:
                part = bound.project_add(_single_sequence(h), defined, _single_sequence(first), unit=unit)
                yield Result(i, "project_add", "", _read(h)[0], _read(x)[0], part)

            before = x
            if config.experts:
                x = model.ops.moe_add(before, layer, config=config)
                if defined:
                    part = bound.moe_add(_single_sequence(before), defined, config=config, unit=unit)
                    yield Result(i, "moe_add", "", _read(before)[0], _read(x)[0], part)
                continue
            op_input = first if config.parallel_residual else before
            g = model.ops.norm_gate_up(op_input, layer, config=config)
            x = model.ops.down_add(g, layer, before)
            if defined:
                part = bound.norm_gate_up(_single_sequence(op_input), defined, config=config, unit=unit)
                yield Result(i, "norm_gate_up", "", _read(op_input)[0], _read(g)[0], part)
                part = bound.down_add(_single_sequence(g), defined, _single_sequence(before), unit=unit)
                yield Result(i, "down_add", "", _read(g)[0], _read(x)[0], part)

        logits = model.ops.norm_logits(x, model.params, config=config)
        part = bound.norm_logits(_single_sequence(x), model.exact, config=config, unit=unit)
        yield Result(None, "norm_logits", "", _read(x)[0], _read(logits)[0], part)
        start = used


def walk_through(
    model: Walkable,
    *,
    config: Config,
    dtype: str,
    seed: int,
    name: str = "model",
    progress: Callable[[str, float], object] = lambda stage, share: None,
) -> tuple[list[OpError], Report]:
    """Walk through `model`, which runs in `dtype`, with a prompt of random tokens and two more tokens.

    Calls `progress` with each step and the share of layers done. Raises ValueError for an unknown dtype.
    """
    start, unit = monotonic(), precision(dtype).unit
    steps = []
    for step in walk(model, prompt(config, seed=seed), config=config, unit=unit):
        steps.append(step)
        progress(step.name, (step.layer or 0) / config.layers)
    return steps, report(steps, candidate=name, dtype=dtype, seed=seed, seconds=monotonic() - start)


def prompt(config: Config, *, seed: int) -> list[np.ndarray]:
    """Draw random tokens: a chunk of up to 24 tokens, then two chunks of one token."""
    length = min(PROMPT, config.context - 2)
    tokens = np.random.default_rng(seed).integers(0, config.vocab, length + 2).astype(np.int32)
    return [tokens[:length], tokens[length:-1], tokens[-1:]]


def _read(array: Any) -> np.ndarray:
    return np.asarray(array)


def _single_sequence(array: Any) -> Approx:
    """Take the only sequence of a batch, and treat its numbers as exact."""
    return exactly(_read(array)[0])


def ratios(result: Result) -> np.ndarray:
    """Divide the error of each number by its bound: 0 means no error, above 1 a bug."""
    off = np.abs(result.actual.astype(np.float64) - result.expected.value)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(off == 0, 0.0, off / result.expected.error)


def _step(result: Result) -> OpError:
    expected = result.expected
    off = np.abs(result.actual.astype(np.float64) - expected.value)
    largest = float(np.max(ratios(result), initial=0))
    return OpError(
        result.layer,
        result.op,
        result.output,
        float(np.max(off, initial=0)),
        float(np.max(np.abs(expected.value), initial=0)),
        np.inf if np.isnan(largest) else largest,
        int(np.count_nonzero(expected.error < bound.NO_BOUND)),
    )


def table(steps: list[OpError]) -> list[str]:
    """Format a line for each op: its largest error over all layers, and the layer with this error."""
    worst: dict[str, OpError] = {}
    for step in steps:
        name = step.op + (f" ({step.output})" if step.output else "")
        if name not in worst or not step.ratio <= worst[name].ratio:
            worst[name] = step
    lines = [f"{'op':14} {'error/bound':>12} {'error':>10} {'largest':>10}  worst in"]
    for name, step in worst.items():
        place = "the end" if step.layer is None else f"layer {step.layer}"
        lines.append(f"{name:14} {step.ratio:12.3g} {step.error:10.3g} {step.size:10.3g}  {place}")
    return lines


def first_wrong(steps: list[OpError]) -> OpError | None:
    """Find the first op that is out of bounds."""
    return next((step for step in steps if not step.ratio <= 1), None)


def report(steps: list[OpError], *, candidate: str, dtype: str, seed: int, seconds: float) -> Report:
    """Make a report of a walk, in the form of a contract's report. An example is one result of one op."""
    wrong = first_wrong(steps)
    finding = None
    if wrong:
        times = f"{wrong.ratio:.3g} times its bound" if np.isfinite(wrong.ratio) else "not finite"
        finding = Finding("value", f"{wrong.name} is the first op out of bounds: off by {wrong.error:.3g}, {times}")
    worst = max(step.ratio for step in steps)
    examination = Examination({}, worst, worst, finding)
    compared = sum(step.compared for step in steps)
    return Report("block", candidate, dtype, seed, len(steps), seconds, examination, compared=compared)


def weights(shapes: Mapping[str, tuple[int, ...]], *, seed: int) -> dict[str, np.ndarray]:
    """Draw weights for a checkpoint's tensors, by name, so that activations stay near 1; norm weights differ from 1."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith((".bias", ".sinks")):
            return rng.normal(0, 0.5, shape)
        if "norm" in name:
            return rng.uniform(0.5, 1.5, shape)
        return rng.normal(0, 1.0 if "embed" in name else shape[1] ** -0.5, shape)

    return {name: draw(name, shape).astype(np.float32) for name, shape in shapes.items()}


_SMALL = Config(
    dim=24, layers=2, heads=4, kv_heads=4, head_dim=6, ffn=40, vocab=50, context=64, eps=1e-5, theta=10_000.0
)
# Models with random weights, and shapes that reveal mistakes.
CONFIGS = {
    "biases, scaled RoPE": replace(
        _SMALL, qkv_bias=True, o_bias=True, ffn_bias=True, scaling=LinearScaling(factor=4.0), tied=True
    ),
    "3 heads to 1, q/k norms, window": replace(
        _SMALL, heads=3, kv_heads=1, head_dim=10, qk_norm=True, windows=(3, None)
    ),
    "7 heads to 1": replace(_SMALL, heads=14, kv_heads=2, head_dim=4, theta=500_000.0),
    "2 heads to 1, wide": replace(_SMALL, dim=128, kv_heads=2, head_dim=32, ffn=320),
    "experts": replace(_SMALL, kv_heads=2, experts=4, experts_per_token=2),
}
# Models with the switches of `BOUNDED`: Starcoder 2's, StableLM 2's, Nemotron's and gpt-oss's.
BEYOND = {
    "LayerNorm, GELU without a gate": replace(
        _SMALL, layer_norm=True, gated=False, activation="gelu_tanh", qkv_bias=True, ffn_bias=True, windows=(3, None)
    ),
    "parallel halves, LayerNorm of each head": replace(
        _SMALL, kv_heads=2, layer_norm=True, parallel_residual=True, head_qk_norm=True, rotary_dim=2
    ),
    "squared ReLU, RoPE of a part": replace(
        _SMALL, kv_heads=1, layer_norm=True, gated=False, activation="relu2", rotary_dim=4
    ),
    "sinks, experts with biases": replace(
        _SMALL,
        kv_heads=2,
        experts=4,
        experts_per_token=2,
        sinks=True,
        expert_bias=True,
        activation="clamped_silu",
        windows=(3, None),
    ),
}
# A model with widths that our kernels support.
KERNELS = replace(_SMALL, dim=256, layers=1, kv_heads=2, head_dim=64, ffn=256, vocab=64, qkv_bias=True, o_bias=True)
