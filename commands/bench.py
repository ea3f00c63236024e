"""`bench`: the speed of a model, compared with the limits of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import click

from llamaspec.commands.interrupt import handled_by
from llamaspec.commands.loading import cache_folder, prepare_jax, say_how
from llamaspec.commands.options import (
    COUNT,
    MODEL,
    POSITIVE,
    SVG,
    Verb,
    default_model,
    devices_option,
    kernels_option,
    quantize_option,
)
from llamaspec.commands.output import fail, write
from llamaspec.commands.progress import progress_bar

DEFAULT = click.core.ParameterSource.DEFAULT


@click.command(cls=Verb)
@click.argument("model", type=MODEL, required=False)
@click.option(
    "--suite",
    type=click.Choice(["decode", "growth", "serve", "collectives", "gpu", "models", "kernels", "variants"]),
    default="decode",
    show_default=True,
    help="decode: speed of one model. growth: speed for growing contexts and batches. serve: `llamaspec serve` under "
    "load. collectives: all-reduce over --devices; with MODEL or --shape also decoding on one and on all devices. On "
    "an H100 or H200: kernels measures the kernels at the shapes of published Llamas, models measures whole models, "
    "gpu does both, and variants compares other forms of the kernels.",
)
@click.option("--shape", metavar="NAME", help="Use random weights of a published Llama instead of MODEL.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Compute with weights of this dtype.")
@quantize_option
@click.option(
    "--context",
    type=COUNT,
    metavar="N",
    help="Time a prompt of N tokens, and the decode steps after it. serve: the median length of the prompts.",
)
@click.option(
    "--batch",
    type=COUNT,
    default=1,
    show_default="1; 16 for serve",
    metavar="N",
    help="Run N sequences at once. If N is 2 or more, the suite `models` measures only decoding.",
)
@click.option(
    "--rate",
    "rates",
    type=POSITIVE,
    multiple=True,
    metavar="R",
    help="serve: send R requests per second on average, at random times; may be repeated.  [default: 1/4, 1/2, 3/4 and "
    "all of the server's capacity]",
)
@click.option(
    "--requests",
    type=click.IntRange(2),
    default=64,
    show_default=True,
    metavar="N",
    help="serve: send N requests at each rate.",
)
@kernels_option
@click.option(
    "--backend",
    type=click.Choice(["jax", "reference"]),
    default="jax",
    show_default=True,
    help="decode: run compiled JAX, or the float64 NumPy reference.",
)
@click.option("--dry-run", is_flag=True, help="Run a tiny part of a GPU suite on a CPU, to test the suite.")
@devices_option
@click.option(
    "--json", "json_file", metavar="FILE", help="Write the results, the device and the library versions to FILE."
)
@click.option("--plot", "plot_file", type=SVG, metavar="FILE.svg", help="Draw the results as a chart in FILE.svg.")
@click.option(
    "--tune", "tune_file", metavar="FILE", help="kernels: measure which tile sizes are fastest, and add them to FILE."
)
@click.pass_context
def bench(
    invocation: click.Context,
    suite: str,
    dry_run: bool,
    json_file: str | None,
    plot_file: str | None,
    tune_file: str | None,
    **of: Any,
):
    """Measure how close a model comes to the limits of this machine.

    Without MODEL and --shape, the built-in model runs. bench first measures the machine. The suites gpu, models,
    kernels and variants need an H100 or H200; models takes three minutes, each of the others nine. If you interrupt one
    of them, it writes the results so far to FILE.interrupted, if --json names FILE. The suite serve starts a server,
    sends requests of random lengths at random times over HTTP, and reports how long clients wait. After a run of
    the suite decode or growth, `generate` compares its speed with the measured bandwidth. After
    `bench --devices N`, `inspect --plan --devices N` uses the measured time of an all-reduce.

    \b
    llamaspec bench
    llamaspec bench --shape llama-3.2-1b --quantize q4 --json figures.json
    llamaspec bench --suite serve --rate 2 --rate 8 --plot delays.svg
    llamaspec bench --devices 2
    """
    stated = {name for name in invocation.params if invocation.get_parameter_source(name) != DEFAULT}
    if suite == "serve":
        if refused := stated & {"shape", "backend", "dry_run", "devices", "tune_file"}:
            raise click.UsageError(f"{_option(invocation, min(refused))} does not apply to --suite serve")
        _serve(json_file, plot_file, of, width=of["batch"] if "batch" in stated else None)
        return
    if refused := stated & {"rates", "requests"}:
        raise click.UsageError(f"{_option(invocation, min(refused))} does not apply to --suite {suite}")
    devices = of.pop("devices")
    del of["rates"], of["requests"]
    if suite == "collectives" or devices > 1:
        if suite not in ("collectives", "decode"):
            raise click.UsageError("--devices needs --suite decode or --suite collectives")
        single_device = {"batch": 1, "backend": "jax", "dry_run": False, "plot": None, "tune": None}
        chosen = {**of, "dry_run": dry_run, "plot": plot_file, "tune": tune_file}
        if refused := [name for name, default in single_device.items() if chosen[name] != default]:
            raise click.UsageError(f"--{refused[0].replace('_', '-')} does not work with --devices 2 or more")
        _several(suite, devices, json_file, **{name: value for name, value in of.items() if name not in single_device})
        return
    import json
    from contextlib import ExitStack

    from llamaspec.model.checkpoints.staging import new_file

    on_gpu = suite in ("gpu", "models", "kernels", "variants")
    for name in of if on_gpu else ["dry_run"]:
        if name in stated and (name, suite) != ("batch", "models"):
            raise click.UsageError(f"--{name.replace('_', '-')} does not apply to --suite {suite}")
    if of["shape"] and of["model"]:
        raise click.UsageError("give either MODEL or --shape NAME, not both")
    if tune_file and (suite != "kernels" or plot_file):
        raise click.UsageError("--tune needs --suite kernels and does not work with --plot")
    with ExitStack() as files:
        json_out, plot_out, tune_out = (
            files.enter_context(new_file(path, replace=True)) if path else None
            for path in (json_file, plot_file, tune_file)
        )
        if on_gpu:
            from llamaspec.benchmarks.suites.gpu import report as view
            from llamaspec.benchmarks.suites.gpu.suite import run_suite

            with progress_bar() as progress, handled_by(_interrupt):  # the report contains the results up to Ctrl-C
                batch = of["batch"] if suite == "models" else 1
                rows = run_suite("tuning" if tune_file else suite, dry=dry_run, batch=batch, progress=progress)
                report = view.as_report(rows, suite=suite, dry=dry_run)
        else:
            of["model"] = of["model"] or default_model()
            with progress_bar():
                prepare_jax()
                from llamaspec.benchmarks.suites import model_report as view
                from llamaspec.benchmarks.suites.model_suite import describe_suite, run_suite
                from llamaspec.model.insight.machine import keep_read_rate

                description = describe_suite(suite, **of)
            say_how(description)
            with progress_bar() as progress:
                report = run_suite(suite, progress=progress, **of)
            if folder := cache_folder():
                keep_read_rate(folder, report["ceilings"])
        from llamaspec.benchmarks.common.report import write_report

        if "interrupted" in report:  # FILE may hold complete results from before, so we leave it unchanged
            where = "above"
            if json_file:
                where = f"in {json_file}.interrupted"
                with new_file(f"{json_file}.interrupted", replace=True) as staged_report:
                    write_report(report, staged_report)
            write(view.as_text(report))
            fail(f"interrupted: the results so far are {where}", report["interrupted"])
        if json_out:
            write_report(report, json_out)
        if plot_out:
            plot_out.write_text(view.as_svg(report))
        if tune_file and tune_out:
            from llamaspec.benchmarks.suites.gpu.report import tuned

            table = json.loads(Path(tune_file).read_text()) if Path(tune_file).exists() else {}
            write_report(tuned(table, report), tune_out)
    write(view.as_text(report))
    if wrong := view.wrong(report):
        fail(f"wrong results on this device: {', '.join(wrong)}", 1)


def _several(suite: str, devices: int, json_file: str | None, **of: Any) -> None:
    """Measure and print the time of an all-reduce on several devices, and in some cases the speed of decoding.

    The suite decode always times decoding. The suite collectives times it if a model or a shape is given: on all
    devices, and for comparison on a single device.
    """
    if devices == 1:
        raise click.UsageError("the suite collectives needs --devices 2 or more")
    if of["shape"] and of["model"]:
        raise click.UsageError("give either MODEL or --shape NAME, not both")
    decoding = suite == "decode" or bool(of["shape"] or of["model"])
    from contextlib import nullcontext

    from llamaspec.model.checkpoints.staging import new_file

    of["model"] = of["model"] or default_model()
    with new_file(json_file, replace=True) if json_file else nullcontext() as staged:
        prepare_jax()
        from llamaspec.benchmarks.common.report import write_report
        from llamaspec.benchmarks.suites.multi_device import as_text, measure_several
        from llamaspec.model.insight.machine import keep_link
        from llamaspec.model.insight.plan import Link

        numbers = [devices] if suite == "decode" else [1, devices]
        with progress_bar() as progress:
            report = measure_several(numbers, decoding=decoding, progress=progress, **of)
        if folder := cache_folder():
            for several, fit in report["all_reduce"].items():
                keep_link(folder, several, Link(fit["alpha"], fit["beta"]))
        if staged:
            write_report(report, staged)
    write(as_text(report))


def _serve(json_file: str | None, plot_file: str | None, of: dict[str, Any], *, width: int | None) -> None:
    """Send requests to a server and print how long clients wait. Exits with 1 if requests fail."""
    from contextlib import ExitStack

    from llamaspec.benchmarks.common.report import write_report
    from llamaspec.benchmarks.suites import serve_suite
    from llamaspec.model.checkpoints.staging import new_file

    with ExitStack() as files:
        staged = [
            files.enter_context(new_file(path, replace=True)) if path else None for path in (json_file, plot_file)
        ]
        with progress_bar() as progress:
            report = serve_suite.run_suite(
                model=of["model"] or default_model(),
                width=width or serve_suite.WIDTH,
                progress=progress,
                **{name: of[name] for name in ("rates", "requests", "context", "dtype", "quantize", "kernels")},
            )
        if staged[0]:
            write_report(report, staged[0])
        if staged[1]:
            staged[1].write_text(serve_suite.as_svg(report))
    write(serve_suite.as_text(report))
    if wrong := serve_suite.wrong(report):
        fail("; ".join(wrong), 1)


def _option(invocation: click.Context, name: str) -> str:
    """Return a parameter's option as a user types it, such as `--batch`."""
    return next(option.opts[0] for option in invocation.command.params if option.name == name)


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt
