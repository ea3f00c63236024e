"""The law of speculation: with drafts, a text is the same as without them.

The law is checked with the real `prefill`, `decode` and `verify` on a toy model of integers. Its sums are exact in any
order, so it needs no ops with equal bits, and compiles fast. A text depends on every key in the cache, on positions, on
penalties and on the seed.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llamaspec.model import forward
from llamaspec.model.cache import extended
from llamaspec.model.device import default_device
from llamaspec.model.generation import Generation
from llamaspec.model.ops.choice import OpsChoice
from llamaspec.model.ops.table import Ops
from llamaspec.model.options import SamplingOptions
from llamaspec.model.running.jax_backend import JaxBackend
from llamaspec.model.running.programs import Layout, Programs
from llamaspec.model.running.session import Session
from llamaspec.model.running.speculation import Speculation
from llamaspec.model.weights.loading import load_params
from llamaspec.reference.config import Config
from tests.model.test_generation import Alphabet
from tests.support.random_models import random_checkpoint

VOCAB, CONTEXT, CHUNK, BURST, DRAFTS = 12, 48, 8, 4, 3
CONFIG = Config(
    dim=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8, vocab=VOCAB, context=CONTEXT, eps=1e-5, theta=10_000.0
)
TABLE = np.random.default_rng(0).integers(0, 97, (VOCAB, CONFIG.dim)).astype(np.float32)
STOP = 11  # the token that ends a text


def _norm_qkv(x, layer, cache, positions, *, config, mean=None):
    q = x[:, :, None]
    return q, extended(cache, q, q * (positions.at[:, :, None, None] % 5 + 1), positions.at)


def _attend(q, cache, positions, *, window, config, sinks=None):
    rows = jnp.arange(cache.v.shape[2])
    visible = rows <= positions.at[..., None]  # [batch, seq, rows]
    return jnp.sum(jnp.where(visible[..., None], cache.v[:, 0][:, None] * (rows[:, None] % 7 + 1), 0), axis=2) % 97


def _norm_logits(x, params, *, config):
    scores = lax.dot_general(x, jnp.asarray(TABLE), (((x.ndim - 1,), (1,)), ((), ())), lax.Precision.HIGHEST) % 31
    return scores / 4  # exact, with near-ties


TOY = Ops(
    norm_qkv=_norm_qkv,
    attend=_attend,
    project_add=lambda h, layer, x, *, total=None: (x + h) % 97,
    norm_gate_up=lambda x, layer, *, config: x,
    down_add=lambda g, layer, x, *, total=None: x,
    moe_add=lambda x, layer, *, config, total=None: x,
    norm_logits=_norm_logits,
)


@cache
def weights():
    params = load_params(random_checkpoint(CONFIG, seed=0), dtype=np.dtype(np.float32), positions=CONTEXT + CHUNK)
    return params._replace(embedding=jnp.asarray(TABLE))


@cache
def programs(verify: Callable = forward.verify) -> Programs:
    """Compile the programs of the toy model, with `verify` or a mutant of it, at their first use."""
    fixed: dict[str, Any] = {"config": CONFIG, "ops": TOY}
    read = jax.jit(partial(forward.prefill, **fixed))
    by_greedy = (False, True)
    draw = {greedy: jax.jit(partial(forward.decode, **fixed, greedy=greedy, burst=BURST)) for greedy in by_greedy}
    check = {greedy: jax.jit(partial(verify, **fixed, greedy=greedy)) for greedy in by_greedy}
    if verify is not forward.verify:
        draw, read = {greedy: programs().decode(greedy) for greedy in by_greedy}, programs().prefill(CHUNK)
    return Programs(lambda width: read, draw.__getitem__, check.__getitem__)


def backend(verify: Callable = forward.verify, *, capacity: int = CONTEXT) -> JaxBackend:
    layout = Layout(1, capacity, CHUNK, BURST, np.dtype(np.float32), drafts=DRAFTS)
    layout = layout._replace(chunk=CHUNK + CONTEXT - capacity)  # equal shapes for every capacity
    choice = OpsChoice("cpu", TOY, (), {})
    made = JaxBackend(weights(), programs(verify), CONFIG, choice=choice, layout=layout, device=default_device())
    made._layout = layout._replace(chunk=CHUNK, capacity=CONTEXT)
    made.chunk = CHUNK
    return made


class Letters(Alphabet):
    """A tokenizer with a letter for each token."""

    vocab, bos, eos, special = VOCAB, None, STOP, {}

    def bytes_of(self, token: int) -> bytes:
        return b"abcdefghijkl"[token : token + 1]

    first_bytes_of = bytes_of


class ScriptedSpeculation(Speculation):
    """Drafts the text that will come, with random mistakes, at random moments."""

    def __init__(
        self,
        verifier: Any,
        ids: Sequence[int],
        *,
        future: Sequence[int],
        draw: random.Random,
        most: int = DRAFTS,
        vocab: int = VOCAB,
    ):
        super().__init__(verifier, ids, most=most)
        self._future, self._draw, self._at, self._vocab = [*future], draw, 0, vocab

    def draft(self, most: int) -> list[int]:
        count = max(0, min(most, self._draw.choice([0, 1, self._most, self._most])))
        draft = [*self._future[self._at :], *self._draw.choices(range(self._vocab), k=count)][:count]
        if draft and self._draw.random() < 0.5:
            draft[self._draw.randrange(count)] = self._draw.randrange(self._vocab)
        return draft

    def drew(self, drawn: Sequence[int], draft: Sequence[int]) -> None:
        assert not draft or len(drawn) <= len(draft) + 1
        self._at += len(drawn)


def check(
    seed: int,
    *,
    verify: Callable = forward.verify,
    session: type[Session] = Session,
    generation: type[Generation] = Generation,
) -> None:
    """Draw two turns of a conversation, and check that drafts do not change them, nor the cache after them."""
    draw = random.Random(seed)
    capacity = draw.choice([CONTEXT, CONTEXT - 12, CONTEXT - 30])
    options = SamplingOptions(
        temperature=draw.choice([0.0, 0.0, 0.5, 2.0]),
        top_k=draw.choice([0, 3]),
        top_p=draw.choice([1.0, 0.8]),
        min_p=draw.choice([0.0, 0.1]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.5, 0.5]),
    )
    stops = frozenset({STOP} if draw.random() < 0.5 else ())
    stop_texts = ["".join(draw.choices("abcdefgh", k=draw.choice([1, 2])))] if draw.random() < 0.4 else []
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.randrange(1, 9))] for _ in range(2)]
    most = draw.choice([1, 3, 9, 40])
    plain = session(backend(capacity=capacity), vocab=VOCAB)
    drafted_backend = backend(verify, capacity=capacity)
    drafted = session(drafted_backend, vocab=VOCAB)
    text: list[int] = []
    for prompt in prompts:
        ids = [*text, *prompt][:capacity]

        def generate(session: Session, speculation: Speculation | None, ids: Sequence[int] = ids) -> Generation:
            bursts = session.bursts(
                ids, max_new_tokens=most, options=options, seed=seed, stops=stops, speculation=speculation
            )
            about: dict[str, Any] = {"stop_texts": stop_texts, "stops": stops, "seed": seed, "prompt_ids": ids}
            result = generation(bursts, Letters(), prompt="a", **about)
            assert "".join(token.text for token in result) == result.completion
            return result

        expected = generate(plain, None)
        script = ScriptedSpeculation(drafted_backend, ids, future=expected.ids, draw=draw)
        actual = generate(drafted, script)
        assert actual.ids == expected.ids
        assert (actual.completion, actual.finish_reason) == (expected.completion, expected.finish_reason)
        common = min(len(plain.ids), len(drafted.ids))  # after a stop string, either may have drawn more
        assert plain.ids[:common] == drafted.ids[:common]
        for before, after in zip(cached(plain, common), cached(drafted, common), strict=True):
            np.testing.assert_array_equal(before, after)
        for other in (plain, drafted):
            assert other._cache is not None and int(other._cache.lengths[0]) == len(other.ids)
        text = [*ids, *expected.ids]


def cached(session: Session, count: int) -> list[np.ndarray]:
    """Return the keys and values of a session's first `count` tokens."""
    assert session._cache is not None
    return [np.asarray(array)[:, :, :count] for array in itertools.chain(*session._cache.layers)]
