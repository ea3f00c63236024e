"""Normalized queries and keys."""

import numpy as np

from verify.mutant import f32, implementation


def qk_norm(
    q: np.ndarray, k: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, *, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    def normalized(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        heads = f32(x)
        mean = np.mean(heads * heads, axis=-1, keepdims=True)
        return (heads / np.sqrt(mean + np.float32(eps)) * f32(weight)).astype(x.dtype)

    return normalized(q, q_weight), normalized(k, k_weight)


IMPLEMENTATION = implementation(
    qk_norm,
    """
weights swapped
    - normalized(q, q_weight), normalized(k, k_weight)
    + normalized(q, k_weight), normalized(k, q_weight)
weight of q for both
    - normalized(k, k_weight)
    + normalized(k, q_weight)
keys left as they are
    - normalized(k, k_weight)
    + k.copy()
queries left as they are
    - normalized(q, q_weight)
    + q.copy()
all heads normalized together
    - np.mean(heads * heads, axis=-1, keepdims=True)
    + np.mean(heads * heads, axis=(-1, -2), keepdims=True)
normalized across heads
    - np.mean(heads * heads, axis=-1, keepdims=True)
    + np.mean(heads * heads, axis=-2, keepdims=True)
scale of the first head for every head
    - np.mean(heads * heads, axis=-1, keepdims=True)
    + np.mean(heads * heads, axis=-1, keepdims=True)[..., :1, :]
mean square of the whole sequence
    - np.mean(heads * heads, axis=-1, keepdims=True)
    + np.mean(heads * heads, axis=(-1, -3), keepdims=True)
Euclidean norm for root mean square
    - np.mean(heads * heads, axis=-1, keepdims=True)
    + np.sum(heads * heads, axis=-1, keepdims=True)
eps outside the root
    - np.sqrt(mean + np.float32(eps))
    + (np.sqrt(mean) + np.float32(eps))
weights left out
    -  * f32(weight)
    +
squares in float16
    - heads * heads, axis
    + f16(heads * heads), axis
right up to heads of 128
    - np.mean(heads * heads, axis=-1, keepdims=True)
    + np.mean((heads * heads)[..., :128], axis=-1, keepdims=True)
right up to 32 heads
    - heads = f32(x)
    + heads = f32(x[..., np.arange(x.shape[-2]) % 32, :])
right up to 128 positions
    - heads = f32(x)
    + heads = f32(x[:, np.arange(x.shape[1]) % 128])
""",
)
