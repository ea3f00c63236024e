"""The whole reference model: logits equal transformers', and laws of any Llama hold."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.reference.config import Config
from llamaspec.reference.llama import (
    Experts,
    FeedForward,
    Layer,
    Linear,
    Params,
    empty_cache,
    forward,
    greedy,
    hidden_states,
    unembed,
)
from llamaspec.reference.rope import LinearScaling, Llama3Scaling
from tests.support.families import FAMILIES, write_checkpoint
from tests.support.goldens import read_golden
from tests.support.strategies import assert_within, seeds

GOLDENS = read_golden("logits")["families"]


def test_every_family_has_its_golden():
    assert GOLDENS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_transformers(family, tmp_path):
    write_checkpoint(tmp_path, FAMILIES[family])
    checkpoint = open_checkpoint(tmp_path)
    params, config = load_reference_params(checkpoint), checkpoint.config

    golden = GOLDENS[family]
    logits, _ = forward(params, np.array(golden["tokens"]), empty_cache(config), config=config)
    exact = np.array(golden["logits"])
    assert exact.shape == (5, config.vocab)
    # The goldens are float32: over a few layers, roundings add up to a millionth of the largest logit.
    assert_within(logits[golden["positions"]], exact, 1e-5 * np.abs(exact).max())


@dataclass
class Tiny:
    """A model with random weights, scaled so that the residual stream keeps its size. Hypothesis prints its fields."""

    seed: int
    options: dict  # fields of its Config, besides the common ones

    @cached_property
    def config(self) -> Config:
        return Config(dim=6, vocab=11, context=32, ffn=5, theta=10_000.0, **self.options)

    @cached_property
    def params(self) -> Params:
        c, random = self.config, np.random.default_rng(self.seed)

        def matrix(*shape: int) -> np.ndarray:
            return random.normal(size=shape) / np.sqrt(shape[-1])

        def linear(rows: int, cols: int, bias: bool) -> Linear:
            return Linear(matrix(rows, cols), random.normal(size=rows) if bias else None)

        def norm(n: int) -> np.ndarray:
            return 1 + 0.25 * random.normal(size=n)

        def feed_forward() -> FeedForward | Experts:
            up, down = (c.ffn, c.dim), (c.dim, c.ffn)
            if c.experts:
                gate, up, down = (matrix(c.experts, *shape) for shape in (up, up, down))
                return Experts(matrix(c.experts, c.dim), gate, up, down)
            return FeedForward(*(linear(*shape, c.ffn_bias) for shape in (up, up, down)))

        def layer() -> Layer:
            q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
            return Layer(
                attention_norm=norm(c.dim),
                q=linear(q, c.dim, c.qkv_bias),
                k=linear(kv, c.dim, c.qkv_bias),
                v=linear(kv, c.dim, c.qkv_bias),
                o=linear(c.dim, q, c.o_bias),
                q_norm=norm(c.head_dim) if c.qk_norm else None,
                k_norm=norm(c.head_dim) if c.qk_norm else None,
                ffn_norm=norm(c.dim),
                ffn=feed_forward(),
            )

        layers = [layer() for _ in range(c.layers)]
        return Params(matrix(c.vocab, c.dim) * np.sqrt(c.dim), layers, norm(c.dim), matrix(c.vocab, c.dim))


dense = {
    "layers": st.integers(1, 3),
    "head_dim": st.sampled_from([2, 4, 6]),
    "eps": st.sampled_from([1e-6, 1e-5]),
    "scaling": st.sampled_from([None, LinearScaling(4.0), Llama3Scaling(8.0, 1.0, 4.0, 16)]),
    "windows": st.none() | st.tuples(*[st.none() | st.integers(1, 5)] * 3),
    "qk_norm": st.booleans(),
    "qkv_bias": st.booleans(),
    "o_bias": st.booleans(),
}
feed_forwards = [{"ffn_bias": st.booleans()}, {"experts": st.just(4), "experts_per_token": st.integers(1, 4)}]
head_counts = [{"heads": st.just(heads), "kv_heads": st.just(n)} for heads, n in [(1, 1), (3, 1), (4, 2), (2, 2)]]
options = st.one_of([st.fixed_dictionaries(dense | ffn | heads) for ffn in feed_forwards for heads in head_counts])
tinies = st.builds(Tiny, seed=seeds, options=options)
tokens = st.lists(st.integers(0, 10), min_size=1, max_size=12).map(np.array)

# Two orders of summation differ by about 1e-15 of a layer's output. With these weights, a layer increases a difference
# at most about ten times, and activations and logits are around 1; a wrong key or position changes a leading digit.
NEGLIGIBLE = 1e-10


def full(params: Params, tokens: np.ndarray, config: Config) -> np.ndarray:
    return forward(params, tokens, empty_cache(config), config=config)[0]


@given(tiny=tinies, tokens=tokens, cuts=st.lists(st.integers(0, 12), max_size=4))
def test_a_sequence_in_any_parts_as_at_once(tiny, tokens, cuts):
    params, config = tiny.params, tiny.config
    exact, exact_cache = forward(params, tokens, empty_cache(config), config=config)
    cache, logits = empty_cache(config), []
    for part in np.split(tokens, sorted(min(cut, len(tokens)) for cut in cuts)):  # some of them empty
        some, cache = forward(params, part, cache, config=config)
        logits.append(some)
    assert_within(np.concatenate(logits), exact, NEGLIGIBLE)
    for layer, exact_layer in zip(cache, exact_cache, strict=True):
        assert_within(layer.k, exact_layer.k, NEGLIGIBLE)
        assert_within(layer.v, exact_layer.v, NEGLIGIBLE)


@given(tiny=tinies, tokens=tokens, second_tokens=tokens)
def test_a_cache_can_be_continued_twice(tiny, tokens, second_tokens):
    params, config = tiny.params, tiny.config
    _, cache = forward(params, tokens, empty_cache(config), config=config)
    once, _ = forward(params, second_tokens, cache, config=config)
    forward(params, np.flip(second_tokens), cache, config=config)
    again, _ = forward(params, second_tokens, cache, config=config)
    np.testing.assert_array_equal(once, again)


@given(tiny=tinies, tokens=tokens, data=st.data())
def test_no_logit_depends_on_a_later_token(tiny, tokens, data):
    params, config = tiny.params, tiny.config
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = np.concatenate([tokens[:at], (tokens[at:] + 1) % config.vocab])
    before, after = full(params, tokens, config), full(params, changed, config)
    # These are equal in exact arithmetic. In NumPy a product rounds differently if an expert gets more or fewer tokens.
    assert_within(after[:at], before[:at], NEGLIGIBLE)
    assert np.any(after[at] != before[at])  # the token itself differs


@given(tiny=tinies, tokens=tokens, past=st.integers(1, 4), window=st.integers(1, 4))
def test_only_the_window_matters_and_only_distances(tiny, tokens, past, window):
    """A logit depends on at most 1 + layers (window - 1) tokens, and on distances only, not on positions.

    So the tokens before the window can be dropped, and the others can start at position 0.
    """
    params, config = tiny.params, dataclasses.replace(tiny.config, windows=(window,) * tiny.config.layers)
    reach = 1 + config.layers * (window - 1)
    longer = np.concatenate([np.arange(past), tokens])
    assert_within(full(params, longer[-reach:], config)[-1], full(params, longer, config)[-1], NEGLIGIBLE)


@given(tiny=tinies, prompt=tokens)
def test_greedy_is_the_argmax_of_full_passes(tiny, prompt):
    params, config = tiny.params, tiny.config
    tokens = prompt
    for token in islice(greedy(params, prompt, config=config), 5):
        assert token == np.argmax(full(params, tokens, config)[-1])
        tokens = np.append(tokens, token)


def test_greedy_takes_the_lowest_of_equals():
    config = Config(dim=2, layers=0, heads=1, kv_heads=1, head_dim=2, ffn=1, vocab=4, context=9, eps=1e-5, theta=1e4)
    head = np.array([[-1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    params = Params(np.ones((4, 2)), [], np.ones(2), head)
    assert list(islice(greedy(params, np.array([0]), config=config), 3)) == [1, 1, 1]


@given(tiny=tinies, tokens=tokens)
def test_blocks_that_say_nothing_leave_the_embedding(tiny, tokens):
    params, config = tiny.params, tiny.config

    def silent(layer: Layer) -> Layer:
        o = Linear(np.zeros_like(layer.o.weight))
        if isinstance(layer.ffn, Experts):
            return layer._replace(o=o, ffn=layer.ffn._replace(down=np.zeros_like(layer.ffn.down)))
        return layer._replace(o=o, ffn=layer.ffn._replace(down=Linear(np.zeros_like(layer.ffn.down.weight))))

    params = params._replace(layers=[silent(layer) for layer in params.layers])
    x, _ = hidden_states(params, tokens, empty_cache(config), config=config)
    np.testing.assert_array_equal(x, params.embedding[tokens])
    np.testing.assert_array_equal(
        full(params, tokens, config), unembed(params, params.embedding[tokens], config=config)
    )


@given(tiny=tinies, tokens=tokens)
def test_key_heads_can_be_stored_once_or_for_each_query_head(tiny, tokens):
    params, config = tiny.params, tiny.config
    ratio = config.heads // config.kv_heads

    def repeated(linear: Linear) -> Linear:
        def repeat(a: np.ndarray) -> np.ndarray:
            heads = a.reshape(config.kv_heads, config.head_dim, *a.shape[1:])
            return np.repeat(heads, ratio, axis=0).reshape(-1, *a.shape[1:])

        return Linear(repeat(linear.weight), None if linear.bias is None else repeat(linear.bias))

    layers = [layer._replace(k=repeated(layer.k), v=repeated(layer.v)) for layer in params.layers]
    all_heads = dataclasses.replace(config, kv_heads=config.heads)
    assert_within(full(params._replace(layers=layers), tokens, all_heads), full(params, tokens, config), NEGLIGIBLE)


@given(seed=seeds, tokens=tokens, experts_per_token=st.integers(1, 3))
def test_equal_experts_are_one_feed_forward_layer(seed, tokens, experts_per_token):
    tiny = Tiny(seed, {"layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 4, "eps": 1e-5})
    params, config = tiny.params, tiny.config

    def mixture(layer: Layer) -> Layer:
        assert isinstance(layer.ffn, FeedForward)
        router = np.random.default_rng(seed).normal(size=(3, config.dim))
        assert layer.ffn.gate is not None
        gate, up, down = (np.stack([linear.weight] * 3) for linear in (layer.ffn.gate, layer.ffn.up, layer.ffn.down))
        return layer._replace(ffn=Experts(router, gate, up, down))

    mixed = params._replace(layers=[mixture(layer) for layer in params.layers])
    mixed_config = dataclasses.replace(config, experts=3, experts_per_token=experts_per_token)
    assert_within(full(mixed, tokens, mixed_config), full(params, tokens, config), NEGLIGIBLE)


@given(tiny=tinies, tokens=tokens, power=st.integers(-3, 3))
def test_a_norms_weight_is_part_of_what_follows_it(tiny, tokens, power):
    """Moving a power of two from the next matrices' weights into the norm's weight changes no bit of the logits."""
    params, config = tiny.params, tiny.config
    scale = 2.0**power

    def moved(layer: Layer) -> Layer:
        q, k, v = (linear._replace(weight=linear.weight / scale) for linear in (layer.q, layer.k, layer.v))
        return layer._replace(attention_norm=layer.attention_norm * scale, q=q, k=k, v=v)

    folded = Params(
        params.embedding, [moved(layer) for layer in params.layers], params.norm * scale, params.head / scale
    )
    np.testing.assert_array_equal(full(folded, tokens, config), full(params, tokens, config))
