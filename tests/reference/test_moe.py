import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.linear import linear
from llamaspec.reference.moe import moe, route
from llamaspec.reference.softmax import softmax
from llamaspec.reference.swiglu import swiglu
from tests.support.strategies import U, assert_within, noises, seeds, sizes

TOKENS, DIM, FFN = 5, 3, 4
experts = st.integers(1, 6)


def draw_layer(noise, experts):
    """Draw x and the weights of the router and of the experts: gate, up and down."""
    noise.blank = False
    return noise(TOKENS, DIM), noise(experts, DIM), *(noise(experts, *s) for s in [(FFN, DIM), (FFN, DIM), (DIM, FFN)])


def opinions(x, gate, up, down):
    """Return two arrays [experts, tokens, dim]: every expert's output for every token, and the outputs' magnitudes.

    The error bound of an output is a multiple of its magnitude.
    """
    hidden = [swiglu(linear(x, g), linear(x, u)) for g, u in zip(gate, up, strict=True)]
    says = np.stack([linear(h, d) for h, d in zip(hidden, down, strict=True)])
    # gate and up are sums of DIM terms, and silu changes by at most 1.1 times the change of its argument.
    sizes = [
        linear((linear(np.abs(x), np.abs(g)) + 1) * linear(np.abs(x), np.abs(u)), np.abs(d))
        for g, u, d in zip(gate, up, down, strict=True)
    ]
    return says, np.stack(sizes) * (4 * DIM + FFN + 20)


@given(noise=noises, experts=experts, data=st.data())
def test_definition(noise, experts, data):
    """A token's output is the mean of its chosen experts' outputs, weighted by a softmax over these experts' logits."""
    n = data.draw(st.integers(1, experts))
    x, router, gate, up, down = draw_layer(noise, experts)
    logits = linear(x, router)
    says, sizes = opinions(x, gate, up, down)
    exact, bound = np.zeros((TOKENS, DIM)), np.zeros((TOKENS, DIM))
    for t in range(TOKENS):
        best = sorted(range(experts), key=lambda e: (-softmax(logits)[t, e], e))[:n]
        weights = softmax(logits[t, best])
        exact[t] = weights @ says[best, t]
        # The rounding of an exponent is relative to the distance between its logit and the largest logit.
        spread = logits[t].max() - logits[t, best].min()
        bound[t] = weights @ (sizes[best, t] + np.abs(says[best, t]) * (4 * spread + 4 * experts + 20))
    assert_within(moe(x, router, gate, up, down, experts_per_token=n), exact, U * bound + 1e-300)


@given(noise=noises, experts=experts)
def test_all_experts_are_the_full_mixture(noise, experts):
    x, router, gate, up, down = draw_layer(noise, experts)
    says, sizes = opinions(x, gate, up, down)
    p = softmax(linear(x, router)).T[..., None]
    bound = np.sum(p * (sizes + np.abs(says) * (4 * experts + 20)), axis=0)
    actual = moe(x, router, gate, up, down, experts_per_token=experts)
    assert_within(actual, np.sum(p * says, axis=0), U * bound + 1e-300)


@given(noise=noises, experts=experts, data=st.data())
def test_equal_experts_are_one(noise, experts, data):
    n = data.draw(st.integers(1, experts))
    x, router, gate, up, down = draw_layer(noise, experts)
    for weights in (gate, up, down):
        weights[:] = weights[0]
    [says, *_], [size, *_] = opinions(x, gate, up, down)
    actual = moe(x, router, gate, up, down, experts_per_token=n)
    assert_within(actual, says, U * (size + np.abs(says) * (2 * experts + 8)))


@given(noise=noises, experts=experts, data=st.data())
def test_names_of_the_experts_do_not_matter(noise, experts, data):
    n = data.draw(st.integers(1, experts))
    order = np.array(data.draw(st.permutations(range(experts))))
    x, *layer = draw_layer(noise, experts)
    probabilities = np.sort(softmax(linear(x, layer[0])), axis=-1)
    ties = np.any(np.diff(probabilities, axis=-1) == 0, axis=-1)  # then the lower index is chosen
    chosen, weights = route(x, layer[0], experts_per_token=n)
    chosen_again, weights_again = route(x, layer[0][order], experts_per_token=n)
    np.testing.assert_array_equal(order[chosen_again][~ties], chosen[~ties])
    assert_within(weights_again[~ties], weights[~ties], 4 * experts * U)

    says, sizes = opinions(x, *layer[1:])
    before = moe(x, *layer, experts_per_token=n)
    after = moe(x, *(a[order] for a in layer), experts_per_token=n)
    bound = U * np.sum(sizes + np.abs(says) * (8 * experts + 40), axis=0)
    assert_within(after[~ties], before[~ties], bound[~ties])


@given(noise=noises, experts=experts, data=st.data())
def test_weights_are_a_distribution_over_distinct_experts_the_best_first(noise, experts, data):
    n = data.draw(st.integers(1, experts))
    chosen, weights = route(noise(TOKENS, DIM), noise(experts, DIM), experts_per_token=n)
    assert chosen.shape == weights.shape == (TOKENS, n)
    assert all(len(set(row)) == n for row in chosen.tolist())
    assert_within(weights.sum(axis=-1), np.ones(TOKENS), 4 * experts * U)
    assert np.all(weights >= 0) and np.all(np.diff(weights, axis=-1) <= 0)


@given(seed=seeds, experts=sizes(20), data=st.data())
def test_ties_go_to_the_lower_index(seed, experts, data):
    """Equal logits go to the expert with the lower index.

    The draws have many experts and only three different logits, because some sorts break ties wrongly only in long
    rows.
    """
    n = data.draw(st.integers(1, experts))
    router = np.random.default_rng(seed).integers(0, 3, (experts, 1)).astype(np.float64)
    chosen, _ = route(np.ones((1, 1)), router, experts_per_token=n)
    assert chosen[0].tolist() == sorted(range(experts), key=lambda e: -router[e, 0])[:n]


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_each_token_alone(tokens):
    random = np.random.default_rng(0)
    layer = [random.normal(size=s) for s in [(4, DIM), (4, FFN, DIM), (4, FFN, DIM), (4, DIM, FFN)]]
    x = random.normal(size=(tokens, DIM))
    singles = [moe(token[None], *layer, experts_per_token=2) for token in x]
    together = moe(x, *layer, experts_per_token=2)
    assert together.shape == x.shape
    assert_within(together, np.concatenate([np.zeros((0, DIM)), *singles]), 1e-13)
