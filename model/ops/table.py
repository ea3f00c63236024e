"""The table of ops that a model is handed, and the signature of each op.

A Llama's block is five ops, or four if it has experts; one more gives the logits after the last block. Every table
holds one implementation of each: `xla.XLA` runs anywhere, `cpu.CPU` suits XLA's CPU compiler, and `gpu.pallas_ops`
makes one with kernels for a model.

Inside an op numbers are float32. A result is rounded once, to the dtype of the residual stream, and so is a vector
before a product, because matrix units take it so. Ops take a quantized matrix wherever they take an array.
"""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from llamaspec.model.cache import LayerStore
from llamaspec.model.weights.params import Layer, Matrix, Params
from llamaspec.reference.config import Config


class Positions(NamedTuple):
    """Positions of the new tokens, and the angles that RoPE turns them by."""

    at: Int[Array, "batch seq"]  # consecutive along seq
    cos: Float[Array, "batch seq pairs"]
    sin: Float[Array, "batch seq pairs"]


@runtime_checkable
class Product(Protocol):
    """x times the transpose of a matrix, summed and returned in float32."""

    def __call__(self, x: Float[Array, "*batch cols"], weight: Matrix, /) -> Float[Array, "*batch rows"]: ...


@runtime_checkable
class Total(Protocol):
    """The sum of every device's partial products, in float32. `model.parallel` has an op add them with it."""

    def __call__(self, partial_sum: Float[Array, "*batch rows"], /) -> Float[Array, "*batch rows"]: ...


@runtime_checkable
class Mean(Protocol):
    """The mean of every device's number, in float32."""

    def __call__(self, of_mine: Float[Array, "*batch 1"], /) -> Float[Array, "*batch 1"]: ...


class NormQkv(Protocol):
    """RMSNorm; q, k and v, and their norms if the model has them; RoPE. k and v are appended to the cache.

    With `mean`, heads are a device's own, and a norm over all heads is over the heads of all devices.
    """

    def __call__(
        self,
        x: Float[Array, "batch seq dim"],
        layer: Layer,
        cache: LayerStore,
        positions: Positions,
        /,
        *,
        config: Config,
        mean: Mean | None = None,
    ) -> tuple[Float[Array, "batch seq heads head_dim"], LayerStore]: ...


class Attend(Protocol):
    """Causal grouped-query attention over the cache. Each query sees its last `window` positions; None: all.

    `sinks` are scores of heads that join the scores of keys; only models with sinks pass them.
    """

    def __call__(
        self,
        q: Float[Array, "batch seq heads head_dim"],
        cache: LayerStore,
        positions: Positions,
        /,
        *,
        window: int | None,
        config: Config,
        sinks: Float[Array, " heads"] | None = None,
    ) -> Float[Array, "batch seq width"]: ...


class ProjectAdd(Protocol):
    """The output projection of attention, added to the residual stream x. With `total`, o is a device's columns."""

    def __call__(
        self,
        h: Float[Array, "batch seq width"],
        layer: Layer,
        x: Float[Array, "batch seq dim"],
        /,
        *,
        total: Total | None = None,
    ) -> Float[Array, "batch seq dim"]: ...


class NormGateUp(Protocol):
    """RMSNorm, gate and up, SwiGLU."""

    def __call__(
        self, x: Float[Array, "batch seq dim"], layer: Layer, /, *, config: Config
    ) -> Float[Array, "batch seq ffn"]: ...


class DownAdd(Protocol):
    """The down projection, added to the residual stream x. With `total`, down is a device's columns."""

    def __call__(
        self,
        g: Float[Array, "batch seq ffn"],
        layer: Layer,
        x: Float[Array, "batch seq dim"],
        /,
        *,
        total: Total | None = None,
    ) -> Float[Array, "batch seq dim"]: ...


class MoeAdd(Protocol):
    """RMSNorm and the chosen experts, weighted and added to x. With `total`, experts have a device's columns."""

    def __call__(
        self, x: Float[Array, "batch seq dim"], layer: Layer, /, *, config: Config, total: Total | None = None
    ) -> Float[Array, "batch seq dim"]: ...


class NormLogits(Protocol):
    """The last RMSNorm, and one logit per token of the vocabulary, in float32."""

    def __call__(
        self, x: Float[Array, "*batch dim"], params: Params, /, *, config: Config
    ) -> Float[Array, "*batch vocab"]: ...


class Ops(NamedTuple):
    """One implementation of every op. Hashable, so that it can be a static argument of a compiled function."""

    norm_qkv: NormQkv
    attend: Attend
    project_add: ProjectAdd
    norm_gate_up: NormGateUp
    down_add: DownAdd
    moe_add: MoeAdd
    norm_logits: NormLogits
