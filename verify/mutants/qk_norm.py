"""Normalized queries and keys, and their mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation


def qk_norm(
    q: np.ndarray, k: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, *, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    def normalized(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        heads = f32(x)
        mean = np.mean(heads * heads, axis=-1, keepdims=True)
        return (heads / np.sqrt(mean + np.float32(eps)) * f32(weight)).astype(x.dtype)

    return normalized(q, q_weight), normalized(k, k_weight)


def wide_qk_norm(
    q: np.ndarray, k: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, *, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    def normalized(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        batch, seq, heads, head_dim = x.shape
        squares = np.zeros((batch, seq), np.float32)
        for head in range(heads):
            squares += np.sum(f32(x[:, :, head]) ** 2, axis=-1)
        mean = squares / np.float32(heads * head_dim)
        root = np.sqrt(mean + np.float32(eps))[..., None, None]
        return (f32(x) / root * f32(weight).reshape(heads, head_dim)).astype(x.dtype)

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
right up to 4,096 heads
    - heads = f32(x)
    + heads = f32(x[..., np.arange(x.shape[-2]) % 4096, :])
right up to 4,096 positions
    - heads = f32(x)
    + heads = f32(x[:, np.arange(x.shape[1]) % 4096])
""",
)
WIDE = implementation(
    wide_qk_norm,
    """
every head normalized separately
    - root = np.sqrt(mean + np.float32(eps))[..., None, None]
    + root = np.sqrt(np.mean(f32(x) ** 2, axis=-1, keepdims=True) + np.float32(eps))
weight of the first head for every head
    - f32(weight).reshape(heads, head_dim)
    + f32(weight)[:head_dim]
weight with heads and features swapped
    - f32(weight).reshape(heads, head_dim)
    + f32(weight).reshape(head_dim, heads).T
weights in reverse
    - f32(weight).reshape
    + f32(weight)[::-1].reshape
weights left out
    -  * f32(weight).reshape(heads, head_dim)
    +
mean over a head's features
    - np.float32(heads * head_dim)
    + np.float32(head_dim)
mean over the heads
    - np.float32(heads * head_dim)
    + np.float32(heads)
sum for mean
    - squares / np.float32(heads * head_dim)
    + squares
mean over the width of q for k, too
    - np.float32(heads * head_dim)
    + np.float32(q.shape[2] * head_dim)
last head left out of the mean
    - for head in range(heads)
    + for head in range(max(heads - 1, 1))
mean of the first token for every token
    - np.sqrt(mean + np.float32(eps))[..., None, None]
    + np.sqrt(mean[:, :1] + np.float32(eps))[..., None, None]
eps outside the root
    - np.sqrt(mean + np.float32(eps))
    + (np.sqrt(mean) + np.float32(eps))
always an eps of 10^-5
    - np.float32(eps)
    + np.float32(1e-5)
keys left as they are
    - normalized(k, k_weight)
    + k.copy()
queries by the norm of keys
    - normalized(q, q_weight), normalized(k, k_weight)
    + normalized(q, np.resize(k_weight, len(q_weight))), normalized(k, k_weight)
squares in bfloat16
    - np.sum(f32(x[:, :, head]) ** 2, axis=-1)
    + np.sum(bf16(f32(x[:, :, head]) ** 2), axis=-1)
sum in float16
    - squares += np.sum(f32(x[:, :, head]) ** 2, axis=-1)
    + squares = f16(squares + np.sum(f32(x[:, :, head]) ** 2, axis=-1))
right up to 32 heads
    - for head in range(heads)
    + for head in range(min(heads, 32))
right up to heads of 128
    - f32(x[:, :, head]) ** 2
    + f32(x[:, :, head, :128]) ** 2
""",
)
