"""A model's table of ops is built once. It states why an op is not a kernel.

An op runs as XLA ops instead of a kernel only if the kernel raises `Unsupported`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import llamaspec.model.llama
from llamaspec.model.checkpoints.checkpoint import Codes
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.gguf.blocks import FORMS
from llamaspec.model.forward import decode, forward, prefill
from llamaspec.model.ops.choice import HOPPER, Device, OpsChoice, default_device, describe, ops_for
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.ops.gpu import KERNELS, PROMPT, OpCall, calls, pallas_ops
from llamaspec.model.ops.gpu_config import FIELDS, check_config
from llamaspec.model.ops.routed import Routed
from llamaspec.model.ops.table import Ops
from llamaspec.model.ops.xla import XLA
from llamaspec.model.options import RunOptions
from llamaspec.model.running.programs import Layout, decode_shapes
from llamaspec.model.weights.forms.table import CLASS_OF_FORM
from llamaspec.model.weights.gpu_codes import arranged
from llamaspec.model.weights.loading import abstract_params
from llamaspec.model.weights.params import Params
from llamaspec.pallas_kernels.parts.quantized_product import Int4Product, Int8Product
from llamaspec.pallas_kernels.parts.row_product import RowProduct
from llamaspec.pallas_kernels.unsupported import Unsupported
from llamaspec.reference.config import Config
from llamaspec.reference.rope import LinearScaling
from tests.support.random_models import random_checkpoint

TINY = Config(
    dim=256, layers=2, heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=64, context=128, eps=1e-5, theta=1e4, tied=True
)
WIDE = replace(TINY, dim=1024, heads=16, ffn=1024)  # the narrowest model that kernels with codes support
CAPACITY = 136
BFLOAT16 = np.dtype(jnp.bfloat16)
H200 = Device("gpu", "NVIDIA H200", HOPPER)
SIZES: dict[str, Any] = {"batch": 1, "capacity": CAPACITY, "cache_dtype": BFLOAT16}


def shapes(config: Config, dtype: np.dtype = BFLOAT16) -> Params:
    return abstract_params(config, dtype=dtype, positions=CAPACITY)


def in_codes(params: Params, form: str, group: int) -> Params:
    """Return the shapes of `params` with quantized matrices, in the layout for a GPU that has the kernels."""

    def coded(leaf: Any) -> Any:
        if leaf.ndim != 2:
            return leaf
        rows, cols = leaf.shape
        kind: Any = CLASS_OF_FORM[form]  # type: ignore
        return kind.shapes(rows, cols, Codes(kind.form, group, zeros=False, bytes=0, parts=lambda: iter(())))

    return jax.eval_shape(arranged, params._replace(layers=jax.tree.map(coded, params.layers), head=coded(params.head)))


@pytest.fixture
def untraced() -> Iterator[None]:
    """Clear JAX's cache of traced kernels before and after a test."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def broken(error: type[Exception]) -> Callable[..., Any]:
    def method(*_: Any, **__: Any):
        raise error("a bad unpack")

    return method


@pytest.mark.sampled(3)  # 9 cases, 4 s
@pytest.mark.parametrize("error", [ValueError, TypeError, AssertionError])
@pytest.mark.parametrize(("loop", "method"), [(RowProduct, "scratch"), (Int8Product, "scratch"), (Int4Product, "run")])
def test_a_kernel_error_is_raised_without_fallback(untraced, monkeypatch, loop, method, error):
    form = {Int8Product: "int8", Int4Product: "int4"}.get(loop)
    params = in_codes(shapes(WIDE), form, 64) if form else shapes(WIDE)
    monkeypatch.setattr(loop, method, broken(error))
    for kernels in ("auto", "pallas"):
        with pytest.raises(error, match="a bad unpack"):
            ops_for(kernels, WIDE, params, **SIZES, device=H200)


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_a_later_kernel_error_is_raised_too(untraced, monkeypatch, error):
    """An error in a kernel that was chosen for a model reaches the caller, without a fallback to XLA."""
    ops, reasons = pallas_ops(TINY, shapes(TINY), capacity=CAPACITY)
    assert not any(reasons.values())
    jax.clear_caches()
    monkeypatch.setattr(RowProduct, "scratch", broken(error))
    for call in calls(TINY, shapes(TINY), batch=1, capacity=CAPACITY):
        if call.op != "attend":
            with pytest.raises(error, match="a bad unpack"):
                program(ops, call)


def program(ops: Ops, call: OpCall) -> str:
    op = getattr(ops, call.op)
    return str(jax.make_jaxpr(lambda *arguments: op(*arguments, **call.fixed))(*call.arguments))


def lowered(call: OpCall) -> str:
    """Lower the XLA op that a call names, with the call's arguments.

    A lambda wraps the op, so that the name of its function does not appear in the result.
    """
    op = getattr(XLA, call.op)
    return jax.jit(lambda *arguments: op(*arguments, **call.fixed)).lower(*call.arguments).as_text()


def test_every_config_field_says_which_kernels_support_it():
    """Every field of `Config` is in `FIELDS`, which says which kernels handle the field and which refuse it."""
    assert FIELDS.keys() == {field.name for field in fields(Config)}
    for known in FIELDS.values():
        assert not set(known.handled) & set(known.refused)
        assert {*known.handled, *known.refused} <= KERNELS.keys()


# A different value for every field; each field can change on its own.
CHANGED: dict[str, Any] = {
    "dim": 512, "layers": 3, "heads": 8, "kv_heads": 4, "head_dim": 128, "ffn": 512, "vocab": 72, "context": 64,
    "eps": 1e-6, "theta": 5e5, "scaling": LinearScaling(factor=4.0), "windows": (5, 5), "experts": 4,
    "experts_per_token": 2, "renormalize_experts": False, "tied": False, "qkv_bias": True, "o_bias": True,
    "ffn_bias": True, "qk_norm": True, "activation": "gelu_tanh", "gated": False, "layer_norm": True,
    "parallel_residual": True, "head_qk_norm": True, "pre_norms": False, "post_norms": True,
    "wide_qk_norm": True, "rotary_dim": 32, "rotary_layers": (True, False), "local_theta": 1e3,
    "attention_scale": 0.5, "attention_cap": 5.0, "logit_cap": 5.0, "logit_divisor": 3.0, "embedding_scale": 2.0,
    "residual_scale": 0.5, "shared_ffn": 64, "sinks": True, "expert_bias": True,
}  # fmt: skip
# These fields change only array values, or which ops a model calls with which arguments.
UNSEEN = (
    "theta",
    "scaling",
    "tied",
    "experts",
    "experts_per_token",
    "wide_qk_norm",
    "rotary_layers",
    "local_theta",
    "sinks",
)


@pytest.fixture(scope="module")
def unchanged() -> dict[str, str]:
    """Lower XLA's ops of the unchanged model, to compare with a changed config. Returns the code of each op by name."""
    return {call.name: lowered(call) for call in calls(TINY, shapes(TINY), batch=1, capacity=CAPACITY)}


def test_every_field_is_changed():
    assert CHANGED.keys() == FIELDS.keys()


FIRST = ("activation", "attention_cap", "qk_norm", "residual_scale", "windows")  # the fields that `make test` changes


@pytest.mark.sampled(5, first=True)  # 39 cases, 12 s
@pytest.mark.parametrize("name", sorted(CHANGED, key=lambda name: name not in FIRST))
def test_harmless_config_fields_do_not_change_the_xla_op(name, unchanged):
    config = replace(TINY, **{name: CHANGED[name]})
    every = calls(config, shapes(config), batch=1, capacity=CAPACITY)
    changed = {call.op for call in every if lowered(call) != unchanged[call.name]}
    declared = {*FIELDS[name].handled, *FIELDS[name].refused}
    assert changed <= declared
    if name not in UNSEEN:
        assert changed == declared


@dataclass(frozen=True)
class Newer(Config):
    """A config with a feature that no kernel supports."""

    nonlinearity: str = "silu"


@dataclass(frozen=True)
class Stranger(Newer):
    """A config with a field that has no default."""

    def __init__(self, **chosen: Any) -> None:
        super().__init__(**chosen)


def newer(**changed: Any) -> Newer:
    return Newer(**vars(TINY), **changed)


def test_gelu_is_refused_by_every_kernel_and_none_computes_silu():
    config = newer(nonlinearity="gelu")
    ops, reasons = pallas_ops(config, shapes(config), capacity=CAPACITY)
    assert reasons == {
        name: f"{name.removesuffix('_prompt')} has no kernel for nonlinearity = 'gelu'" for name in reasons
    }
    assert reasons.keys() == {*KERNELS, PROMPT}
    for call in calls(config, shapes(config), batch=1, capacity=CAPACITY):
        plain, definition = KERNELS[call.op].plain, getattr(XLA, call.op)
        assert program(ops, call) == program(XLA._replace(**{call.op: plain}), call)
        # The fallback is XLA's form itself, except in ops that multiply by kernels.
        assert getattr(plain, "func", plain) is getattr(definition, "func", definition)
    with pytest.raises(ValueError, match=r"norm_gate_up has no kernel for nonlinearity = 'gelu'"):
        ops_for("pallas", config, shapes(config), **SIZES, device=H200)


def test_a_new_field_at_its_default_leaves_the_kernels():
    config = newer()
    _, reasons = pallas_ops(config, shapes(config), capacity=CAPACITY)
    assert not any(reasons.values())


def test_a_table_for_silu_computes_no_gelu():
    """A table of ops is built for one config; a call with a different config raises an error and runs no kernel."""
    ops, _ = pallas_ops(newer(), shapes(TINY), capacity=CAPACITY)
    gelu = newer(nonlinearity="gelu")
    x = jax.ShapeDtypeStruct((1, 1, TINY.dim), BFLOAT16)
    with pytest.raises(ValueError, match="norm_gate_up got arguments with shapes and dtypes for which"):
        jax.eval_shape(lambda x: ops.norm_gate_up(x, shapes(TINY).layers[0], config=gelu), x)


@pytest.mark.parametrize(("switch", "ops"), [("qk_norm", {"norm_qkv"}), ("experts", {"norm_gate_up", "down_add"})])
def test_switches_that_kernels_know_are_refused_where_they_have_no_form(switch, ops):
    config = replace(TINY, **{switch: CHANGED[switch]})
    refused = set()
    for op in KERNELS:
        try:
            check_config(op, config)
        except Unsupported as error:
            assert str(error) == f"{op} has no kernel for {switch} = {CHANGED[switch]!r}"
            refused.add(op)
    assert refused == ops


def test_layers_of_different_forms_get_their_own_ops():
    """If no kernel supports one layer's feed-forward matrices, only this layer's feed-forward ops run as XLA ops."""
    coded, floats = in_codes(shapes(WIDE), "int8", 32), in_codes(shapes(WIDE), "fp8", 32)
    params = coded._replace(layers=[coded.layers[0], coded.layers[1]._replace(ffn=floats.layers[1].ffn)])
    choice = ops_for("auto", WIDE, params, **SIZES, device=H200)
    reason = "in 1 of 2 layers: kernels multiply by fp8 weights with one scale per row, got one scale per 32 columns"
    assert choice.plain == {"norm_gate_up": reason, "down_add": reason}
    assert choice.kernels == tuple(KERNELS)
    assert describe(choice) == f"kernels: {' '.join(KERNELS)}; without a kernel: norm_gate_up down_add ({reason})"
    has_wait = {True: set(), False: set()}
    for layer, by_kernel in zip(params.layers, (True, False), strict=True):
        for call in calls(WIDE, params._replace(layers=[layer]), batch=1, capacity=CAPACITY):
            if call.op in ("norm_gate_up", "down_add"):
                has_wait[by_kernel].add("griddepcontrol_wait" in program(choice.ops, call))
    assert has_wait == {True: {True}, False: {False}}


@pytest.mark.sampled(4)  # 10 cases, 2 s
@pytest.mark.parametrize("type", sorted({kind: type for type, kind in sorted(FORMS.items())}.values()))
def test_every_type_of_a_gguf_file_runs_by_kernels(type):
    form, group = FORMS[type]
    _, reasons = pallas_ops(WIDE, in_codes(shapes(WIDE), form, group), capacity=CAPACITY)
    assert not any(reasons.values())


def test_a_prompt_s_products_are_xla_s_and_its_attention_a_kernel_of_any_length():
    params = shapes(TINY)
    ops, _ = pallas_ops(TINY, params, capacity=CAPACITY)
    attending = next(call for call in calls(TINY, params, batch=1, capacity=CAPACITY) if call.name == PROMPT)
    q, cache, positions = attending.arguments
    for seq in (2, 3, 64):
        q, positions = (
            jax.tree.map(lambda a, seq=seq: jax.ShapeDtypeStruct((1, seq, *a.shape[2:]), a.dtype), tree)
            for tree in (q, positions)
        )
        call = OpCall(PROMPT, (q, cache, positions), attending.fixed)
        assert "Ref<gmem>" in program(ops, call)


def test_arguments_that_the_table_was_not_made_for_are_an_error():
    ops, _ = pallas_ops(TINY, shapes(TINY), batch=1, capacity=CAPACITY)
    for call in calls(TINY, shapes(TINY), batch=2, capacity=CAPACITY):
        with pytest.raises(ValueError, match=rf"{call.op} .*shapes and dtypes.*table of ops.*batch"):
            program(ops, call)


@pytest.mark.parametrize("chunk", [1, 8, 64])
@pytest.mark.parametrize("cache_dtype", [BFLOAT16, np.dtype(np.int8)])
def test_the_programs_of_a_backend_call_ops_in_no_other_form(chunk, cache_dtype):
    """Prefill, forward and decode trace without an error, with the shapes that `load` compiles for."""
    config = replace(TINY, windows=(5, None))
    layout = Layout(batch=1, capacity=72, chunk=chunk, burst=4, cache_dtype=cache_dtype)
    params = abstract_params(config, dtype=BFLOAT16, positions=layout.rows)
    ops = ops_for("auto", config, params, batch=1, capacity=layout.rows, cache_dtype=cache_dtype, device=H200).ops
    cache = jax.eval_shape(partial(layout.empty_cache, config))
    tokens, lengths = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((1, chunk), (1,)))
    jax.eval_shape(partial(prefill, config=config, ops=ops), *(params, tokens, cache, lengths))
    jax.eval_shape(partial(forward, config=config, ops=ops), *(params, tokens, cache))
    step = partial(decode, greedy=True, burst=4, config=config, ops=ops)
    jax.eval_shape(step, params, *decode_shapes(config, cache))


def test_emulated_activations_have_no_kernels_and_say_so(monkeypatch):
    monkeypatch.setattr(llamaspec.model.llama, "default_device", lambda: H200)
    checkpoint = quantized(random_checkpoint(TINY, seed=0), "q8")
    with pytest.raises(ValueError, match="pallas kernels cannot emulate activations: choose xla or cpu"):
        llamaspec.model.llama.load_backend(checkpoint, RunOptions(emulate_activations="q8_0"))


def test_tables_of_ops_are_equal_and_hashable():
    """Two tables of ops for the same arguments are equal and have the same hash, so they share compiled programs."""
    table, again = (pallas_ops(TINY, shapes(TINY), capacity=CAPACITY)[0] for _ in range(2))
    assert table == again and hash(table) == hash(again)
    assert table != pallas_ops(TINY, shapes(TINY), capacity=2 * CAPACITY)[0]
    assert all(isinstance(getattr(table, name), Routed) for name in KERNELS)


def odd_models() -> Iterator[tuple[Config, Params, int]]:
    """Yield models with widths, heads, groups or batches that some kernel does not support."""
    for dim, heads, kv_heads, head_dim, ffn, vocab in (
        (24, 4, 4, 6, 40, 50), (96, 3, 1, 32, 100, 33), (288, 6, 6, 48, 768, 320), (320, 9, 3, 64, 130, 51),
        (256, 18, 2, 64, 264, 64), (512, 66, 1, 64, 1, 8), (1032, 8, 8, 128, 1376, 1032), (1024, 16, 2, 256, 1027, 65),
        (40000, 2, 2, 64, 40000, 8),
    ):  # fmt: skip
        config = replace(
            TINY, layers=1, dim=dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=vocab
        )
        for dtype, batch in product((BFLOAT16, np.dtype(np.float32), np.dtype(np.float16)), (1, 9)):
            yield config, shapes(config, dtype), batch
        for form, group in (
            ("int8", 16),
            ("int8", 32),
            ("int8", 1 << 20),
            ("int4", 32),
            ("int4", 128),
            ("int4", 1 << 20),
        ):
            yield config, in_codes(shapes(config), form, group), 2


@pytest.mark.slow  # 10 s
def test_kernels_raise_only_unsupported_for_odd_models():
    """For unsupported models, kernels raise only `Unsupported`. Any other exception would end a command."""
    refused = 0
    for config, params, batch in odd_models():
        _, reasons = pallas_ops(config, params, batch=batch, capacity=CAPACITY - batch // 2)
        refused += sum(reason is not None for reason in reasons.values())
    assert refused > 400


@pytest.mark.parametrize(
    ("kernels", "device", "name"),
    [
        ("auto", Device("cpu", "cpu"), "cpu"),
        ("auto", Device("gpu", "NVIDIA A100", "8.0"), "xla"),
        ("auto", Device("tpu", "TPU v5"), "xla"),
        ("auto", H200, "pallas"),
        ("xla", H200, "xla"),
        ("cpu", H200, "cpu"),
        ("pallas", H200, "pallas"),
    ],
)
def test_each_device_has_its_table(kernels, device, name):
    choice = ops_for(kernels, TINY, shapes(TINY), **SIZES, device=device)
    assert choice.name == name
    if name == "pallas":
        assert describe(choice) == "kernels: norm_qkv attend project_add norm_gate_up down_add norm_logits"
    else:
        assert choice.ops == {"cpu": CPU, "xla": XLA}[name]
        assert choice.plain.keys() == set(Ops._fields) and choice.kernels == ()


def test_what_cannot_be_chosen_is_refused():
    with pytest.raises(ValueError, match="no kernels named triton: choose auto, xla, cpu or pallas"):
        ops_for("triton", TINY, shapes(TINY), **SIZES)
    with pytest.raises(ValueError, match=r"need a GPU of compute capability 9\.0 .*NVIDIA A100: choose"):
        ops_for("pallas", TINY, shapes(TINY), **SIZES, device=Device("gpu", "NVIDIA A100", "8.0"))
    odd = replace(TINY, dim=264)
    with pytest.raises(
        ValueError, match=r"do not support this whole model \(kernels: .*; without a kernel: .* multiples of 256"
    ):
        ops_for("pallas", odd, shapes(odd), **SIZES, device=H200)


def test_cards_of_two_kinds_in_a_process_are_refused():
    mixed = H200._replace(others=("8.6",))
    for kernels in ("auto", "pallas"):
        with pytest.raises(ValueError, match=r"of compute capability 9\.0, 8\.6, and .*CUDA_VISIBLE_DEVICES"):
            ops_for(kernels, TINY, shapes(TINY), **SIZES, device=mixed)
    assert ops_for("xla", TINY, shapes(TINY), **SIZES, device=mixed).name == "xla"


def test_a_card_that_is_not_chosen_runs_xla():
    choice = ops_for("auto", TINY, shapes(TINY), **SIZES, device=Device("gpu", "RTX 3060", "8.6", 28))
    assert (choice.name, choice.kernels) == ("xla", ())


@pytest.mark.parametrize("params", [shapes(TINY), in_codes(shapes(WIDE), "int4", 64)], ids=["floats", "codes"])
def test_a_chosen_card_without_wgmma_has_kernels_for_all_ops_but_prompts(monkeypatch, params):
    monkeypatch.setattr("llamaspec.model.device.CHOSEN", ("8", "9"))
    config = TINY if len(params.embedding.shape) and params.embedding.shape[1] == TINY.dim else WIDE
    for kernels in ("auto", "pallas"):
        choice = ops_for(kernels, config, params, **SIZES, device=Device("gpu", "RTX 3060", "8.6", 28))
        assert choice.kernels == tuple(KERNELS)
        assert choice.plain == {
            PROMPT: "attention_prefill needs a GPU with wgmma (compute capability 9.0), got compute capability 8.6"
        }


def test_experts_are_plain_with_a_reason_and_no_obstacle():
    config = replace(TINY, experts=4, experts_per_token=2)
    choice = ops_for("pallas", config, shapes(config), **SIZES, device=H200)
    assert choice.plain == {"moe_add": "experts have no kernel"}
    assert choice.kernels == ("norm_qkv", "attend", "project_add", "norm_logits")


def test_the_device_here():
    assert isinstance(ops_for("auto", TINY, shapes(TINY), **SIZES), OpsChoice)
    assert default_device().platform == jax.default_backend()
