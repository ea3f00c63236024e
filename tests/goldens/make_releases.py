"""Write the table of releases in docs/models.md: which load, which are refused, and how they run on a CPU and an H200.

    python -m tests.goldens.make_releases

`releases.json` has the relevant keys of each release's config.json; keys marked `unconfirmed` come from one source
only. A quantized release names its base release in `of`. Nothing is downloaded: we read each config.json as if we
opened a model, and `ops_for` chooses the ops for its shapes.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llamaspec.model.checkpoints.checkpoint import CheckpointError, Codes, Tensor
from llamaspec.model.checkpoints.gguf import layout
from llamaspec.model.checkpoints.gguf.blocks import FORMS
from llamaspec.model.checkpoints.huggingface.config import read_config
from llamaspec.model.checkpoints.huggingface.quantized import read_rule
from llamaspec.model.checkpoints.huggingface.stacked_experts import METHOD
from llamaspec.model.device import HOPPER, Device
from llamaspec.model.ops.choice import OpsChoice, ops_for
from llamaspec.model.options import choose_context
from llamaspec.model.running.programs import prompt_chunk
from llamaspec.model.tensors import QUANTIZABLE, Role, weights
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.gpu_codes import arranged
from llamaspec.model.weights.loading import abstract_params
from llamaspec.model.weights.params import Experts, Params
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.mx import BLOCK

RELEASES = Path(__file__).with_name("releases.json")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- releases: python -m tests.goldens.make_releases -->", "<!-- end of releases -->"
GGUF_OF = "meta-llama/Llama-3.1-8B-Instruct"  # its matrices are used for every type of GGUF

CPU, H200 = Device("cpu", "cpu"), Device("gpu", "NVIDIA H200", HOPPER)
BFLOAT16 = np.dtype(jnp.bfloat16)


class Row(NamedTuple):
    """One row of the table. `refusal` is the error message for a release that does not load."""

    names: str
    on_cpu: str = ""
    on_h200: str = ""
    refusal: str = ""


def releases() -> list[dict[str, Any]]:
    """Read the entries of releases.json, which have `names` and `config`.

    In an entry with `of`, `of` names the base release. The entry gets the base release's config, but keeps its own
    quantization_config.
    """
    entries = json.loads(RELEASES.read_text())
    known = {name: entry["config"] for entry in entries if "config" in entry for name in entry["names"]}
    return [
        {"names": entry["names"], "config": known[entry["of"]] | {"quantization_config": entry["quantization_config"]}}
        if "of" in entry
        else entry
        for entry in entries
    ]


def rows() -> Iterator[Row]:
    """Make the row of every release."""
    for entry in releases():
        yield _judged(", ".join(entry["names"]), entry["config"])


def gguf_rows() -> Iterator[Row]:
    """Make a row for each ggml type, with all matrices in that type. Types with equal results share a row."""
    [config] = [read_config(entry["config"], RELEASES) for entry in releases() if GGUF_OF in entry["names"]]
    names_by_row: dict[tuple[str, str, str], list[str]] = {}
    for name in layout.TYPE_NAMES.values():
        row = _of_type(config, name)
        names_by_row.setdefault(row[1:], []).append(name)
    for outcome, names in names_by_row.items():
        yield Row(", ".join(names), *outcome)


def _of_type(config: Config, name: str) -> Row:
    if name not in layout.BLOCKS:
        return Row(name, refusal="is not supported")
    if name not in FORMS:
        return _run(name, config, None)
    form, group = FORMS[name]
    return _run(name, config, _in_codes(config, (*QUANTIZABLE, Role.EMBEDDING), form, group, zeros=False))


def _judged(names: str, values: Mapping[str, Any]) -> Row:
    path = Path("config.json")
    try:
        config, rule = read_config(dict(values), path), read_rule(dict(values), path)
    except CheckpointError as error:
        return Row(names, refusal=str(error).removeprefix("config.json: ").partition(" (only ")[0])
    if rule is None:
        stacked = values.get("quantization_config", {}).get("quant_method") == METHOD
        return _run(names, config, _in_codes(config, (Role.EXPERT,), "mxfp4", BLOCK, zeros=False) if stacked else None)
    group = rule.group_of(config.dim)
    coded = (Role.MATRIX, Role.EXPERT)
    return _run(names, config, _in_codes(config, coded, rule.form, group, zeros=rule.zeros))


def _in_codes(config: Config, roles: tuple[Role, ...], form: Any, group: int, *, zeros: bool) -> dict[str, Tensor]:
    """Build a checkpoint's tensors with quantized weights in the given roles. The tensors have shapes but no data."""
    tensors = {}
    for weight in weights(_shortened(config)):
        coded = weight.role in roles
        row = group if group < config.dim else weight.shape[-1]
        codes = Codes(form, row, zeros=zeros, bytes=0, parts=lambda: iter(())) if coded else None
        dtype = np.dtype(np.float32) if coded else BFLOAT16
        tensors[weight.name] = Tensor(weight.shape, dtype, lambda: np.empty(0), codes)
    return tensors


def _shortened(config: Config) -> Config:
    """Keep only the first layers of a config, enough to have every kind of layer."""
    kinds = [(config.window(layer), config.uses_rope(layer)) for layer in range(config.layers)]
    layers = max(kinds.index(kind) for kind in set(kinds)) + 1
    windows, rotary = (pattern and pattern[:layers] for pattern in (config.windows, config.rotary_layers))
    return replace(config, layers=layers, windows=windows, rotary_layers=rotary)


def _run(names: str, config: Config, tensors: Mapping[str, Tensor] | None) -> Row:
    short = _shortened(config)
    places = {}
    for device, dtype in ((CPU, np.dtype(np.float32)), (H200, BFLOAT16)):
        capacity = choose_context(None, config.context) + prompt_chunk(config, device.platform)
        params = abstract_params(short, dtype=dtype, positions=capacity, tensors=tensors)
        if device.has_kernels:
            params = jax.eval_shape(arranged, params)
        choice = ops_for("auto", short, params, batch=1, capacity=capacity, cache_dtype=dtype, device=device)
        places[device] = choice, params
    return Row(names, f"{places[CPU][0].name}, {_form(places[CPU][1])}", _how(places[H200][0]))


def _form(params: Params) -> str:
    """Return a phrase for the table that says whether the matrices stay quantized in memory."""
    layer = params.layers[0]
    if isinstance(layer.qkv.weight, QuantizedMatrix):
        return "from codes"
    experts = isinstance(layer.ffn, Experts) and isinstance(layer.ffn.experts[0].down.weight, QuantizedMatrix)
    return "experts from codes" if experts else "in float32"


def _how(choice: OpsChoice) -> str:
    """Describe which ops run as kernels, and why the other ops do not."""
    if not choice.plain:
        return "kernels"
    plain: dict[str, list[str]] = {}
    for op, reason in choice.plain.items():
        plain.setdefault(re.sub(r"^\w+ (takes|has) ", r"\1 ", reason), []).append(op)  # without the kernel's name
    by_xla = "; ".join(f"{' '.join(ops)}: {reason}" for reason, ops in plain.items())
    return f"kernels, but by XLA {by_xla}" if choice.kernels else f"XLA ({by_xla})"


def table() -> str:
    """Return the Markdown of the table and of the list of refusals below the table."""
    listed, types = list(rows()), list(gguf_rows())
    accepted = [row for row in listed if not row.refusal]
    lines = [
        f"{len(accepted)} of {len(listed)} configurations load. A type of GGUF is that of all matrices of an 8B Llama.",
        "",
        "Widths, depths, heads, theta and vocabulary were compared with copies of the configuration, or of its base's,",
        "in other repositories (the table of LitGPT, and tests of loaders), in part for gpt-oss, Granite 3.3 2B and",
        "Mistral Nemo. Context and eps were not compared throughout, and `quantization_config` not at all. No copy was",
        "found of:",
        f"{', '.join(name for entry in releases() if entry.get('unconfirmed') for name in entry['names'])}.",
        "",
        "| release | on a CPU | on an H200 |",
        "| --- | --- | --- |",
        *(f"| {row.names} | {row.on_cpu} | {row.on_h200} |" for row in accepted),
        *(f"| GGUF: {row.names} | {row.on_cpu} | {row.on_h200} |" for row in types if not row.refusal),
        "",
        "| refused | why |",
        "| --- | --- |",
        *(f"| {row.names} | {row.refusal} |" for row in listed if row.refusal),
        *(f"| GGUF: {row.names} | {row.refusal} |" for row in types if row.refusal),
    ]
    return "\n".join(lines)


def with_table(page: str, new_table: str) -> str:
    """Return `page` with `new_table` between the two marker comments."""
    marked = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    assert marked.search(page)
    return marked.sub(lambda _: f"{BEGIN}\n\n{new_table}\n\n{END}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), table()))
