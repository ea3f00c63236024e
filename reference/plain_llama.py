r"""Llama 3 (https://arxiv.org/abs/2407.21783), the whole model and nothing else: tokens in, logits out.

A token's number selects its first vector x. Each block adds to x twice: first the output of attention, which reads the
earlier tokens, then the output of a feed-forward layer, which reads only this token.

    x = E[token]
    x <- x + W_o attention(rope(W_q n), rope(W_k n), W_v n)        n = rmsnorm(x)
    x <- x + W_down swiglu(W_gate n, W_up n)                       n = rmsnorm(x)
    logits = W_head rmsnorm(x)

The functions are on the pages before this one. Llama 3 8B has these sizes:

    dim       4096         ffn       14336
    heads     32           kv_heads  8
    head_dim  128          layers    32
    vocab     128,256      theta     500,000
    context   8192         eps       10^-5

Count its weights: a layer has 2 dim^2 for q and o, 2 dim 1024 for k and v, and 3 dim ffn, which are 218 million; 32
layers, the embedding and the head make 8.03 billion. In bfloat16 they take 16 GB.

The page `llama` has the same function with a cache, so that a new token does not compute the old ones again, and with
the switches of other families. On a model without switches, both give the same bits (a test compares them).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from llamaspec.reference.add import add
from llamaspec.reference.attention import attention, causal_mask
from llamaspec.reference.embedding import embedding
from llamaspec.reference.linear import linear
from llamaspec.reference.rmsnorm import rmsnorm
from llamaspec.reference.rope import rope_halves
from llamaspec.reference.swiglu import swiglu


class Block(NamedTuple):
    """The weights of a block."""

    attention_norm: Float[np.ndarray, " dim"]
    q: Float[np.ndarray, "q_width dim"]  # q_width is heads times head_dim
    k: Float[np.ndarray, "kv_width dim"]
    v: Float[np.ndarray, "kv_width dim"]
    o: Float[np.ndarray, "dim q_width"]
    ffn_norm: Float[np.ndarray, " dim"]
    gate: Float[np.ndarray, "ffn dim"]
    up: Float[np.ndarray, "ffn dim"]
    down: Float[np.ndarray, "dim ffn"]


class Weights(NamedTuple):
    """The weights of a model."""

    embedding: Float[np.ndarray, "vocab dim"]
    blocks: Sequence[Block]
    norm: Float[np.ndarray, " dim"]
    head: Float[np.ndarray, "vocab dim"]


def attend(
    x: Float[np.ndarray, "seq dim"],
    block: Block,
    *,
    head_dim: int,
    frequencies: Float[np.ndarray, " pairs"],
    eps: float,
) -> Float[np.ndarray, "seq dim"]:
    """Compute attention from every token to itself and the tokens before it, and add the output to the token's vector.

    The first token sees only itself, so only its own values are added to its vector:

    >>> identity, zeros, ones = np.eye(2), np.zeros((2, 2)), np.ones(2)
    >>> block = Block(ones, zeros, zeros, identity, identity, ones, identity, identity, identity)
    >>> attend(np.array([[3.0, 4.0]]), block, head_dim=2, frequencies=np.ones(1), eps=0.0).round(4)
    array([[3.8485, 5.1314]])
    """
    seq = len(x)
    positions = np.arange(seq)
    n = rmsnorm(x, block.attention_norm, eps=eps)
    q, k, v = (linear(n, matrix).reshape(seq, -1, head_dim) for matrix in (block.q, block.k, block.v))
    q, k = rope_halves(q, positions, frequencies), rope_halves(k, positions, frequencies)
    h = attention(q, k, v, causal_mask(seq, seq))  # [seq, heads, head_dim]
    return add(x, linear(h.reshape(seq, -1), block.o))


def feed_forward(x: Float[np.ndarray, "seq dim"], block: Block, *, eps: float) -> Float[np.ndarray, "seq dim"]:
    """Apply the feed-forward layer to every token separately, and add the output to the token's vector.

    >>> identity, ones = np.eye(2), np.ones(2)
    >>> block = Block(ones, identity, identity, identity, identity, ones, identity, identity, identity)
    >>> feed_forward(np.array([[3.0, 4.0]]), block, eps=0.0).round(4)
    array([[3.5042, 4.9678]])
    """
    n = rmsnorm(x, block.ffn_norm, eps=eps)
    return add(x, linear(swiglu(linear(n, block.gate), linear(n, block.up)), block.down))


def forward(
    weights: Weights,
    tokens: Int[np.ndarray, " seq"],
    *,
    head_dim: int,
    frequencies: Float[np.ndarray, " pairs"],
    eps: float,
) -> Float[np.ndarray, "seq vocab"]:
    """Compute the logits after each of `tokens`: the scores of all possible next tokens.

    `frequencies` are RoPE's, from the page `rope`. A model without blocks multiplies the normalized embedding by the
    head:

    >>> weights = Weights(np.array([[3.0, 4.0], [1.0, 7.0]]), [], np.ones(2), np.eye(2))
    >>> forward(weights, np.array([1, 0]), head_dim=2, frequencies=np.ones(1), eps=0.0).round(4)
    array([[0.2   , 1.4   ],
           [0.8485, 1.1314]])
    """
    x = embedding(tokens, weights.embedding)
    for block in weights.blocks:
        x = attend(x, block, head_dim=head_dim, frequencies=frequencies, eps=eps)
        x = feed_forward(x, block, eps=eps)
    return linear(rmsnorm(x, weights.norm, eps=eps), weights.head)
