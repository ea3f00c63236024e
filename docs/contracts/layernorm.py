"""LayerNorm (Ba, Kiros & Hinton, 2016, https://arxiv.org/abs/1607.06450), with a bound derived from the definition."""

import numpy as np

from llamaspec.verify.contract import Claim, Law, Trial, as_float64, independent
from llamaspec.verify.declare import declare, sizes, values
from llamaspec.verify.mutant import f32, implementation


def layernorm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, *, eps: float) -> np.ndarray:
    """Center and scale each row: (x - mean) / sqrt(variance + eps) * weight + bias."""
    centered = x - np.mean(x, axis=-1, keepdims=True)
    return centered / np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + eps) * weight + bias


def _shift(trial: Trial) -> Claim | None:
    x = trial.arguments["x"]
    shifted = (x + 4).astype(x.dtype)
    if not np.array_equal(as_float64(shifted), as_float64(x) + 4) or np.max(np.abs(as_float64(x))) > 64:
        return None
    return Claim(trial.again(x=shifted)[0], trial.outputs[0], 8 * trial.bounds[0] + 1e-3)


CONTRACT = declare(
    layernorm,
    arrays={"x": "rows dim", "weight": "dim", "bias": "dim"},
    sizes={"rows": [1, 2, 3, 5], "dim": sizes(8, 32, 128, most=257)},
    options={"eps": [1e-5, 1e-6, 0.5]},
    draws={"x": values(-6, 6)},
    laws=[independent("a row", "x"), Law("layernorm(x + 4) is layernorm(x)", _shift)],
)


def right(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, *, eps: float) -> np.ndarray:
    """Compute in float32, a row at a time, and round once."""
    y = np.full(x.shape, np.nan, x.dtype)
    for row in range(len(x)):
        wide = f32(x[row])
        mean = np.sum(wide) / np.float32(wide.size)
        variance = np.sum((wide - mean) ** 2) / np.float32(wide.size)
        y[row] = (wide - mean) / np.sqrt(variance + np.float32(eps)) * f32(weight) + f32(bias)
    return y


MUTANTS = implementation(
    right,
    """
mean left out
    - mean = np.sum(wide) / np.float32(wide.size)
    + mean = np.float32(0)
eps outside the root
    - np.sqrt(variance + np.float32(eps))
    + (np.sqrt(variance) + np.float32(eps))
eps left out
    -  + np.float32(eps)
    +
variance of a sample
    - variance = np.sum((wide - mean) ** 2) / np.float32(wide.size)
    + variance = np.sum((wide - mean) ** 2) / np.float32(max(wide.size - 1, 1))
variance from the mean of squares
    - variance = np.sum((wide - mean) ** 2) / np.float32(wide.size)
    + variance = np.sum(wide**2) / np.float32(wide.size) - mean**2
bias left out
    -  + f32(bias)
    +
bias scaled
    - * f32(weight) + f32(bias)
    + * (f32(weight) + f32(bias))
mean in bfloat16
    - mean = np.sum(wide) / np.float32(wide.size)
    + mean = bf16(np.sum(wide) / np.float32(wide.size))
right up to 1,024 features
    - np.sum(wide)
    + np.sum(wide[:1024])
right up to 64 rows
    - range(len(x))
    + range(min(len(x), 64))
""",
    op="layernorm",
)
