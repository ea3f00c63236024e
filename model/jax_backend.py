"""The compiled model behind a generation: two programs serve every prompt, turn and length."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Float

from model.cache import Cache, empty_cache
from model.forward import decode, forward, prefill
from model.ops import CPU, XLA, Ops
from model.options import SamplingOptions
from model.params import Params
from model.sampling import as_arrays, random_key
from reference.config import Config

BURST = 16  # tokens that decoding draws at most before it returns to the host
CHUNK = {"cpu": 64, "gpu": 256}  # prompt tokens computed at once: enough to reuse each weight, few to waste as padding


def prompt_chunk() -> int:
    """The prefill chunk of the default device, in tokens."""
    return CHUNK.get(jax.default_backend(), CHUNK["gpu"])


def choose_ops(kernels: str) -> Ops:
    """The table of ops by name: `auto` takes the one made for the default device. Raises ValueError."""
    match kernels:
        case "auto":
            return CPU if jax.default_backend() == "cpu" else XLA
        case "xla":
            return XLA
        case "cpu":
            return CPU
        case _:
            raise ValueError(f"no kernels named {kernels} in this version: choose auto, xla or cpu")


class JaxBackend:
    """A Llama on the default device, one sequence at a time."""

    burst = BURST

    def __init__(self, params: Params, config: Config, *, ops: Ops, capacity: int, chunk: int):
        self.capacity = capacity
        self._params, self._config, self._chunk = params, config, chunk
        # XLA's CPU compiler halves its vectors by default, for fear of clocking down.
        options = {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else None
        fixed = {"config": config, "ops": ops}
        jit = partial(jax.jit, donate_argnames="cache", compiler_options=options)
        self._prefill = jit(partial(prefill, **fixed))
        self._decode = jit(partial(decode, burst=BURST, **fixed))
        self._forward = jit(partial(forward, **fixed))

    def start(self) -> Cache:
        """An empty cache. It has room for a whole chunk past the capacity, since the last chunk is padded."""
        dtype = self._params.embedding.dtype
        return empty_cache(self._config, batch=1, capacity=self.capacity + self._chunk, dtype=dtype)

    def rewind(self, cache: Cache, length: int) -> Cache:
        """Forget all but the first `length` positions."""
        return cache._replace(lengths=jax.device_put(np.array([length], np.int32)))

    def extend(self, cache: Cache, ids: Sequence[int]) -> Cache:
        """Append at most a chunk of tokens to the cache."""
        tokens = np.zeros((1, self._chunk), np.int32)
        tokens[0, : len(ids)] = ids
        return self._prefill(self._params, tokens, np.array([len(ids)], np.int32), cache=cache)

    @property
    def chunk(self) -> int:
        """How many tokens `extend` takes at once."""
        return self._chunk

    def decode(
        self,
        cache: Cache,
        token: int,
        *,
        steps: int,
        seen: np.ndarray,
        seed: int,
        options: SamplingOptions,
        stops: Sequence[int],
    ) -> tuple[list[int], Cache]:
        """Feed `token` and draw up to `steps` tokens (at most `burst`), ending at one of `stops`."""
        drawn, taken, cache = self._decode(
            self._params,
            np.array([token], np.int32),
            cache=cache,
            seen=seen[None],
            keys=random_key(seed)[None],
            sampling=as_arrays(options),
            stops=np.array(stops, np.int32),
            steps=np.int32(steps),
        )
        return np.asarray(drawn)[: int(taken), 0].tolist(), cache

    def logits(self, ids: Sequence[int]) -> Float[np.ndarray, "seq vocab"]:
        """Logits for what follows each of `ids`, in float32."""
        cache, rows = self.start(), []
        for start in range(0, len(ids), self._chunk):
            part = ids[start : start + self._chunk]
            tokens = np.zeros((1, self._chunk), np.int32)
            tokens[0, : len(part)] = part
            logits, cache = self._forward(self._params, tokens, cache=cache, lengths=np.array([len(part)], np.int32))
            rows.append(np.asarray(logits)[0, : len(part)])
        return np.concatenate(rows)
