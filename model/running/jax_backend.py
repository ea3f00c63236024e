"""A Llama model on JAX's default device, which runs one sequence at a time."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from llamaspec.model.cache import Cache, cache_bytes
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.device import Device
from llamaspec.model.forward import DecodeState, forward, state_after
from llamaspec.model.insight.cost import decode_cost
from llamaspec.model.ops.choice import OpsChoice, summarize
from llamaspec.model.options import SamplingOptions
from llamaspec.model.running.backend import check_logits
from llamaspec.model.running.memory import gigabytes, shortage_named
from llamaspec.model.running.programs import STOPS, Layout, Programs
from llamaspec.model.sampling import as_arrays, random_key
from llamaspec.model.weights.loading import load_params
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config

NOT_EXACT = "no speculation: verifying a draft does not give the bits of decoding on this machine"
CHECKED = 4  # number of tokens for which we compare `verify` with `decode` when a model is loaded


class Drawing(NamedTuple):
    """A completion in progress, on the device."""

    text: DecodeState
    fixed: tuple[Any, ...]  # arguments of `decode` that do not change: keys, sampling options, stops
    greedy: bool


def describe_run(dtype: np.dtype, device: Device, choice: OpsChoice) -> str:
    """Describe in one line how a model runs: its dtype, the device, and on a GPU how many ops run without a kernel."""
    running = f"{dtype} on {device}"
    if device.platform == "cpu":
        return running
    unmeasured = f" ({device.kernels})" if choice.kernels and device.kernels != "measured" else ""
    return f"{running}; {summarize(choice)}{unmeasured}"


class JaxBackend:
    """A `Backend` that runs compiled programs, for a batch of one sequence."""

    def __init__(
        self, params: Params, programs: Programs, config: Config, *, choice: OpsChoice, layout: Layout, device: Device
    ):
        """Run `programs` with the weights `params`.

        The programs were compiled for `layout` and `device`, and call the ops of `choice`. Raises ValueError if
        `layout` has several sequences.
        """
        if layout.batch != 1:
            raise ValueError(f"layout.batch: expected 1 (a backend runs one sequence), got {layout.batch}")
        self.capacity, self.chunk, self.burst = layout.capacity, layout.widest, layout.burst
        # With 0, a GPU would be idle for the milliseconds that the host takes to launch a burst. On a CPU, the host is
        # the device.
        self.ahead = 0 if device.platform == "cpu" else 1
        self.choice, self.device = choice, device
        self._layout = layout
        self._verifies_exactly: dict[bool, bool] = {}  # for each program that verifies: whether its bits are exact
        self._params, self._programs, self._config = params, programs, config
        self._forward = jax.jit(partial(forward, config=config, ops=choice.ops))
        self._put: Callable[[Any], Any] = jax.device_put  # copies from the host to the device

    def describe(self) -> str:
        """Describe in one line how the model runs: its dtype, the device, and on a GPU how many ops run without a
        kernel.
        """
        running = describe_run(self._params.embedding.dtype, self.device, self.choice)
        return running if all(self._verifies_exactly.values()) else f"{running}; {NOT_EXACT}"

    def bytes_read(self, position: int | float) -> float:
        """Count the bytes that a decoding step after `position` tokens must read."""
        layout = self._layout
        cost = decode_cost(
            self._params, self._config, position=position, batch=layout.batch, cache_dtype=layout.cache_dtype
        )
        return cost.bytes

    def start(self) -> Cache:
        """Make an empty cache. Raises MemoryError if the device has too little memory for it."""
        layout = self._layout
        size = cache_bytes(self._config, batch=layout.batch, capacity=layout.rows, dtype=layout.cache_dtype)
        with shortage_named(f"{gigabytes(size)} of cache"):
            return layout.empty_cache(self._config)

    def rewind(self, cache: Cache, length: int) -> Cache:
        """Return the cache, cut to its first `length` positions."""
        return cache._replace(lengths=self._put(_counts(length)))

    def extend(self, cache: Cache, ids: Sequence[int]) -> Cache:
        """Append the keys and values of `ids` to the cache, one chunk at a time (see `Layout.parts`)."""
        start = 0
        for width, count in self._layout.parts(len(ids)):
            part = ids[start : start + count]
            cache = self._programs.prefill(width)(self._params, _padded(part, width), cache, _counts(count))
            start += count
        return cache

    def begin(
        self, token: int, *, seen: Bool[np.ndarray, " vocab"], seed: int, options: SamplingOptions, stops: Sequence[int]
    ) -> Drawing:
        """Start a completion after `token`. The completion ends at one of the ids `stops`.

        Raises ValueError for more than `STOPS` stop ids.
        """
        if len(stops) > STOPS:
            raise ValueError(f"expected at most {STOPS} ids that end a text, got {len(stops)}")
        ends = np.array([*stops, *[-1] * (STOPS - len(stops))], np.int32)
        fixed = self._put((random_key(seed)[None], as_arrays(options), ends))
        return Drawing(self._put(state_after(np.array([token]), seen[None])), fixed, options.greedy)

    def decode(self, cache: Cache, drawing: Drawing, *, steps: int) -> tuple[Callable[[], list[int]], Drawing, Cache]:
        """Start to draw up to `steps` tokens. `steps` must be at most `burst`.

        Returns a function that waits for the tokens and returns them; also returns the new state of the completion, and
        the cache.
        """
        drawn, steps_taken, text, cache = self._programs.decode(drawing.greedy)(
            self._params, drawing.text, cache, *drawing.fixed, np.int32(steps)
        )
        return lambda: np.asarray(drawn)[: int(steps_taken), 0].tolist(), drawing._replace(text=text), cache

    def drafts(self, *, greedy: bool) -> int:
        """Return the largest number of tokens in a draft (see `Verifier.drafts`).

        The first call compares `verify` with `decode`. If their bits differ, there are no drafts.
        """
        if not self._layout.drafts:
            return 0
        if greedy not in self._verifies_exactly:
            self._verifies_exactly[greedy] = self._compare(greedy=greedy)
        return self._layout.drafts if self._verifies_exactly[greedy] else 0

    def verify(
        self, cache: Cache, drawing: Drawing, draft: Sequence[int]
    ) -> tuple[Callable[[], list[int]], Drawing, Cache]:
        """Start to draw up to len(draft) + 1 tokens, with the results of `decode` (see `Verifier.verify`)."""
        drafted = np.zeros(self._layout.drafts, np.int32)
        drafted[: len(draft)] = draft
        drawn, steps_taken, text, cache = self._programs.verify(drawing.greedy)(
            self._params, drawing.text, cache, *drawing.fixed, drafted, np.int32(len(draft))
        )
        return lambda: np.asarray(drawn)[: int(steps_taken)].tolist(), drawing._replace(text=text), cache

    def _compare(self, *, greedy: bool) -> bool:
        """Return whether `verify` computes the same bits as `decode`, by comparing both for a few tokens."""
        count = min(CHECKED, self._layout.drafts, self.capacity)
        options = SamplingOptions(temperature=0.0 if greedy else 1.0)

        def run(draw: Callable[..., Any]) -> tuple[list[int], list[bytes]]:
            drawing = self.begin(0, seen=np.zeros(self._config.vocab, bool), seed=0, options=options, stops=())
            read, _, cache = draw(self.start(), drawing)
            return read(), [np.asarray(array[:, :, :count]).tobytes() for layer in cache.layers for array in layer]

        expected = run(partial(self.decode, steps=count))
        return run(partial(self.verify, draft=expected[0][:-1])) == expected

    def logits(self, ids: Sequence[int]) -> Float[np.ndarray, "seq vocab"]:
        """Compute float32 logits after each of `ids`. Raises FloatingPointError if a logit is NaN or infinite."""
        return np.concatenate(list(self.logits_in_parts(ids)))

    def logits_in_parts(self, ids: Sequence[int], *, after: int = 0) -> Iterator[Float[np.ndarray, "rows vocab"]]:
        """Yield `logits` one chunk at a time, without the logits for the first `after` ids."""
        cache, chunk = self.start(), self._layout.chunk
        for start in range(0, after, self.chunk):
            cache = self.extend(cache, ids[start : min(start + self.chunk, after)])
        for start in range(after, len(ids), chunk):
            part = ids[start : start + chunk]
            logits, cache = self._forward(self._params, _padded(part, chunk), cache, lengths=_counts(len(part)))
            yield check_logits(np.asarray(logits)[0, : len(part)])

    def with_weights(self, checkpoint: Checkpoint, *, read_from: Checkpoint | None = None) -> "JaxBackend":
        """Return a backend with the same programs and with the weights of `checkpoint`.

        The tensors of `checkpoint` must have the same shapes and types of codes as before. `read_from` is the
        checkpoint of the current weights. If it is given, we do not read a tensor again that is equal in both
        checkpoints.
        """
        clone, loaded = copy(self), (read_from, self._params) if read_from else None
        dtype, positions = self._params.embedding.dtype, len(self._params.rope.cos)
        clone._params = load_params(checkpoint, dtype=dtype, positions=positions, loaded=loaded, device=self.device)
        return clone


def _padded(ids: Sequence[int], chunk: int) -> Int[np.ndarray, "1 chunk"]:
    tokens = np.zeros((1, chunk), np.int32)
    tokens[0, : len(ids)] = ids
    return tokens


def _counts(count: int) -> Int[np.ndarray, "1"]:
    """Make the array of token counts that programs take, with one count per sequence."""
    return np.array([count], np.int32)
