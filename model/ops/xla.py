"""`XLA`, the table of ops in plain JAX, which XLA compiles for any device."""

from functools import partial

from llamaspec.model.ops.attention import attend
from llamaspec.model.ops.block import down_add, moe_add, norm_gate_up, norm_logits, norm_qkv, project_add
from llamaspec.model.ops.products import dot
from llamaspec.model.ops.table import Ops, Product


def plain(product: Product) -> Ops:
    """Build a table of ops in plain JAX that use `product` for all matrix products."""
    return Ops(
        norm_qkv=partial(norm_qkv, product=product),
        attend=attend,
        project_add=partial(project_add, product=product),
        norm_gate_up=partial(norm_gate_up, product=product),
        down_add=partial(down_add, product=product),
        moe_add=partial(moe_add, product=product),
        norm_logits=partial(norm_logits, product=product),
    )


XLA = plain(dot)
