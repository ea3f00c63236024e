"""`inspect`: the contents of a checkpoint, and the memory and time that it needs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from llamaspec.commands.loading import cache_folder, open_model
from llamaspec.commands.options import COUNT, MODEL, SCHEME_NAMES, SVG, Verb, default_model, devices_option, json_option
from llamaspec.commands.output import save_text, say, write, write_json
from llamaspec.commands.progress import progress_bar


@click.command(cls=Verb)
@click.argument("model", type=MODEL, required=False)
@click.option(
    "--plan", is_flag=True, help="Print the memory that the model needs and its highest possible speed. Loads nothing."
)
@click.option("--shape", metavar="NAME", help="--plan: plan for a published Llama instead of MODEL.")
@click.option(
    "--context",
    type=int,
    metavar="N",
    help="--plan: reserve a KV cache for N tokens.  [default: the model's context, 4096 at most]",
)
@click.option("--batch", type=COUNT, default=1, metavar="N", help="--plan: run N sequences at once.  [default: 1]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="--plan: compute with weights of this dtype.")
@click.option("--quantize", type=click.Choice(SCHEME_NAMES), help="--plan: quantize the matrices by this scheme.")
@click.option("--cache", type=click.Choice(["int8"]), help="--plan: store the KV cache in int8.")
@click.option(
    "--device",
    metavar="NAME",
    help="--plan: plan for this device, such as h200 or rtx-4090.  [default: measure this machine]",
)
@click.option("--graph", "graph_file", type=SVG, metavar="FILE.svg", help="Draw the model and one of its blocks.")
@devices_option
@json_option
@click.pass_context
def inspect(
    invocation: click.Context, model: str | None, plan: bool, as_json: bool, graph_file: str | None, **planned: Any
):
    """Show what a checkpoint contains, and the memory and time that it needs.

    Prints the tensors, with equal layers in one row. Then prints the format, the hyperparameters and the cost of a
    token. Reads only the header of the checkpoint. --plan prints the memory of each part, the work for a token, and how
    many tokens per second a device can reach at most. --graph draws the graph that `convert --to onnx` writes: every
    operator of a block, with shapes and bytes.

    \b
    llamaspec inspect Qwen3-0.6B-Q8_0.gguf --json
    llamaspec inspect Llama-3.2-1B --plan --quantize q4
    llamaspec inspect Llama-3.2-1B --graph llama.svg
    llamaspec inspect --plan --shape llama-3.1-8b --device h200 --context 32768 --batch 8
    """
    if graph_file and (plan or as_json):
        raise click.UsageError(
            f"--graph and {'--plan' if plan else '--json'} exclude each other: give only one of them"
        )
    if plan:
        _plan(model, as_json=as_json, **planned)
        return
    for name in planned:
        if invocation.get_parameter_source(name) != click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name} needs --plan")
    if graph_file:
        _draw(model or default_model(), graph_file)
        return
    from llamaspec.model.insight.describe import describe

    description = describe(open_model(model or default_model()))
    if as_json:
        write_json(description)
        return
    write("\n".join([*_tensor_lines(description["tensors"]), "", *_summary_lines(description)]) + "\n")


def _tensor_lines(tensors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table of tensors.

    On a narrow terminal, shape, dtype and size are on a line below the name.
    """
    from llamaspec.model.insight.describe import format_bytes

    rows = [("tensor", "shape", "dtype", "size")]
    for name, shape, dtype, size, count in folded(tensors):
        rows.append((name, str(shape), dtype, f"{count} x {format_bytes(size)}" if count > 1 else format_bytes(size)))
    names, shapes, dtypes, sizes = (max(map(len, column)) for column in zip(*rows, strict=True))
    needed = names + shapes + dtypes + sizes + 3 * len("  ")
    narrow = sys.stdout.isatty() and shutil.get_terminal_size().columns < needed
    return [
        (f"{name}\n    " if narrow else f"{name:{names}}  ") + f"{shape:{shapes}}  {dtype:{dtypes}}  {size:>{sizes}}"
        for name, shape, dtype, size in rows
    ]


def _summary_lines(description: Mapping[str, Any]) -> list[str]:
    """Return one line with name and value for each field of `description` except the tensors."""
    fields: dict[str, object] = {}
    for key, value in description.items():
        if key == "config":
            fields |= {f"  {name}": number for name, number in value.items()}
        elif key != "tensors":
            fields[key] = f"{value:,}" if isinstance(value, int) else value
    width = max(map(len, fields))
    return [f"{name:{width}}  {value}" for name, value in fields.items()]


def folded(tensors: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int], str, int, int]]:
    """Fold tensors into one row if their names differ only in one number, such as the layer or the expert.

    Returns name, shape, dtype, bytes per tensor, and the number of tensors. Rows keep the order of their first tensors.

    >>> about = {"shape": [2, 2], "dtype": "float32", "bytes": 16}
    >>> folded([{"name": f"layers.{layer}.norm", **about} for layer in (0, 1, 2, 5)])
    [('layers.0-2,5.norm', [2, 2], 'float32', 16, 4)]
    """
    rows = {
        (tuple(tensor["name"].split(".")), tuple(tensor["shape"]), tensor["dtype"], tensor["bytes"]): 1
        for tensor in tensors
    }
    for place in reversed(range(max(len(parts) for parts, *_ in rows))):
        merged: dict[tuple, tuple[list[str], int]] = {}  # labels at this place, and the number of tensors
        for (parts, *about), count in rows.items():
            label = parts[place] if place < len(parts) else ""
            key = (parts[:place], label.isdigit() or label, parts[place + 1 :], count, *about)
            labels, total = merged.get(key, ([], 0))
            merged[key] = ([*labels, label], total + count)
        rows = {
            ((*before, *([_ranges(labels)] if labels[0] else []), *after), *about): total
            for (before, _, after, _, *about), (labels, total) in merged.items()
        }
    return [(".".join(parts), list(shape), dtype, size, count) for (parts, shape, dtype, size), count in rows.items()]


def _ranges(labels: Sequence[str]) -> str:
    """Write numbers as ranges. Labels that are not numbers stay separate.

    >>> _ranges(["0", "1", "2", "5"]), _ranges(["norm"])
    ('0-2,5', 'norm')
    """
    if not labels[0].isdigit():
        return labels[0]
    runs: list[list[int]] = []
    for number in sorted(map(int, labels)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _draw(model: str, path: str) -> None:
    """Draw the model's graph in the file `path`."""
    from llamaspec.learn.model_graph.boxes import read_graph
    from llamaspec.learn.model_graph.drawing import draw_graph
    from llamaspec.model.checkpoints.onnx.graph import llama_graph

    graph = read_graph(llama_graph(open_model(model), data="weights").model)
    save_text(path, draw_graph(graph, title=Path(model).name))
    say(f"wrote {path}")


def _plan(
    model: str | None, *, shape: str | None, device: str | None, context: int | None, batch: int, as_json: bool,
    **chosen: Any,
):  # fmt: skip
    if shape and model:
        raise click.UsageError("give either MODEL or --shape NAME, not both")
    from llamaspec.benchmarks.suites.model_suite import planned
    from llamaspec.model.insight.plan import as_text

    chosen |= {"shape": shape, "device": device, "context": context, "batch": batch, "measured": cache_folder()}
    with progress_bar() as progress:
        resources = planned(model or default_model(), progress=progress, **chosen)
    if as_json:
        write_json(resources.as_json())
    else:
        write(as_text(resources))
