"""Products with columns split over two devices: bias and residual are added once, after the float32 partial sums."""

import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.model.candidates.kernels import run
from llamaspec.model.ops import gpu
from llamaspec.model.ops.xla import XLA
from llamaspec.model.weights.params import FeedForward, Layer, Linear

ROWS, COLS = 16, 512


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bias_and_residual_are_added_once_after_the_sum(dtype):
    rng = np.random.default_rng(0)
    weight, h, x, bias = (
        jnp.asarray(rng.normal(size=s), dtype) for s in ((ROWS, COLS), (1, 1, COLS), (1, 1, ROWS), ROWS)
    )

    def layer(weight, bias) -> Layer:
        linear = Linear(weight, bias)
        return Layer(x[0, 0], linear, None, None, linear, x[0, 0], FeedForward(linear, linear))

    halves = [(weight[:, :256], h[..., :256]), (weight[:, 256:], h[..., 256:])]
    for op in ("project_add", "down_add"):
        partial = []

        def keep(y, partial=partial):
            assert y.dtype == jnp.float32
            partial.append(y)
            return sum(partial)

        *_, actual = [run(getattr(gpu, op), v, layer(w, bias), x, total=keep) for w, v in halves]
        expected = getattr(XLA, op)(h, layer(weight, bias), x)
        assert actual.dtype == dtype and len(partial) == 2
        size = np.abs(np.asarray(expected, np.float64)).max()
        assert (
            np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64)).max()
            <= size * jnp.finfo(dtype).eps * 4
        )
