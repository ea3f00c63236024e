"""The ops of a transformer block on a Hopper GPU: our kernels if they support the model, otherwise XLA.

Kernels are for decoding steps, with one new token for each of a few sequences. In such a step, almost all the time goes
into reading the weights and the cache. For the many tokens of a prompt, XLA computes the products, because its matrix
products reach the full speed of the tensor cores. Attention has a kernel for decoding and a kernel for prompts.

Before compilation, `pallas_ops` lists the calls of ops in a model, and asks for each call whether the op's kernel
accepts it. The form of a call is the shapes and dtypes of its arguments. The table of ops stores the accepted forms,
and chooses between kernel and XLA by the form of a call.

This module is separate from the other tables because importing Pallas takes a second, and only a GPU needs Pallas.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from llamaspec.model.cache import LayerCache, LayerPages, LayerStore, Pages, empty_cache, empty_pages
from llamaspec.model.ops.gpu_config import check_config
from llamaspec.model.ops.gpu_products import (
    PROMPTS,
    STEPS,
    Shaped,
    abstract,
    check_one_by_one,
    multiplied,
    multiplied_apart,
    uses_coded_gemm,
)
from llamaspec.model.ops.routed import Form, KernelOp, Routed, form_of
from llamaspec.model.ops.table import Mean, Ops, Positions, Total
from llamaspec.model.ops.xla import XLA
from llamaspec.model.weights.params import FeedForward, Layer, Linear, Params
from llamaspec.pallas_kernels.attention_decode import attention_decode
from llamaspec.pallas_kernels.attention_paged import attention_paged
from llamaspec.pallas_kernels.attention_prefill import attention_prefill
from llamaspec.pallas_kernels.gemv import gemv
from llamaspec.pallas_kernels.norm_gate_up import norm_gate_up as _norm_gate_up
from llamaspec.pallas_kernels.norm_qkv import norm_qkv as _norm_qkv
from llamaspec.pallas_kernels.unsupported import Unsupported
from llamaspec.reference.config import Config

CHUNK = 256  # number of tokens of a prompt in the calls for `pallas_ops`; the answer is the same for any number
PROMPT = "attend_prompt"  # name of the attention kernel for prompts in the reasons that `pallas_ops` returns


def norm_qkv(
    x: Float[Array, "batch 1 dim"],
    layer: Layer,
    cache: LayerStore,
    positions: Positions,
    *,
    config: Config,
    mean: Mean | None = None,
) -> tuple[Float[Array, "batch 1 heads head_dim"], LayerStore]:
    """Compute `block.norm_qkv` for one token of each sequence."""
    del mean  # only norms of q and k use `mean`, and this kernel does not support such norms
    _check_cache(cache, x)
    if layer.q_norm is not None or layer.k_norm is not None:
        raise Unsupported("norm_qkv has no kernel for norms of q and k")
    at_once = uses_coded_gemm(layer.qkv.weight, x)
    if isinstance(cache, LayerPages) and not at_once:
        check_one_by_one(layer.qkv.weight, x)
    if isinstance(cache, LayerPages) or at_once:
        return STEPS.norm_qkv(x, layer, cache, positions, config=config)
    assert layer.attention_norm is not None  # `check_config`
    q, k, v = _norm_qkv(
        multiplied_apart(layer.qkv.weight, x),
        x[:, 0],
        layer.attention_norm,
        cache.k,
        cache.v,
        positions.at[:, 0],
        positions.cos[:, 0],
        positions.sin[:, 0],
        heads=config.heads,
        eps=config.eps,
        bias=layer.qkv.bias,
    )
    return q[:, None], LayerCache(k, v)


def attend(
    q: Float[Array, "batch seq heads head_dim"],
    cache: LayerStore,
    positions: Positions,
    *,
    window: int | None,
    config: Config,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq width"]:
    """Compute `attention.attend` with the kernel for one token of each sequence, or with the kernel for a prompt."""
    assert sinks is None  # `check_config`
    _check_cache(cache, q)
    start = positions.at[:, 0]
    if isinstance(cache, LayerPages) and q.shape[1] == 1:
        return attention_paged(q[:, 0], cache.k, cache.v, cache.table, start + 1, window=window)[:, None]
    if isinstance(cache, LayerPages):
        # Reading all pages of a sequence once costs little compared with the products of a prompt's many tokens.
        k, v = (_in_a_row(pages, cache.table) for pages in (cache.k, cache.v))
        return attention_prefill(q, k, v, start, window=window)
    if q.shape[1] > 1:
        return attention_prefill(q, cache.k, cache.v, start, window=window)
    return attention_decode(q[:, 0], cache.k, cache.v, start + 1, window=window)[:, None]


def project_add(
    h: Float[Array, "batch 1 width"], layer: Layer, x: Float[Array, "batch 1 dim"], *, total: Total | None = None
) -> Float[Array, "batch 1 dim"]:
    """Compute `block.project_add` for one token of each sequence."""
    if uses_coded_gemm(layer.o.weight, h):
        return STEPS.project_add(h, layer, x, total=total)
    return _linear_add(h, layer.o, x, total)


def norm_gate_up(x: Float[Array, "batch 1 dim"], layer: Layer, *, config: Config) -> Float[Array, "batch 1 ffn"]:
    """Compute `block.norm_gate_up` for one token of each sequence."""
    assert isinstance(layer.ffn, FeedForward) and layer.ffn_norm is not None  # `check_config`
    weight, bias = layer.ffn.gate_up
    if uses_coded_gemm(weight, x):
        return STEPS.norm_gate_up(x, layer, config=config)
    return _norm_gate_up(multiplied(weight, x), x[:, 0], layer.ffn_norm, eps=config.eps, bias=bias)[:, None]


def down_add(
    g: Float[Array, "batch 1 ffn"], layer: Layer, x: Float[Array, "batch 1 dim"], *, total: Total | None = None
) -> Float[Array, "batch 1 dim"]:
    """Compute `block.down_add` for one token of each sequence."""
    assert isinstance(layer.ffn, FeedForward)
    if uses_coded_gemm(layer.ffn.down.weight, g):
        return STEPS.down_add(g, layer, x, total=total)
    return _linear_add(g, layer.ffn.down, x, total)


def _linear_add(
    v: Float[Array, "batch 1 cols"], linear: Linear, x: Float[Array, "batch 1 rows"], total: Total | None
) -> Float[Array, "batch 1 rows"]:
    """Multiply v by the weight, and add the bias and x.

    With `total`, we add the bias and x after the sum over devices; otherwise the kernel adds them.
    """
    weight, bias = linear
    if total is None:
        return gemv(multiplied(weight, v), v[:, 0], bias=bias, residual=x[:, 0])[:, None]
    y = total(gemv(multiplied(weight, v), v[:, 0], out=jnp.float32))
    y = y if bias is None else y + bias.astype(jnp.float32)
    return (x.astype(jnp.float32) + y[:, None]).astype(x.dtype)


def norm_logits(x: Float[Array, "*batch dim"], params: Params, *, config: Config) -> Float[Array, "*batch vocab"]:
    """Compute `block.norm_logits` for a few tokens."""
    rows = x.reshape(-1, config.dim)
    if uses_coded_gemm(params.head, x):
        return STEPS.norm_logits(x, params, config=config)
    logits = gemv(multiplied(params.head, rows[:, None]), rows, norm=params.norm, eps=config.eps, out=jnp.float32)
    return logits.reshape(*x.shape[:-1], -1)


def _in_a_row(
    pages: Float[Array, "pages kv_heads page head_dim"], table: Int[Array, "batch blocks"]
) -> Float[Array, "batch kv_heads capacity head_dim"]:
    rows = pages[table].swapaxes(1, 2)  # [batch, kv_heads, blocks, page, head_dim]
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])


def _check_cache(cache: LayerStore, x: Array) -> None:
    if cache.k.dtype != x.dtype:
        raise Unsupported(f"kernels need a KV cache in {x.dtype} (the dtype of the model), got {cache.k.dtype}")


def _norm_qkv_form(
    x: Shaped, layer: Layer, cache: LayerStore, positions: Positions, *, config: Config, mean: Mean | None = None
) -> Form | None:
    del mean  # `config` determines whether callers pass `mean`
    weights = layer.attention_norm, layer.qkv, layer.q_norm, layer.k_norm
    return None if x.shape[1] > 1 else form_of((x, weights, cache, positions), config)


def _attend_form(
    q: Shaped,
    cache: LayerStore,
    positions: Positions,
    *,
    window: int | None,
    config: Config,
    sinks: Shaped | None = None,
) -> Form | None:
    del sinks  # `config` determines whether callers pass `sinks`
    batch, seq, *head = q.shape
    several = min(seq, 2)  # prompts of all lengths have one form, since the kernel accepts any length
    q, at = abstract(batch, several, *head, dtype=q.dtype), abstract(batch, several, dtype=positions.at.dtype)
    return form_of((q, cache, at), window, config)


def _project_add_form(h: Shaped, layer: Layer, x: Shaped, *, total: Total | None = None) -> Form | None:
    return None if x.shape[1] > 1 else form_of((h, layer.o, x))


def _norm_gate_up_form(x: Shaped, layer: Layer, *, config: Config) -> Form | None:
    assert isinstance(layer.ffn, FeedForward)
    return None if x.shape[1] > 1 else form_of((x, layer.ffn_norm, layer.ffn.gate_up), config)


def _down_add_form(g: Shaped, layer: Layer, x: Shaped, *, total: Total | None = None) -> Form | None:
    assert isinstance(layer.ffn, FeedForward)
    return None if x.shape[1] > 1 else form_of((g, layer.ffn.down, x))


def _norm_logits_form(x: Shaped, params: Params, *, config: Config) -> Form | None:
    if x.ndim > 2 and x.shape[1] > 1:
        return None
    rows = abstract(x.size // config.dim, config.dim, dtype=x.dtype)
    return form_of((rows, params.norm, params.head), config)


KERNELS: dict[str, KernelOp[..., Any]] = {
    "norm_qkv": KernelOp(norm_qkv, STEPS.norm_qkv, PROMPTS.norm_qkv, _norm_qkv_form),
    "attend": KernelOp(attend, XLA.attend, XLA.attend, _attend_form),
    "project_add": KernelOp(project_add, STEPS.project_add, PROMPTS.project_add, _project_add_form),
    "norm_gate_up": KernelOp(norm_gate_up, STEPS.norm_gate_up, PROMPTS.norm_gate_up, _norm_gate_up_form),
    "down_add": KernelOp(down_add, STEPS.down_add, PROMPTS.down_add, _down_add_form),
    "norm_logits": KernelOp(norm_logits, STEPS.norm_logits, PROMPTS.norm_logits, _norm_logits_form),
}


class OpCall(NamedTuple):
    """One call of an op in a model, with shapes instead of arrays."""

    name: str  # name of the op, or `PROMPT`
    arguments: tuple[Any, ...]
    fixed: Mapping[str, Any] = {}

    @property
    def op(self) -> str:
        return "attend" if self.name == PROMPT else self.name

    @property
    def form(self) -> Form:
        """The form of this call: the shapes and dtypes of the arguments, and the static arguments."""
        form = KERNELS[self.op].form(*self.arguments, **self.fixed)
        assert form is not None
        return form

    def refusal(self, config: Config) -> str | None:
        """Return the kernel's reason for refusing these arguments; None if the kernel accepts them."""
        try:
            check_config(self.op, config)
            jax.eval_shape(partial(KERNELS[self.op].kernel, **self.fixed), *self.arguments)
        except Unsupported as error:
            return str(error)
        return None


def calls(
    config: Config,
    params: Params,
    *,
    batch: int,
    capacity: int,
    cache_dtype: np.dtype | None = None,
    pages: Pages | None = None,
) -> Iterator[OpCall]:
    """Yield the calls of all ops with kernels in a decoding step, and the calls of attention in a prompt.

    `params` may come from `abstract_params`. The cache holds `capacity` positions. The default of `cache_dtype` is the
    dtype of the embedding. If the cache is in `pages`, a prompt has one sequence, and a decoding step has `batch`
    sequences.
    """
    dtype = params.embedding.dtype
    stored = np.dtype(cache_dtype or dtype)

    def cache_of(rows: int) -> LayerStore:
        if pages is None:
            return jax.eval_shape(partial(empty_cache, config, batch=rows, capacity=capacity, dtype=stored)).layers[0]
        k, v = jax.eval_shape(partial(empty_pages, config, pages=pages.number, page=pages.size, dtype=stored))[0]
        return LayerPages(k, v, abstract(rows, -(-capacity // pages.size), dtype=np.dtype(np.int32)))

    prompts = 1 if pages else batch
    cache, cache_of_prompts = cache_of(batch), cache_of(prompts)  # the same for every layer

    def positions(batch: int, seq: int) -> Positions:
        angles = abstract(batch, seq, config.rotary_features // 2, dtype=np.dtype(np.float32))
        return Positions(abstract(batch, seq, dtype=np.dtype(np.int32)), angles, angles)

    def q(batch: int, seq: int) -> Any:
        return abstract(batch, seq, config.heads, config.head_dim, dtype=dtype)

    x, h, g = (
        abstract(batch, 1, size, dtype=dtype) for size in (config.dim, config.heads * config.head_dim, config.ffn)
    )
    step, many, with_config = positions(batch, 1), positions(prompts, CHUNK), {"config": config}
    for i, layer in enumerate(params.layers):
        attending = {"window": config.window(i), "config": config}
        yield OpCall("norm_qkv", (x, layer, cache, step), with_config)
        yield OpCall("attend", (q(batch, 1), cache, step), attending)
        yield OpCall(PROMPT, (q(prompts, CHUNK), cache_of_prompts, many), attending)
        yield OpCall("project_add", (h, layer, x))
        if not config.experts:
            yield OpCall("norm_gate_up", (x, layer), with_config)
            yield OpCall("down_add", (g, layer, x))
    yield OpCall("norm_logits", (abstract(batch, config.dim, dtype=dtype), params), with_config)


def pallas_ops(
    config: Config,
    params: Params,
    *,
    batch: int = 1,
    capacity: int,
    cache_dtype: np.dtype | None = None,
    pages: Pages | None = None,
) -> tuple[Ops, dict[str, str | None]]:
    """Build the table of ops for a model; also return, for each op, the reason why XLA runs it instead of a kernel.

    A reason is None if a kernel runs the op in all layers. The names of ops include `PROMPT` (attention in a prompt),
    and `moe_add` if the model has experts. The arguments are the same as for `calls`. If a kernel raises Unsupported,
    the reason is the error's message; all other errors of a kernel propagate.
    """
    answers: dict[str, dict[Form, str | None]] = defaultdict(dict)
    answers_by_name: dict[str, list[str | None]] = defaultdict(list)  # an answer for each call
    for call in calls(config, params, batch=batch, capacity=capacity, cache_dtype=cache_dtype, pages=pages):
        known = answers[call.op]
        if (form := call.form) not in known:
            known[form] = call.refusal(config)
        answers_by_name[call.name].append(known[form])
    routed = {}
    for name, op in KERNELS.items():
        accepted = frozenset(form for form, reason in answers[name].items() if reason is None)
        routed[name] = Routed(name, op, accepted, frozenset(answers[name]) - accepted)
    reasons = {name: _summary(reasons_of_calls) for name, reasons_of_calls in answers_by_name.items()}
    if config.experts:
        reasons["moe_add"] = "experts have no kernel"
    return XLA._replace(**routed), reasons


def _summary(answers: list[str | None]) -> str | None:
    """Join the reasons of an op's calls, one call per layer. Returns None if no call has a reason.

    For a reason that applies only to some of the layers, we state their number.
    """
    counts = Counter(reason for reason in answers if reason is not None)
    if not counts:
        return None
    return "; ".join(
        reason if count == len(answers) else f"in {count} of {len(answers)} layers: {reason}"
        for reason, count in counts.items()
    )
