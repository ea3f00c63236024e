"""`Ops`, the table of ops that a model calls, and the signature of each op.

A block of a Llama consists of five ops, or of four ops if it has experts. One more op computes the logits after the
last block. A table has one implementation of every op: `xla.XLA` runs on any device, `cpu.CPU` is for XLA's CPU
compiler, and `gpu.pallas_ops` builds a table with kernels for a model.

Inside an op, numbers are float32. An op rounds its result once to the dtype of the residual stream; only logits stay
float32. Before a product, an op rounds vectors to this dtype, for the matrix units. Any matrix may be quantized.
"""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from llamaspec.model.cache import LayerStore
from llamaspec.model.weights.params import Layer, Matrix, Params
from llamaspec.reference.config import Config


class Positions(NamedTuple):
    """The positions of the new tokens, and the cosines and sines of RoPE's angles at these positions."""

    at: Int[Array, "batch seq"]  # positions, consecutive along seq
    cos: Float[Array, "batch seq pairs"]
    sin: Float[Array, "batch seq pairs"]


@runtime_checkable
class Product(Protocol):
    """A function that multiplies x by the transpose of a matrix; it sums and returns float32."""

    def __call__(self, x: Float[Array, "*batch cols"], weight: Matrix, /) -> Float[Array, "*batch rows"]: ...


@runtime_checkable
class Total(Protocol):
    """A function that adds the partial products of all devices, in float32. `model.parallel` passes it to ops."""

    def __call__(self, partial_sum: Float[Array, "*batch rows"], /) -> Float[Array, "*batch rows"]: ...


@runtime_checkable
class Mean(Protocol):
    """A function that computes the mean of one number from each device, in float32."""

    def __call__(self, of_mine: Float[Array, "*batch 1"], /) -> Float[Array, "*batch 1"]: ...


class NormQkv(Protocol):
    """Normalize x, project it to q, k and v, rotate q and k by RoPE, and append k and v to the cache.

    Some models normalize q and k before RoPE. With `mean`, each device has some of the heads, and a norm over all heads
    uses `mean` to average over all devices.
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
    """Compute causal grouped-query attention over the cache. A query sees its last `window` positions (None: all).

    `sinks` has an additional score for each head, which enters the softmax like the score of a key; None: the model has
    no sinks.
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
    """Add attention's output projection to the residual stream x.

    With `total`, each device has some columns of the matrix, and `total` adds up the products of all devices.
    """

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
    """Normalize x, project it to gate and up, and apply SwiGLU or the model's other activation."""

    def __call__(
        self, x: Float[Array, "batch seq dim"], layer: Layer, /, *, config: Config
    ) -> Float[Array, "batch seq ffn"]: ...


class DownAdd(Protocol):
    """Add the down projection to the residual stream x.

    With `total`, each device has some columns of the matrix, and `total` adds up the products of all devices.
    """

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
    """Normalize x, and add the weighted outputs of the chosen experts to x.

    With `total`, each device has some columns of each down projection, and `total` adds up the products of all devices.
    """

    def __call__(
        self, x: Float[Array, "batch seq dim"], layer: Layer, /, *, config: Config, total: Total | None = None
    ) -> Float[Array, "batch seq dim"]: ...


class NormLogits(Protocol):
    """Apply the last norm to x, and compute one logit per token of the vocabulary, in float32."""

    def __call__(
        self, x: Float[Array, "*batch dim"], params: Params, /, *, config: Config
    ) -> Float[Array, "*batch vocab"]: ...


class Ops(NamedTuple):
    """One implementation of every op. A table is hashable, so it can be a static argument of a compiled function."""

    norm_qkv: NormQkv
    attend: Attend
    project_add: ProjectAdd
    norm_gate_up: NormGateUp
    down_add: DownAdd
    moe_add: MoeAdd
    norm_logits: NormLogits
