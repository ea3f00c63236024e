"""`BY_TOKEN`, a table of ops for a CPU that gives each of several tokens the bits that it gets as a single token.

Speculation needs this. A draft of several tokens is verified in one pass, and afterwards the keys, values and logits
must be the same as if the tokens had been decoded one after the other, to the last bit. `cpu.CPU` does not promise
that: for several tokens, its products and norms add in another order than for one token.

XLA does not promise equal bits for two programs. So `JaxBackend.verifies_exactly` compares this table with `CPU` on the
machine that runs them, with the weights of the model.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from llamaspec.model.cache import LayerStore
from llamaspec.model.ops.block import apply_norm, final_norm, head_logits, moe_add, norm_gate_up, norm_qkv
from llamaspec.model.ops.cpu import cpu_attend
from llamaspec.model.ops.products import cpu_product, cpu_product_of_each
from llamaspec.model.ops.table import Mean, Positions, Total
from llamaspec.model.ops.xla import plain
from llamaspec.model.weights.params import Layer, Params
from llamaspec.reference.config import Config


def norm_qkv_by_token(
    x: Float[Array, "batch seq dim"],
    layer: Layer,
    cache: LayerStore,
    positions: Positions,
    *,
    config: Config,
    mean: Mean | None = None,
) -> tuple[Float[Array, "batch seq heads head_dim"], LayerStore]:
    """Call `norm_qkv`, but normalize one token after the other."""
    n = _over_tokens(lambda x: apply_norm(x, layer.attention_norm, layer.attention_norm_bias, config=config), x)
    layer = layer._replace(attention_norm=None, attention_norm_bias=None)
    return norm_qkv(n, layer, cache, positions, config=config, product=cpu_product_of_each, mean=mean)


def norm_gate_up_by_token(
    x: Float[Array, "batch seq dim"], layer: Layer, *, config: Config
) -> Float[Array, "batch seq ffn"]:
    """Call `norm_gate_up`, but normalize one token after the other."""
    n = _over_tokens(lambda x: apply_norm(x, layer.ffn_norm, layer.ffn_norm_bias, config=config), x)
    layer = layer._replace(ffn_norm=None, ffn_norm_bias=None)
    return norm_gate_up(n, layer, config=config, product=cpu_product_of_each)


def norm_logits_by_token(
    x: Float[Array, "batch seq dim"], params: Params, *, config: Config
) -> Float[Array, "batch seq vocab"]:
    """Call `norm_logits`, but normalize one token after the other."""
    n = _over_tokens(lambda x: final_norm(x, params, config=config), x)
    return head_logits(n, params, config=config, product=cpu_product_of_each)


def attend_by_token(
    q: Float[Array, "batch seq heads head_dim"],
    cache: LayerStore,
    positions: Positions,
    *,
    window: int | None,
    config: Config,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq width"]:
    """Call `cpu_attend` for one token after the other, because the span that it reads depends on the position."""

    def attend_one(token: tuple[Array, Positions]) -> Float[Array, "batch 1 width"]:
        query, at = token
        return cpu_attend(query, cache, at, window=window, config=config, sinks=sinks)

    return _over_tokens(attend_one, (q, positions))


def moe_add_by_token(
    x: Float[Array, "batch seq dim"], layer: Layer, *, config: Config, total: Total | None = None
) -> Float[Array, "batch seq dim"]:
    """Call `moe_add` for one token after the other: for a single token, it computes only the chosen experts."""

    def add_one(x: Float[Array, "batch 1 dim"]) -> Float[Array, "batch 1 dim"]:
        return moe_add(x, layer, config=config, product=cpu_product, total=total)

    return _over_tokens(add_one, x)


def _over_tokens(op: Callable[[Any], Float[Array, "batch 1 n"]], arrays: Any) -> Float[Array, "batch seq n"]:
    """Apply `op` to one token after the other. Tokens are the second axis of all arrays."""
    tokens = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0)[:, :, None], arrays)  # [seq, batch, 1, ...]
    return jnp.moveaxis(lax.map(op, tokens)[:, :, 0], 0, 1)


BY_TOKEN = plain(cpu_product_of_each)._replace(
    norm_qkv=norm_qkv_by_token,
    attend=attend_by_token,
    norm_gate_up=norm_gate_up_by_token,
    moe_add=moe_add_by_token,
    norm_logits=norm_logits_by_token,
)
