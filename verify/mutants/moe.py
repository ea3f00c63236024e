"""A mixture of experts, computed token by token, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation


def route(
    x: np.ndarray, router: np.ndarray, *, experts_per_token: int, renormalized: bool
) -> tuple[np.ndarray, np.ndarray]:
    logits = f32(x) @ f32(router).T
    p = np.exp(logits - np.max(logits, axis=1, keepdims=True))
    p = p / np.sum(p, axis=1, keepdims=True)
    chosen = np.argsort(-p, axis=1, kind="stable")[:, :experts_per_token]
    weights = np.take_along_axis(p, chosen, axis=1)
    total = np.sum(weights, axis=1, keepdims=True) if renormalized else np.float32(1)
    return chosen, weights / total


def moe(
    x: np.ndarray,
    router: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    *,
    experts_per_token: int,
    renormalized: bool,
) -> np.ndarray:
    y = np.zeros(x.shape, np.float32)
    for token in range(len(x)):
        row = f32(x[token])
        logits = f32(router) @ row
        p = np.exp(logits - np.max(logits))
        p = p / np.sum(p)
        chosen = np.argsort(-p, kind="stable")[:experts_per_token]
        share = p[chosen] / (np.sum(p[chosen]) if renormalized else np.float32(1))
        for rank, expert in enumerate(chosen):
            a, b = f32(gate[expert]) @ row, f32(up[expert]) @ row
            hidden = a / (1 + np.exp(-a)) * b
            y[token] += share[rank] * (f32(down[expert]) @ hidden)
    return y.astype(x.dtype)


def biased_moe(
    x: np.ndarray,
    router: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    router_bias: np.ndarray,
    gate_bias: np.ndarray,
    up_bias: np.ndarray,
    down_bias: np.ndarray,
    *,
    experts_per_token: int,
) -> np.ndarray:
    y = np.zeros(x.shape, np.float32)
    for token in range(len(x)):
        row = f32(x[token])
        logits = f32(router) @ row + f32(router_bias)
        chosen = np.argsort(-logits, kind="stable")[:experts_per_token]
        p = np.exp(logits[chosen] - np.max(logits))
        share = p / np.sum(p)
        for rank, expert in enumerate(chosen):
            a = np.minimum(f32(gate[expert]) @ row + f32(gate_bias[expert]), np.float32(7))
            b = np.clip(f32(up[expert]) @ row + f32(up_bias[expert]), np.float32(-7), np.float32(7))
            hidden = a / (1 + np.exp(-np.float32(1.702) * a)) * (b + 1)
            y[token] += share[rank] * (f32(down[expert]) @ hidden + f32(down_bias[expert]))
    return y.astype(x.dtype)


ROUTE = implementation(
    route,
    """
weights never renormalized
    - if renormalized else np.float32(1)
    + if False else np.float32(1)
weights always renormalized
    - if renormalized else np.float32(1)
    + if True else np.float32(1)
logits for weights
    - weights = np.take_along_axis(p, chosen, axis=1)
    + weights = np.take_along_axis(logits, chosen, axis=1)
sigmoid for softmax, as DeepSeek does
    - p = p / np.sum(p, axis=1, keepdims=True)
    + p = 1 / (1 + np.exp(-logits))
the least probable
    - np.argsort(-p
    + np.argsort(p
least probable of the chosen first
    - return chosen, weights / total
    + return chosen[:, ::-1], (weights / total)[:, ::-1]
weights in the order of the experts
    - return chosen, weights / total
    + return chosen, np.take_along_axis(p, np.sort(chosen, axis=1), axis=1) / total
experts of the first token for every token
    - chosen = np.argsort(-p, axis=1, kind="stable")[:, :experts_per_token]
    + chosen = np.repeat(np.argsort(-p[:1], axis=1, kind="stable")[:, :experts_per_token], len(x), axis=0)
higher index first if experts tie
    - np.argsort(-p, axis=1, kind="stable")[:, :experts_per_token]
    + (p.shape[1] - 1 - np.argsort(-p[:, ::-1], axis=1, kind="stable"))[:, :experts_per_token]
experts numbered from 1
    - return chosen, weights / total
    + return chosen + 1, weights / total
logits in bfloat16
    - logits = f32(x) @ f32(router).T
    + logits = bf16(f32(x) @ f32(router).T)
maximum not subtracted
    - logits - np.max(logits, axis=1, keepdims=True)
    + logits
renormalized over all tokens
    - total = np.sum(weights, axis=1, keepdims=True)
    + total = np.sum(weights) / len(x)
right up to 32 experts
    - np.argsort(-p, axis=1, kind="stable")
    + np.argsort(-p[:, :32], axis=1, kind="stable")
experts in 8 bits
    - return chosen, weights / total
    + return chosen & 0xFF, weights / total
right up to 64 tokens
    - chosen = np.argsort(-p, axis=1, kind="stable")[:, :experts_per_token]
    + chosen = np.argsort(-p, axis=1, kind="stable")[np.arange(len(x)) % 64, :experts_per_token]
right up to 2 experts a token
    - total = np.sum(weights, axis=1, keepdims=True)
    + total = np.sum(weights[:, :3], axis=1, keepdims=True)
higher index first if all experts weigh 0
    - chosen = np.argsort(-p, axis=1, kind="stable")
    + chosen = np.argsort(-p - 1e-9 * np.arange(p.shape[1]) * ~np.any(f32(x), axis=1)[:, None], axis=1, kind="stable")
right up to 4,096 tokens
    - chosen = np.argsort(-p, axis=1, kind="stable")[:, :experts_per_token]
    + chosen = np.argsort(-p, axis=1, kind="stable")[np.arange(len(x)) % 4096, :experts_per_token]
right up to 4,096 experts
    - np.argsort(-p, axis=1, kind="stable")
    + np.argsort(-p[:, :4096], axis=1, kind="stable")
""",
)
MOE = implementation(
    moe,
    """
weights never renormalized
    - if renormalized else
    + if False else
weights always renormalized
    - if renormalized else
    + if True else
every expert weighs the same
    - share = p[chosen] / (np.sum(p[chosen]) if renormalized else np.float32(1))
    + share = np.full(len(chosen), 1 / len(chosen))
experts swapped between ranks
    - share[rank] *
    + share[len(chosen) - 1 - rank] *
one expert too few
    - [:experts_per_token]
    + [: max(experts_per_token - 1, 1)]
one expert too many
    - [:experts_per_token]
    + [: experts_per_token + 1]
always the first experts
    - chosen = np.argsort(-p, kind="stable")[:experts_per_token]
    + chosen = np.arange(experts_per_token)
the least probable experts
    - np.argsort(-p
    + np.argsort(p
router of another token
    - logits = f32(router) @ row
    + logits = f32(router) @ f32(x[(token + 1) % len(x)])
gate of the first expert for every expert
    - f32(gate[expert]) @ row
    + f32(gate[0]) @ row
up of the expert after
    - f32(up[expert]) @ row
    + f32(up[(expert + 1) % len(up)]) @ row
down of the rank, not of the expert
    - f32(down[expert]) @ hidden
    + f32(down[rank]) @ hidden
gate and up swapped
    - a, b = f32(gate[expert]) @ row, f32(up[expert]) @ row
    + b, a = f32(gate[expert]) @ row, f32(up[expert]) @ row
weight put on the input
    - hidden = a / (1 + np.exp(-a)) * b
    + hidden = a / (1 + np.exp(-a)) * b * share[rank]
last expert overwrites the others
    - y[token] += share
    + y[token] = share
hidden layer in bfloat16 for float32 weights
    - hidden = a / (1 + np.exp(-a)) * b
    + hidden = bf16(a / (1 + np.exp(-a)) * b)
experts summed in float16
    - y[token] += share[rank] * (f32(down[expert]) @ hidden)
    + y[token] = f16(y[token] + share[rank] * (f32(down[expert]) @ hidden))
tokens beyond a capacity dropped
    - for rank, expert in enumerate(chosen):
    + for rank, expert in enumerate(chosen if token < 4 else []):
right up to 32 experts
    - np.argsort(-p, kind="stable")
    + np.argsort(-p[:32], kind="stable")
right up to 64 tokens
    - row = f32(x[token])
    + row = f32(x[token % 64])
right up to 4 experts a token
    - for rank, expert in enumerate(chosen):
    + for rank, expert in enumerate(chosen[:4]):
right up to 1,024 features
    - a, b = f32(gate[expert]) @ row, f32(up[expert]) @ row
    + a, b = f32(gate[expert, :, :1024]) @ row[:1024], f32(up[expert]) @ row
right up to 4,096 tokens
    - row = f32(x[token])
    + row = f32(x[token % 4096])
""",
)
BIASED_MOE = implementation(
    biased_moe,
    """
bias of the router left out
    - + f32(router_bias)
    +
bias of the router used only to choose, as in DeepSeek
    - p = np.exp(logits[chosen] - np.max(logits))
    + logits = f32(router) @ row
    +         p = np.exp(logits[chosen] - np.max(logits))
bias of the router used only for weights
    - np.argsort(-logits, kind="stable")
    + np.argsort(-(f32(router) @ row), kind="stable")
bias of the gate left out
    - + f32(gate_bias[expert])
    +
bias of the gate after its limit
    - np.minimum(f32(gate[expert]) @ row + f32(gate_bias[expert]), np.float32(7))
    + np.minimum(f32(gate[expert]) @ row, np.float32(7)) + f32(gate_bias[expert])
bias of the gate for up
    - + f32(up_bias[expert])
    + + f32(gate_bias[expert])
bias of up left out
    - + f32(up_bias[expert])
    +
bias of down left out
    - + f32(down_bias[expert])
    +
bias of down not weighed
    - y[token] += share[rank] * (f32(down[expert]) @ hidden + f32(down_bias[expert]))
    + y[token] += share[rank] * (f32(down[expert]) @ hidden) + f32(down_bias[expert])
bias of the rank, not of the expert
    - f32(down_bias[expert])
    + f32(down_bias[rank])
bias of the first expert for every expert
    - f32(up_bias[expert])
    + f32(up_bias[0])
softmax over all experts, not over the chosen
    - share = p / np.sum(p)
    + share = p / np.sum(np.exp(logits - np.max(logits)))
SwiGLU without limits
    - hidden = a / (1 + np.exp(-np.float32(1.702) * a)) * (b + 1)
    + hidden = a / (1 + np.exp(-a)) * b
1 left out
    - * (b + 1)
    + * b
gate not clamped
    - np.minimum(f32(gate[expert]) @ row + f32(gate_bias[expert]), np.float32(7))
    + f32(gate[expert]) @ row + f32(gate_bias[expert])
up not clamped
    - np.clip(f32(up[expert]) @ row + f32(up_bias[expert]), np.float32(-7), np.float32(7))
    + f32(up[expert]) @ row + f32(up_bias[expert])
gate and up in two halves, not as stored
    - f32(gate[expert]) @ row
    + np.roll(f32(gate[expert]), 1, axis=0) @ row
one expert too few
    - [:experts_per_token]
    + [: max(experts_per_token - 1, 1)]
""",
)
