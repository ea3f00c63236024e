"""A table that says, for each field of `Config`, which kernel ops support the field and which ops refuse it."""

from dataclasses import MISSING, fields
from typing import NamedTuple

from llamaspec.pallas_kernels.unsupported import Unsupported
from llamaspec.reference.config import Config


class FieldRule(NamedTuple):
    """The kernel ops that depend on a field of `Config`; all other kernel ops ignore the field."""

    handled: tuple[str, ...] = ()  # ops that compute with the field, or with shapes and arrays that depend on it
    refused: tuple[str, ...] = ()  # ops that support only the default of the field


# A field that is not in this table is refused by every kernel, except at its default.
FIELDS: dict[str, FieldRule] = {
    "dim": FieldRule(("norm_qkv", "project_add", "norm_gate_up", "down_add", "norm_logits")),
    "layers": FieldRule(),
    "heads": FieldRule(("norm_qkv", "attend", "project_add")),
    "kv_heads": FieldRule(("norm_qkv", "attend")),
    "head_dim": FieldRule(("norm_qkv", "attend", "project_add")),
    "ffn": FieldRule(("norm_gate_up", "down_add")),
    "vocab": FieldRule(("norm_logits",)),
    "context": FieldRule(),
    "eps": FieldRule(("norm_qkv", "norm_gate_up", "norm_logits")),
    "theta": FieldRule(("norm_qkv",)),  # in the angles of `Positions`
    "scaling": FieldRule(("norm_qkv",)),
    "windows": FieldRule(("attend",)),
    "experts": FieldRule(refused=("norm_gate_up", "down_add")),
    "experts_per_token": FieldRule(refused=("norm_gate_up", "down_add")),
    "renormalize_experts": FieldRule(),  # only moe_add reads it, which has no kernel
    "tied": FieldRule(("norm_logits",)),  # in the array that is the head
    "qkv_bias": FieldRule(("norm_qkv",)),
    "o_bias": FieldRule(("project_add",)),
    "ffn_bias": FieldRule(("norm_gate_up", "down_add")),
    "qk_norm": FieldRule(refused=("norm_qkv",)),
    "activation": FieldRule(refused=("norm_gate_up",)),
    "gated": FieldRule(refused=("norm_gate_up",)),
    "parallel_residual": FieldRule(),  # changes only which x norm_gate_up gets
    "head_qk_norm": FieldRule(refused=("norm_qkv",)),
    "layer_norm": FieldRule(refused=("norm_qkv", "norm_gate_up", "norm_logits")),
    "pre_norms": FieldRule(refused=("norm_qkv", "norm_gate_up")),
    "post_norms": FieldRule(),  # `block.join` applies the norms, outside the kernels
    "wide_qk_norm": FieldRule(refused=("norm_qkv",)),
    "rotary_dim": FieldRule(refused=("norm_qkv",)),
    "rotary_layers": FieldRule(("norm_qkv",)),  # in the angles
    "local_theta": FieldRule(("norm_qkv",)),
    "attention_scale": FieldRule(refused=("attend",)),
    "attention_cap": FieldRule(refused=("attend",)),
    "logit_cap": FieldRule(refused=("norm_logits",)),
    "logit_divisor": FieldRule(refused=("norm_logits",)),
    "embedding_scale": FieldRule(),
    "residual_scale": FieldRule(),
    "shared_ffn": FieldRule(),  # only moe_add reads it, which has no kernel
    "expert_bias": FieldRule(),
    "sinks": FieldRule(refused=("attend",)),
}


def check_config(op: str, config: Config) -> None:
    """Raise Unsupported if a field of `config` has a value that the kernel of `op` does not support."""
    for field in fields(config):
        value, known = getattr(config, field.name), FIELDS.get(field.name)
        if known and op not in known.refused:
            continue
        if field.default is MISSING or value != field.default:
            raise Unsupported(f"{op} has no kernel for {field.name} = {value!r}")
