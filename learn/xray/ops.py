"""Describes the ops of a recorded text for the page. Runs their definitions again, to get the arrays of one token."""

from typing import Any

import numpy as np

from llamaspec.learn.trace import Recording, Trace, by_layer
from llamaspec.learn.xray.arrays import heat_map
from llamaspec.learn.xray.lines import Listing, Runs
from llamaspec.reference.add import add
from llamaspec.reference.attention import attention, attention_weights, causal_mask
from llamaspec.reference.linear import linear
from llamaspec.reference.llama import Experts, Layer
from llamaspec.reference.moe import moe
from llamaspec.reference.qk_norm import qk_norm
from llamaspec.reference.rmsnorm import rmsnorm
from llamaspec.reference.rope import frequencies, rope_halves
from llamaspec.reference.softmax import softmax
from llamaspec.reference.swiglu import swiglu
from llamaspec.verify.judging.walk import Result, ratios

Axes = tuple[str, ...]
INPUTS: dict[str, tuple[str, Axes]] = {
    "norm_qkv": ("x", ("dim",)),
    "attend": ("q", ("heads", "head_dim")),
    "project_add": ("h", ("heads", "head_dim")),
    "norm_gate_up": ("x", ("dim",)),
    "down_add": ("g", ("ffn",)),
    "moe_add": ("x", ("dim",)),
    "norm_logits": ("x", ("dim",)),
}
OUTPUTS: dict[tuple[str, str], tuple[str, Axes]] = {
    ("norm_qkv", "q"): ("q", ("heads", "head_dim")),
    ("norm_qkv", "k"): ("k", ("kv_heads", "head_dim")),
    ("norm_qkv", "v"): ("v", ("kv_heads", "head_dim")),
    ("attend", ""): ("h", ("heads", "head_dim")),
    ("project_add", ""): ("x", ("dim",)),
    ("norm_gate_up", ""): ("g", ("ffn",)),
    ("down_add", ""): ("x", ("dim",)),
    ("moe_add", ""): ("x", ("dim",)),
    ("norm_logits", ""): ("logits", ("vocab",)),
}


class Rerun:
    """Runs the definitions of each op with the recorded inputs of one token, and keeps results and executed lines."""

    def __init__(self, recording: Recording, position: int):
        self._recording, self._position = recording, position
        self._config = recording.config
        self.listings: dict[str, list[Listing]] = {}  # op: its listings
        self.values: dict[tuple[str, str], np.ndarray] = {}  # (op, output): its value according to the definitions
        self._block(recording.layers[0])
        self._logits()

    def _input_row(self, layer: int | None, op: str) -> np.ndarray:
        return self._recording.results[layer, op][0].input[[self._position]]

    def _keep(self, op: str, runs: Runs, **values: np.ndarray) -> None:
        self.listings[op] = runs.listings
        self.values |= {(op, name.strip("_")): value[0] for name, value in values.items()}

    def _block(self, i: int) -> None:
        layer = self._recording.model.exact.layers[i]
        self._norm_qkv(i, layer)
        self._attend(i)
        x = self._input_row(i, "norm_qkv")
        run = Runs()
        y = run(add, x, run(linear, self._input_row(i, "project_add"), *layer.o))
        self._keep("project_add", run, _=y)
        if isinstance(layer.ffn, Experts):
            self._moe_add(i, layer, layer.ffn)
            return
        x = self._input_row(i, "norm_gate_up")
        run = Runs()
        n = run(rmsnorm, x, layer.ffn_norm, eps=self._config.eps)
        g = run(swiglu, run(linear, n, *layer.ffn.gate), run(linear, n, *layer.ffn.up))
        self._keep("norm_gate_up", run, _=g)
        run = Runs()
        y = run(add, x, run(linear, self._input_row(i, "down_add"), *layer.ffn.down))
        self._keep("down_add", run, _=y)

    def _norm_qkv(self, i: int, layer: Layer) -> None:
        config, at, run = self._config, np.array([self._position]), Runs()
        n = run(rmsnorm, self._input_row(i, "norm_qkv"), layer.attention_norm, eps=config.eps)
        q, k, v = (run(linear, n, *weights).reshape(1, -1, config.head_dim) for weights in (layer.q, layer.k, layer.v))
        if config.qk_norm:
            q, k = run(qk_norm, q, k, layer.q_norm, layer.k_norm, eps=config.eps)
        turns = run(frequencies, config.head_dim, theta=config.theta, scaling=config.scaling)
        self._keep("norm_qkv", run, q=run(rope_halves, q, at, turns), k=run(rope_halves, k, at, turns), v=v)

    def _attend(self, i: int) -> None:
        at, run = self._position, Runs()
        q = self._input_row(i, "attend")
        _, k, v = (result.actual[: at + 1] for result in self._recording.results[i, "norm_qkv"])
        mask = run(causal_mask, 1, at + 1, offset=at, window=self._config.window(i))
        h = run(attention, q, k, v, mask)
        p = run(attention_weights, q, k, mask)
        with np.errstate(divide="ignore"):
            run(softmax, np.log(p))  # log(p) differs from the scores in `attention_weights` only by a constant
        self._keep("attend", run, _=h.reshape(1, -1))

    def _moe_add(self, i: int, layer: Layer, experts: Experts) -> None:
        config, run = self._config, Runs()
        x = self._input_row(i, "moe_add")
        chosen, renormalized = config.experts_per_token, config.renormalize_experts
        n = run(rmsnorm, x, layer.ffn_norm, eps=config.eps)
        y = run(add, x, run(moe, n, *experts[:4], experts_per_token=chosen, renormalized=renormalized))
        self._keep("moe_add", run, _=y)

    def _logits(self) -> None:
        exact, run = self._recording.model.exact, Runs()
        n = run(rmsnorm, self._input_row(None, "norm_logits"), exact.norm, eps=self._config.eps)
        self._keep("norm_logits", run, _=run(linear, n, exact.head))


def visits(recording: Recording, trace: Trace) -> list[dict[str, Any]]:
    """Describe the ops of one token, in order, with their arrays."""
    return [
        {
            **visit._asdict(),
            "given": _input_map(recording, visit.layer, visit.op, trace.position),
            "outputs": [
                {**output._asdict(), "map": _output_map(result, recording, trace.position)}
                for output, result in zip(visit.outputs, recording.results[visit.layer, visit.op], strict=True)
            ],
        }
        for group in by_layer(trace.visits).values()
        for visit in group
    ]


def unturned(recording: Recording, layer: int, output: str, position: int) -> np.ndarray:
    """Compute q or k of a token before RoPE, in float64 [heads head_dim]. Rotates the exact result back."""
    config = recording.config
    result = next(part for part in recording.results[layer, "norm_qkv"] if part.output == output)
    turns = frequencies(config.head_dim, theta=config.theta, scaling=config.scaling)
    return rope_halves(result.expected.value[[position]], np.array([-position]), turns)[0]


def logits(recording: Recording, position: int) -> np.ndarray:
    """Return the actual logits after a token."""
    return recording.results[None, "norm_logits"][0].actual[position]


def _input_map(recording: Recording, layer: int | None, op: str, position: int) -> dict[str, Any]:
    name, axes = INPUTS[op]
    return heat_map(name, axes, _shaped(recording.results[layer, op][0].input[position], recording, axes))


def _output_map(result: Result, recording: Recording, position: int) -> dict[str, Any]:
    name, axes = OUTPUTS[result.op, result.output]
    actual = result.actual[position]
    off = actual.astype(np.float64) - result.expected.value[position]
    parts = (_shaped(part, recording, axes) for part in (actual, off, ratios(result)[position]))
    values, difference, share = parts
    return heat_map(name, axes, values, difference=difference, share=share)


def _shaped(array: np.ndarray, recording: Recording, axes: Axes) -> np.ndarray:
    return array.reshape(-1, recording.config.head_dim) if "head_dim" in axes else array.reshape(-1)
