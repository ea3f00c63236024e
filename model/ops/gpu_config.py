"""A table that says, for each field of `Config`, which kernel ops support the field and which ops refuse it."""

from dataclasses import MISSING, fields
from typing import NamedTuple

from llamaspec.pallas_kernels.unsupported import Unsupported
from llamaspec.reference.config import Config


class Known(NamedTuple):
    """The kernel ops that depend on a field of `Config`; all other kernel ops ignore the field."""

    handled: tuple[str, ...] = ()  # ops that compute with the field, or with shapes and arrays that depend on it
    refused: tuple[str, ...] = ()  # ops that support only the default of the field


# If a field is not in this table, every kernel refuses values other than the field's default.
FIELDS: dict[str, Known] = {
    "dim": Known(("norm_qkv", "project_add", "norm_gate_up", "down_add", "norm_logits")),
    "layers": Known(),
    "heads": Known(("norm_qkv", "attend", "project_add")),
    "kv_heads": Known(("norm_qkv", "attend")),
    "head_dim": Known(("norm_qkv", "attend", "project_add")),
    "ffn": Known(("norm_gate_up", "down_add")),
    "vocab": Known(("norm_logits",)),
    "context": Known(),
    "eps": Known(("norm_qkv", "norm_gate_up", "norm_logits")),
    "theta": Known(("norm_qkv",)),  # in the angles of `Positions`
    "scaling": Known(("norm_qkv",)),
    "windows": Known(("attend",)),
    "experts": Known(refused=("norm_gate_up", "down_add")),
    "experts_per_token": Known(refused=("norm_gate_up", "down_add")),
    "renormalize_experts": Known(),  # only moe_add reads it, which has no kernel
    "tied": Known(("norm_logits",)),  # in the array that is the head
    "qkv_bias": Known(("norm_qkv",)),
    "o_bias": Known(("project_add",)),
    "ffn_bias": Known(("norm_gate_up", "down_add")),
    "qk_norm": Known(refused=("norm_qkv",)),
    "activation": Known(refused=("norm_gate_up",)),
    "gated": Known(refused=("norm_gate_up",)),
    "parallel_residual": Known(),  # changes only the x that norm_gate_up gets
    "head_qk_norm": Known(refused=("norm_qkv",)),
    "layer_norm": Known(refused=("norm_qkv", "norm_gate_up", "norm_logits")),
    "pre_norms": Known(refused=("norm_qkv", "norm_gate_up")),
    "post_norms": Known(),  # `block.join` applies the norms, outside the kernels
    "wide_qk_norm": Known(refused=("norm_qkv",)),
    "rotary_dim": Known(refused=("norm_qkv",)),
    "rotary_layers": Known(("norm_qkv",)),  # in the angles
    "local_theta": Known(("norm_qkv",)),
    "attention_scale": Known(refused=("attend",)),
    "attention_cap": Known(refused=("attend",)),
    "logit_cap": Known(refused=("norm_logits",)),
    "logit_divisor": Known(refused=("norm_logits",)),
    "embedding_scale": Known(),
    "residual_scale": Known(),
    "shared_ffn": Known(),  # only moe_add reads it, which has no kernel
    "expert_bias": Known(),
    "sinks": Known(refused=("attend",)),
}


def check_config(op: str, config: Config) -> None:
    """Raise Unsupported if a field of `config` has a value that the kernel of `op` does not support."""
    for field in fields(config):
        value, known = getattr(config, field.name), FIELDS.get(field.name)
        if known and op not in known.refused:
            continue
        if field.default is MISSING or value != field.default:
            raise Unsupported(f"{op} has no kernel for {field.name} = {value!r}")
