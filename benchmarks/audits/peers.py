"""Compares our speed with llama.cpp and transformers on a CPU: same weights, prompts and cores, in one run.

python -m llamaspec.benchmarks.audits.peers [--llama-cpp-python PYTHON] [--transformers-python PYTHON] [--rounds 5]
python -m llamaspec.benchmarks.audits.peers --llama-server PROGRAM

Each of the first two options names a Python that has the library; our extra `peers` installs llama-cpp-python into this
Python. All engines get the same random Llama: dim 768, 12 layers, 12 heads, ffn 2048, vocab 32000, untied. llama.cpp
quantizes its own files and has its default float16 cache; our cache has the dtype of the weights. Prints Markdown
tables, and writes all numbers to benchmarks/results/raw/peers.json. With `--llama-server`, we instead compare
llama.cpp's server with ours: both serve the built-in model and get the same requests at the same times
(`benchmarks.common.load`).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from llamaspec.benchmarks.common.load import Workload, draw_requests
from llamaspec.benchmarks.common.random_model import random_checkpoint
from llamaspec.benchmarks.common.report import RAW, Column, table, write_report
from llamaspec.benchmarks.suites.serve_suite import COLUMNS, WIDTH, measure_rates, our_command, row_cells, served
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.gguf.write import write_gguf
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.insight.timing import spread
from llamaspec.model.tokenizers.gguf_writer import vocabulary_keys
from llamaspec.model.tokenizers.of_model import tokenizer_of
from llamaspec.reference.config import Config

ROOT = Path(__file__).parents[3]
WORKERS = Path(__file__).parent / "peer_workers"
RAW_FILE = RAW / "peers.json"
CONFIG = Config(768, 12, 12, 12, 64, 2048, vocab=32_000, context=1024, eps=1e-5, theta=1e4)
TINY = replace(CONFIG, dim=256, layers=2, heads=4, kv_heads=4, ffn=512, vocab=512)
CORES = 2
PROMPT, DECODED = 512, 64  # tokens
PAUSE = 0.3  # seconds: idle threads stop spinning

OUR_FORMS = ("float32", "bfloat16", "q8", "q8_row", "q4")
LLAMA_CPP = {"F32": "", "BF16": "BF16", "Q8_0": "Q8_0", "Q4_K_M": "Q4_K_M"}  # names of llama.cpp's quantizer
TRANSFORMERS = ("float32", "bfloat16")

# Pairs of engines, with the speed ratios that we aim for, for decoding and for a prompt.
RATIOS: dict[tuple[str, str], tuple[float | None, float | None]] = {
    ("ours float32", "llama.cpp F32"): (1.0, 1.0),
    ("ours float32", "transformers float32"): (2.2, 1.0),
    ("ours float32", "the floor"): (0.9, None),
    ("ours bfloat16", "ours float32"): (1.5, 1.5),
    ("ours bfloat16", "llama.cpp BF16"): (None, None),
    ("ours bfloat16", "transformers bfloat16"): (None, None),
    ("ours q8", "ours float32"): (2.0, None),
    ("ours q8", "llama.cpp Q8_0"): (0.9, None),
    ("ours q8_row", "ours float32"): (2.0, None),
    ("ours q8_row", "llama.cpp Q8_0"): (0.9, None),
    ("ours q4", "ours float32"): (2.8, None),
    ("ours q4", "llama.cpp Q4_K_M"): (0.75, None),
}

Rates = dict[str, dict[str, list[float]]]  # tokens per second, by engine and request, one number per round


class EngineProcess(NamedTuple):
    """A process that answers requests, and the versions that it reported."""

    ask: Callable[[str, int], dict[str, Any]]
    versions: dict[str, str]


def compare_servers(
    program: str, folder: Path, *, work: Workload, width: int, rates: Sequence[float], tell: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Send load to our server and llama.cpp's, with the built-in model in float32. Returns a row per server and rate.

    `rates` are in requests per second. Without `rates`, we use fractions of the rate that our server reaches if all
    requests come at once. llama.cpp's cache is in float16.
    """
    checkpoint = open_checkpoint("stories")
    config, file = checkpoint.config, str(folder / "stories.gguf")
    write_gguf(checkpoint, file, vocabulary=vocabulary_keys(checkpoint, tokenizer_of(checkpoint, None)))
    slots = ["--parallel", str(width), "--ctx-size", str(width * config.context)]
    llama_server = [program, "--model", file, "--host", "127.0.0.1", *slots, "--no-webui"]
    llama_server += ["--threads", str(len(os.sched_getaffinity(0)))]
    asks = draw_requests(work, vocab=config.vocab, context=config.context)
    rows: list[dict[str, Any]] = []
    for name, command in (("llamaspec", our_command("stories", width=width)), ("llama.cpp", llama_server)):
        measured = measure_rates(
            asks,
            rates,
            open_server=lambda command=command: served(command),
            metrics=name == "llamaspec",
            seed=work.seed,
            progress=lambda stage, share, name=name: tell(f"{name}, {stage}") if share == 1 else None,
        )
        rates = rates or [row["rate"] for row in measured[1:]]
        rows += [{"server": name, **row} for row in measured]
    return rows


@contextmanager
def engine(*command: str, threads: int) -> Iterator[EngineProcess]:
    """Start an engine on this process's cores. Raises ValueError if the engine ends instead of answering."""
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(variables, str(threads))}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=ROOT, env=environment, **pipes) as process:
        requests, answers = process.stdin, process.stdout
        assert requests and answers

        def answer() -> dict[str, Any]:
            if not (line := answers.readline()):
                raise ValueError(f"{' '.join(command)} ended with exit status {process.wait()}")
            return json.loads(line)

        def ask(request: str, count: int) -> dict[str, Any]:
            requests.write(json.dumps({request: count}) + "\n")
            requests.flush()
            return answer()

        try:
            yield EngineProcess(ask, answer()["versions"])
        finally:
            process.terminate()


def commands(
    folder: Path, checkpoint: Checkpoint, *, llama_cpp: str | None, transformers: str | None, cores: int
) -> dict[str, list[str]]:
    """Write the model for each engine. Returns the command that starts each engine."""
    directory = folder / "hf"
    write_huggingface(checkpoint, directory)
    our_engine = [sys.executable, "-m", "llamaspec.benchmarks.audits.peer_workers.our_engine", str(directory)]
    started_by = {f"ours {form}": [*our_engine, form] for form in OUR_FORMS}
    if llama_cpp:
        script, first = str(WORKERS / "llama_cpp_engine.py"), str(folder / "F32.gguf")
        write_gguf(checkpoint, first, vocabulary=vocabulary_keys(checkpoint, None))
        for name, kind in LLAMA_CPP.items():
            file = str(folder / f"{name}.gguf")
            if kind:
                subprocess.run([llama_cpp, script, first, str(cores), file, kind], check=True)
            started_by[f"llama.cpp {name}"] = [llama_cpp, script, file, str(cores)]
    if transformers:
        script = str(WORKERS / "transformers_engine.py")
        for dtype in TRANSFORMERS:
            started_by[f"transformers {dtype}"] = [transformers, script, str(directory), str(cores), dtype]
    return started_by


def measure(engines: Mapping[str, EngineProcess], *, rounds: int, tell: Callable[[str], object]) -> tuple[Rates, dict]:
    """Measure tokens per second in rounds, after a warm-up. Returns the rates, and the tokens that each engine drew.

    The rates also have an entry "the floor": the decoding speed that the measured read bandwidth allows.
    """
    rates: Rates = {name: {"prefill": [], "decode": []} for name in [*engines, "the floor"]}
    drawn: dict[str, list[int]] = {}
    for number in range(rounds + 1):
        tell(f"round {number} of {rounds}" if number else "warm-up round")
        read = engines["ours float32"].ask("read", DECODED)
        rates["the floor"]["decode"].append(read["read"] / read["bytes"])
        for name, worker in engines.items():
            for request, count in (("prefill", PROMPT), ("decode", DECODED)):
                time.sleep(PAUSE)
                answer = worker.ask(request, count)
                rates[name][request].append(count / answer["seconds"])
                drawn[name] = answer.get("ids", [])
    for of in rates.values():
        for request in of:
            of[request] = of[request][1:]
    return rates, drawn


def ratios(rates: Rates) -> list[dict[str, Any]]:
    """Compute the ratio of two engines' speeds in each round. Returns median, minimum and maximum per pair.

    >>> rates = {"ours q4": {"decode": [6.0, 9.0]}, "ours float32": {"decode": [2.0, 3.0]}}
    >>> [(row["ours"], row["to"], row["ratio"], row["least"]) for row in ratios(rates)]
    [('ours q4', 'ours float32', 3.0, 3.0)]
    """
    rows = []
    for (engine_name, base), goals in RATIOS.items():
        for what, least in zip(("decode", "prefill"), goals, strict=True):
            pairs = zip(rates.get(engine_name, {}).get(what, []), rates.get(base, {}).get(what, []), strict=False)
            if quotients := [a / b for a, b in pairs]:
                row = {"ours": engine_name, "to": base, "what": what, "wanted": least}
                rows.append({**row, **dict(zip(("ratio", "least", "most"), spread(quotients), strict=True))})
    return rows


def matching_tokens(drawn: Mapping[str, list[int]]) -> dict[str, int]:
    """Count how many of each engine's first tokens equal our float32 engine's. Rounding causes later differences.

    >>> matching_tokens({"ours float32": [5, 3, 8], "llama.cpp Q8_0": [5, 4, 8]})
    {'ours float32': 3, 'llama.cpp Q8_0': 1}
    """
    reference_ids = drawn["ours float32"]
    return {
        name: next((i for i, (a, b) in enumerate(zip(reference_ids, ids, strict=True)) if a != b), len(ids))
        for name, ids in drawn.items()
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Render the machine, the versions, the speeds, and the ratios with minimum and maximum."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    lines = [
        f"{report['cores']} cores of {report['processor']}; {versions}. Medians of {report['rounds']} rounds, "
        "each with all engines in turn (minimum to maximum).",
        "",
        f"| tokens/s | prompt of {PROMPT} | decoding of {DECODED} | leading tokens equal to our float32 tokens |",
        "|---|---|---|---|",
    ]
    for name, rates in report["rates"].items():
        matching = report["matching_tokens"].get(name)
        lines.append(
            f"| {name} | {_spread(rates['prefill'], '.0f')} | {_spread(rates['decode'], '.1f')} | "
            f"{'' if matching is None else matching} |"
        )
    lines += ["", "| ratio of | to | prompt | goal | decoding | goal |", "|---|---|---|---|---|---|"]
    for engine_name, base in RATIOS:
        row_of = {row["what"]: row for row in report["ratios"] if (row["ours"], row["to"]) == (engine_name, base)}
        if row_of:
            cells = [_cells(row_of.get(what)) for what in ("prefill", "decode")]
            lines.append(f"| {engine_name} | {base} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float], form: str) -> str:
    if not values:
        return ""
    median, least, most = spread(values)
    return f"{median:{form}} ({least:{form}} to {most:{form}})"


def _cells(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return " | "
    goal = "" if row["wanted"] is None else f"{row['wanted']:.2f}"
    return f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f}) | {goal}"


@click.command(help=__doc__)
@click.option(
    "--llama-cpp-python",
    "llama_cpp",
    metavar="PYTHON",
    default=sys.executable if find_spec("llama_cpp") else None,
    help="Path of a Python with llama-cpp-python.  [default: this Python, if it has the library]",
)
@click.option("--transformers-python", "transformers", metavar="PYTHON", help="Path of a Python with transformers.")
@click.option(
    "--llama-server",
    metavar="PROGRAM",
    help="Path of llama.cpp's server program. If given, only this server and llamaspec's are compared, under load.",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--tiny", is_flag=True, help="Use a model of 2 layers to test this program; the numbers mean nothing.")
@click.option("--json", "file", type=click.Path(path_type=Path), default=RAW_FILE, show_default=True)
def main(
    llama_cpp: str | None, transformers: str | None, llama_server: str | None, rounds: int, tiny: bool, file: Path
):
    from llamaspec.model.insight.machine import about

    if llama_server and not (llama_server := shutil.which(llama_server)):
        raise click.BadParameter("there is no such program", param_hint="--llama-server")
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)  # engines inherit this
    if llama_server:
        work = Workload(requests=8, answer=4) if tiny else Workload()
        with tempfile.TemporaryDirectory() as folder:
            rows = compare_servers(
                *(llama_server, Path(folder)),
                **{"work": work, "width": WIDTH, "rates": [20.0] if tiny else []},
                tell=lambda line: click.echo(line, err=True),
            )
        write_report({"about": about(), "workload": asdict(work), "rows": rows}, file)
        click.echo(table([Column("server", "server"), *COLUMNS], map(row_cells, rows)))
        return
    checkpoint = random_checkpoint(TINY if tiny else CONFIG)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        click.echo("writing the models", err=True)
        others_at = {"llama_cpp": llama_cpp, "transformers": transformers, "cores": len(cores)}
        engines = {}
        for name, command in commands(Path(folder), checkpoint, **others_at).items():
            click.echo(f"starting {name}", err=True)
            engines[name] = stack.enter_context(engine(*command, threads=len(cores)))
        rates, drawn = measure(engines, rounds=rounds, tell=lambda line: click.echo(line, err=True))
        machine = about()
        report = {
            **{"processor": machine["processor"], "cores": len(cores), "date": machine["date"], "rounds": rounds},
            "versions": {key: number for worker in engines.values() for key, number in worker.versions.items()},
            "model": {"parameters": sum(int(np.prod(t.shape)) for t in checkpoint.tensors.values()), "tiny": tiny},
            **{"prompt": PROMPT, "decoded": DECODED},
            **{"rates": rates, "matching_tokens": matching_tokens(drawn), "ratios": ratios(rates)},
        }
    write_report(report, file)
    click.echo(markdown(report), nl=False)
    click.echo(file, err=True)


if __name__ == "__main__":
    main()
