"""Weights that are hard to quantize, for tests and for the scripts that make goldens. Only their seeds are stored."""

from dataclasses import dataclass

import numpy as np

KINDS = (
    *("normal", "uniform", "student", "outliers", "one outlier", "shifted", "equal", "lonely", "denormal", "zero"),
    *("halves", "wide halves", "near ties"),
)


@dataclass(frozen=True)
class Weights:
    """A recipe that draws weights when called.

    It has only these few fields, so that hypothesis prints it briefly and can shrink it.
    """

    kind: str
    seed: int = 0
    exponent: int = 0  # typical magnitude is 2**exponent, except for denormals and zeros

    def __call__(self, *shape: int) -> np.ndarray:
        """Draw float32 weights [rows, cols] from RandomState, which gives the same numbers on every machine.

        >>> Weights("lonely", seed=1)(1, 4)
        array([[ 0.       , -0.6117564,  0.       ,  0.       ]], dtype=float32)
        """
        random = np.random.RandomState(self.seed)
        w = random.standard_normal(shape)
        match self.kind:
            case "normal":
                pass
            case "uniform":
                w = random.uniform(-1, 1, shape)
            case "student":  # 2 degrees of freedom: infinite variance
                w = random.standard_t(2, shape)
            case "outliers":  # a few weights are 64 times larger
                w[random.uniform(size=shape) < 1 / 32] *= 64
            case "one outlier":  # one of each 32 weights is 64 times larger
                at = np.arange(0, w.size, 32) + random.randint(0, 32, -(-w.size // 32))
                at = at[at < w.size]
                w.flat[at] = np.copysign(64, w.flat[at])
            case "shifted":  # nearly all have one sign
                w += 4
            case "equal":
                w[:] = w.flat[0]
            case "lonely":  # zeros, except for about one weight in 32
                w[random.permutation(w.size).reshape(shape) % 32 != 0] = 0
            case "halves" | "wide halves":  # ties for steps of 1 and of 2
                low, high = (-16, 15) if self.kind == "halves" else (-127, 127)
                w = random.randint(2 * low, 2 * high + 1, shape) / 2
                w.flat[::32], w.flat[1::32] = low, high
            case "near ties":  # as near to the middle of two steps (127ths of the largest weight) as float32 allows
                top = np.float64(np.float32(np.abs(w).max()))
                w = (random.randint(-126, 126, shape) + 0.5) * (top / 127)
                w.flat[::32] = top
            case "denormal":
                return (w * 100 * 2.0**-149).astype(np.float32)
            case "zero":
                return np.zeros(shape, np.float32)
            case _:
                raise ValueError(f"no weights are called {self.kind}")
        largest = np.finfo(np.float32).max
        return np.clip(w * 2.0**self.exponent, -largest, largest).astype(np.float32)
