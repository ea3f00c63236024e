"""The NumPy reference behind a generation, with the interface of `jax_backend`: to compare with and to learn from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from model.cache import cache_bytes
from model.checkpoints.checkpoint import Checkpoint, Shifted
from model.checkpoints.codes import exact_parts
from model.ops.emulated import RoundingArray
from model.options import SamplingOptions
from model.running.backend import check_logits
from model.running.memory import PROCESS, Memory
from model.sampling import random_key, uniform
from model.weights.params import abstract_params, weight_bytes
from reference.config import Config
from reference.llama import (
    Cache,
    Experts,
    FeedForward,
    Layer,
    LayerCache,
    Linear,
    Params,
    empty_cache,
    exactly,
    forward,
    hidden_states,
    unembed,
)
from reference.quantizers import kv_cache
from reference.sampling import distribution, draw

CHUNK = 512  # prompt tokens computed at once
PART = 64  # the same where each gives logits, one a token of the vocabulary


def reference_memory(config: Config, *, context: int) -> Memory:
    """What sequences of up to `context` tokens take, in float64; nothing is compiled."""
    float64 = np.dtype(np.float64)
    tokens = min(CHUNK, context)
    scores = 4 * config.heads * tokens * context  # masked, less the largest, their exponentials and probabilities
    hidden = 6 * tokens * config.ffn  # gate and up, what they make, and what that is made from
    return Memory(
        weights=weight_bytes(abstract_params(config, dtype=float64, positions=0)),
        cache=cache_bytes(config, batch=1, capacity=context, dtype=float64),
        activations=8 * (4 * tokens * config.dim + max(scores, hidden)),
        logits=8 * 4 * config.vocab,
        process=PROCESS,
        compiling=0,
    )


class Drawing(NamedTuple):
    """A text that is being drawn."""

    token: int  # the newest, which is not fed yet
    seen: np.ndarray  # bool [vocab]: what the repetition penalty applies to
    seed: int
    options: SamplingOptions


class ReferenceBackend:
    """`reference.llama` in float64, one sequence at a time, with the random numbers of JAX."""

    burst = 1
    ahead = 0
    chunk = CHUNK

    def __init__(self, params: Params, config: Config, *, capacity: int, int8_cache: bool = False):
        self.capacity = capacity
        self._keep = in_int8 if int8_cache else exactly
        self._params, self._config = params, config
        self._uniform = jax.jit(uniform)

    def bytes_read(self, position: float) -> None:
        """Count nothing: the reference is not made for speed."""

    def describe(self) -> str:
        """Say in one line how the model runs."""
        return "float64 on CPU, by the NumPy reference"

    def start(self) -> Cache:
        """Make an empty cache."""
        return empty_cache(self._config)

    def rewind(self, cache: Cache, length: int) -> Cache:
        """Forget all but the first `length` positions."""
        return [LayerCache(layer.k[:length], layer.v[:length]) for layer in cache]

    def extend(self, cache: Cache, ids: Sequence[int]) -> Cache:
        """Append tokens to the cache."""
        return hidden_states(self._params, np.array(ids), cache, config=self._config, keep=self._keep)[1]

    def begin(
        self, token: int, *, seen: np.ndarray, seed: int, options: SamplingOptions, stops: Sequence[int]
    ) -> Drawing:
        """A text to draw after `token`. A token at a time is drawn, so that `stops` end nothing here."""
        del stops
        return Drawing(token, seen.copy(), seed, options)

    def decode(self, cache: Cache, drawing: Drawing, *, steps: int) -> tuple[Callable[[], list[int]], Drawing, Cache]:
        """Feed the newest token and draw one; `steps` is at least 1."""
        x, cache = hidden_states(self._params, np.array([drawing.token]), cache, config=self._config, keep=self._keep)
        options = drawing.options
        p = distribution(
            unembed(self._params, x[-1], config=self._config),
            drawing.seen,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
        )
        position = len(cache[0].k)
        token = draw(p, float(self._uniform(random_key(drawing.seed), np.int32(position))))
        drawing.seen[token] = True
        return lambda: [token], drawing._replace(token=token), cache

    def logits(self, ids: Sequence[int]) -> Float[np.ndarray, "seq vocab"]:
        """Compute the logits that follow each of `ids`, in float64. Raises FloatingPointError: see `check_logits`."""
        return np.concatenate(list(self.logits_in_parts(ids)))

    def logits_in_parts(self, ids: Sequence[int], *, after: int = 0) -> Iterator[Float[np.ndarray, "rows vocab"]]:
        """`logits` of some ids at a time, without those of the first `after` ids, which are only read."""
        cache = self.extend(self.start(), ids[:after]) if after else self.start()
        for start in range(after, len(ids), PART):
            logits, cache = forward(
                self._params, np.array(ids[start : start + PART]), cache, config=self._config, keep=self._keep
            )
            yield check_logits(logits)

    def with_weights(self, checkpoint: Checkpoint, *, read_from: Checkpoint | None = None) -> "ReferenceBackend":
        """A backend like this one with the weights of another checkpoint, whose tensors are of the same shapes.

        All are read, whatever these were `read_from`.
        """
        del read_from
        other = copy(self)
        other._params = load_reference_params(checkpoint)
        return other


def in_int8(x: Float[np.ndarray, "seq kv_heads head_dim"]) -> Float[np.ndarray, "seq kv_heads head_dim"]:
    """What a cache of int8 keeps of keys or values."""
    return kv_cache.dequantize(kv_cache.quantize(x))


def load_reference_params(checkpoint: Checkpoint, roundings: Mapping[str, str] | None = None) -> Params:
    """Every tensor of `checkpoint` in float64: of quantized ones, the weights that their codes stand for.

    `roundings` are those of `model.ops.emulated`, for the matrices that they name.
    """
    config, rounded_to = checkpoint.config, roundings or {}

    def rounding(matrix: np.ndarray, *names: str) -> np.ndarray:
        if names[0] not in rounded_to:
            return matrix
        to = rounded_to[names[0]]
        return RoundingArray.of(matrix, to, minima(names).reshape(*matrix.shape[:-1], -1) if to == "q8_1" else None)

    def minima(names: Sequence[str]) -> np.ndarray:
        parts = (part for name in names if (codes := checkpoint.tensors[name].codes) for part in codes.parts())
        return np.concatenate([part.minima.astype(np.float64) for part in parts if isinstance(part, Shifted)])

    def tensor(name: str) -> np.ndarray:
        stored = checkpoint.tensors[name]
        exact = np.concatenate(list(exact_parts(stored))) if stored.codes else stored.read().astype(np.float64)
        checkpoint.release()
        return exact

    def linear(name: str, *, bias: bool = False) -> Linear:
        weight = rounding(tensor(f"{name}.weight"), f"{name}.weight")
        return Linear(weight, tensor(f"{name}.bias") if bias else None)

    def feed_forward(prefix: str) -> FeedForward | Experts:
        if config.experts:
            moe = f"{prefix}.block_sparse_moe"
            gate, down, up = (
                rounding(np.stack([tensor(name) for name in names]), *names)
                for w in ("w1", "w2", "w3")
                for names in [[f"{moe}.experts.{e}.{w}.weight" for e in range(config.experts)]]
            )
            return Experts(tensor(f"{moe}.gate.weight"), gate=gate, up=up, down=down)
        return FeedForward(*(linear(f"{prefix}.mlp.{w}_proj", bias=config.ffn_bias) for w in ("gate", "up", "down")))

    def layer(prefix: str) -> Layer:
        attention = f"{prefix}.self_attn"
        return Layer(
            attention_norm=tensor(f"{prefix}.input_layernorm.weight"),
            q=linear(f"{attention}.q_proj", bias=config.qkv_bias),
            k=linear(f"{attention}.k_proj", bias=config.qkv_bias),
            v=linear(f"{attention}.v_proj", bias=config.qkv_bias),
            o=linear(f"{attention}.o_proj", bias=config.o_bias),
            q_norm=tensor(f"{attention}.q_norm.weight") if config.qk_norm else None,
            k_norm=tensor(f"{attention}.k_norm.weight") if config.qk_norm else None,
            ffn_norm=tensor(f"{prefix}.post_attention_layernorm.weight"),
            ffn=feed_forward(prefix),
        )

    embedding, head = tensor("model.embed_tokens.weight"), "lm_head.weight"
    return Params(
        embedding=embedding,
        layers=[layer(f"model.layers.{i}") for i in range(config.layers)],
        norm=tensor("model.norm.weight"),
        head=rounding(embedding, "model.embed_tokens.weight") if config.tied else rounding(tensor(head), head),
    )
