"""The NumPy reference as a `Backend`, for comparison with other backends, and to learn from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from llamaspec.model.cache import cache_bytes
from llamaspec.model.checkpoints.checkpoint import Checkpoint, CodesWithMinima
from llamaspec.model.checkpoints.codes import exact_parts
from llamaspec.model.ops.emulated import RoundingArray
from llamaspec.model.options import SAMPLING, SamplingOptions
from llamaspec.model.running.backend import check_logits
from llamaspec.model.running.memory import PROCESS, Memory
from llamaspec.model.sampling import random_key, uniform
from llamaspec.model.tensors import EMBEDDING, Role, Weight, by_layer
from llamaspec.model.weights.loading import abstract_params
from llamaspec.model.weights.params import weight_bytes
from llamaspec.reference.config import Config
from llamaspec.reference.llama import (
    Cache,
    Experts,
    FeedForward,
    Layer,
    LayerCache,
    Linear,
    Params,
    SharedExpert,
    empty_cache,
    forward,
    hidden_states,
    unembed,
)
from llamaspec.reference.moe import Biases
from llamaspec.reference.quantizers import kv_cache
from llamaspec.reference.sampling import distribution, draw

CHUNK = 512  # prompt tokens that are computed at once
BY_REFERENCE = "float64 on CPU, by the NumPy reference"  # describes how a model with this backend runs
PART = 64  # tokens that are computed at once if each needs logits for the vocabulary


def reference_memory(config: Config, *, context: int) -> Memory:
    """Plan the memory for sequences of up to `context` tokens in float64. Nothing is compiled."""
    float64 = np.dtype(np.float64)
    tokens = min(CHUNK, context)
    scores = 4 * config.heads * tokens * context  # masked scores, minus the largest, exponentials, probabilities
    hidden = 6 * tokens * config.ffn  # gate, up, their product, and its parts
    return Memory(
        weights=weight_bytes(abstract_params(config, dtype=float64, positions=0)),
        cache=cache_bytes(config, batch=1, capacity=context, dtype=float64),
        activations=8 * (4 * tokens * config.dim + max(scores, hidden)),
        logits=8 * 4 * config.vocab,
        process=PROCESS,
        compiling=0,
    )


class Drawing(NamedTuple):
    """A completion in progress."""

    token: int  # the newest token, which was not fed yet
    seen: np.ndarray  # bool [vocab]: whether the repetition penalty applies to an id
    seed: int
    options: SamplingOptions


class ReferenceBackend:
    """A backend that runs `reference.llama` in float64, one sequence at a time, with the random numbers of JAX."""

    burst = 1
    ahead = 0
    chunk = CHUNK

    def __init__(self, params: Params, config: Config, *, capacity: int, int8_cache: bool = False):
        self.capacity = capacity
        self._layer_cache = kv_cache.Int8Cache if int8_cache else LayerCache
        self._params, self._config = params, config
        self._uniform = jax.jit(uniform)

    def bytes_read(self, position: float) -> None:
        """Return None, because we do not count bytes for the reference: it is not made for speed."""

    def describe(self) -> str:
        """Describe in one line how the model runs."""
        return BY_REFERENCE

    def start(self) -> Cache:
        """Make an empty cache."""
        return [self._layer_cache(*layer) for layer in empty_cache(self._config)]

    def rewind(self, cache: Cache, length: int) -> Cache:
        """Return the cache, cut to its first `length` positions."""
        return [self._layer_cache(layer.k[:length], layer.v[:length]) for layer in cache]

    def extend(self, cache: Cache, ids: Sequence[int]) -> Cache:
        """Append the keys and values of `ids` to the cache."""
        return hidden_states(self._params, np.array(ids), cache, config=self._config)[1]

    def begin(
        self, token: int, *, seen: np.ndarray, seed: int, options: SamplingOptions, stops: Sequence[int]
    ) -> Drawing:
        """Start a completion after `token`.

        `stops` are not used: `decode` draws one token per call, and the caller checks whether it is a stop token.
        """
        del stops
        return Drawing(token, seen.copy(), seed, options)

    def decode(self, cache: Cache, drawing: Drawing, *, steps: int) -> tuple[Callable[[], list[int]], Drawing, Cache]:
        """Feed the newest token and draw one token. `steps` is not used."""
        x, cache = hidden_states(self._params, np.array([drawing.token]), cache, config=self._config)
        options = drawing.options
        p = distribution(
            unembed(self._params, x[-1], config=self._config),
            drawing.seen,
            **{name: getattr(options, name) for name in SAMPLING},
        )
        position = len(cache[0].k)
        token = draw(p, float(self._uniform(random_key(drawing.seed), np.int32(position))))
        drawing.seen[token] = True
        return lambda: [token], drawing._replace(token=token), cache

    def logits(self, ids: Sequence[int]) -> Float[np.ndarray, "seq vocab"]:
        """Compute float64 logits after each of `ids`. Raises FloatingPointError if a logit is NaN or infinite."""
        return np.concatenate(list(self.logits_in_parts(ids)))

    def logits_in_parts(self, ids: Sequence[int], *, after: int = 0) -> Iterator[Float[np.ndarray, "rows vocab"]]:
        """Yield `logits` for `PART` ids at a time, without the logits for the first `after` ids."""
        cache = self.extend(self.start(), ids[:after]) if after else self.start()
        for start in range(after, len(ids), PART):
            logits, cache = forward(self._params, np.array(ids[start : start + PART]), cache, config=self._config)
            yield check_logits(logits)

    def with_weights(self, checkpoint: Checkpoint, *, read_from: Checkpoint | None = None) -> "ReferenceBackend":
        """Return a copy of this backend with the weights of `checkpoint`, which must have tensors of the same shapes.

        We read all weights. `read_from` is not used.
        """
        del read_from
        clone = copy(self)
        clone._params = load_reference_params(checkpoint)
        return clone


class LazyLayers(Sequence[Layer]):
    """Layers that we read each time they are indexed.

    We do not keep them, because they may not fit in memory in float64.
    """

    def __init__(self, count: int, read: Callable[[int], Layer]):
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        """Read layer `i`, or the layers of a slice. Raises IndexError beyond the last layer."""
        chosen = range(self._count)[i]
        return self._read(chosen) if isinstance(chosen, int) else [self._read(index) for index in chosen]


def load_reference_params(
    checkpoint: Checkpoint, roundings: Mapping[str, str] | None = None, *, lazily: bool = False
) -> Params:
    """Read every tensor of `checkpoint` in float64. Quantized tensors are decoded exactly.

    `roundings` comes from `model.ops.emulated`. It maps names of matrices to the rounding of the vectors that they
    multiply.
    With `lazily`, a layer is read each time it is indexed.
    """
    config, rounded_to = checkpoint.config, roundings or {}

    def rounding(matrix: np.ndarray, *names: str) -> np.ndarray:
        if names[0] not in rounded_to:
            return matrix
        to = rounded_to[names[0]]
        return RoundingArray.of(matrix, to, minima(names).reshape(*matrix.shape[:-1], -1) if to == "q8_1" else None)

    def minima(names: Sequence[str]) -> np.ndarray:
        parts = (part for name in names if (codes := checkpoint.tensors[name].codes) for part in codes.parts())
        return np.concatenate([part.minima.astype(np.float64) for part in parts if isinstance(part, CodesWithMinima)])

    def tensor(name: str) -> np.ndarray:
        stored = checkpoint.tensors[name]
        in_parts = stored.codes or stored.applies
        exact = np.concatenate(list(exact_parts(stored))) if in_parts else stored.read().astype(np.float64)
        checkpoint.release()
        return exact

    parts = by_layer(config)

    def matrix(weights: Sequence[Weight]) -> np.ndarray:
        """Read a single tensor, or stack the matrices of all experts, or concatenate the norms of all heads."""
        names = [weight.name for weight in weights]
        arrays = [tensor(name) for name in names]
        if weights[0].role is Role.EXPERT:
            return rounding(np.stack(arrays), *names)
        return rounding(np.concatenate(arrays) if len(arrays) > 1 else arrays[0], *names)  # the norms of heads

    def linear(weight: Weight) -> Linear:
        return Linear(matrix([weight]), bias(weight))

    def bias(weight: Weight) -> np.ndarray | None:
        name = weight.name.removesuffix("weight") + "bias"
        return tensor(name) if name in checkpoint.tensors else None

    def expert_biases(i: int) -> Biases:
        router, *experts = (
            np.stack([tensor(weight.name.removesuffix("weight") + "bias") for weight in parts[i][part]])
            for part in ("router", "expert_gate", "expert_up", "expert_down")
        )
        return Biases(router[0], *experts)

    def layer(i: int) -> Layer:
        tensors: dict[str, Any] = {
            part.removeprefix("head_"): linear(weights[0]) if weights[0].role is Role.MATRIX else matrix(weights)
            for part, weights in parts[i].items()
            if weights[0].role is not Role.ROUTER
        }
        biases = {
            f"{part}_bias": bias(weights[0]) for part, weights in parts[i].items() if weights[0].role is Role.NORM
        }
        if config.experts:
            [router] = parts[i]["router"]
            matrices = tensors["expert_gate"], tensors["expert_up"], tensors["expert_down"]
            ffn = Experts(tensor(router.name), *matrices, expert_biases(i) if config.expert_bias else None)
        else:
            ffn = FeedForward(tensors.get("gate"), tensors["up"], tensors["down"])
        attention: dict[str, Any] = {"q_norm": None, "k_norm": None, "attention_norm": None, "ffn_norm": None}
        if config.shared_ffn:
            [score] = parts[i]["shared_score"]
            matrices = (tensors[f"shared_{name}"].weight for name in ("gate", "up", "down"))
            attention["shared"] = SharedExpert(tensor(score.name), *matrices)
        attention |= {name: tensors[name] for name in Layer._fields if name in tensors}
        attention |= {name: biases[name] for name in Layer._fields if name in biases}
        if config.parallel_residual:
            attention |= {"ffn_norm": tensors["attention_norm"], "ffn_norm_bias": biases["attention_norm_bias"]}
        return Layer(**attention, ffn=ffn)

    outside = {part: weight for part, [weight] in parts[None].items()}
    embedding = tensor(EMBEDDING)
    return Params(
        embedding=embedding,
        layers=LazyLayers(config.layers, layer) if lazily else [layer(i) for i in range(config.layers)],
        norm=tensor(outside["norm"].name),
        norm_bias=bias(outside["norm"]),
        head=rounding(embedding, EMBEDDING) if config.tied else matrix([outside["head"]]),
    )
