"""Runs `llamaspec conform` on servers that use other engines. Honest servers must conform.

python -m llamaspec.benchmarks.audits.engines [--llama-cpp-python PYTHON] [--transformers-python PYTHON]

Each option names a Python that has the library. All servers serve the built-in model: llama.cpp reads GGUF files that
`convert` writes, and transformers reads a folder. The servers are in `engine_workers`. The llama.cpp server calls
llama-cpp-python's own functions for OpenAI's API. Prints a Markdown table, and exits with 1 if a server does not
conform.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from llamaspec.benchmarks.common.report import Column, table
from llamaspec.benchmarks.suites.serve_suite import our_command, served

WORKERS = Path(__file__).parent / "engine_workers"
FILES = {"F32": (), "Q8_0": ("--quantize", "q8_0"), "Q4_K_M": ("--quantize", "q4_k_m")}  # options of `convert`
PYTHON = click.Path(exists=True, dir_okay=False)
COLUMNS = (
    Column("server", "server"),
    Column("claims", "arithmetic"),
    Column("positions", "positions"),
    Column("explained", "explained"),
    Column("largest difference, nats", "difference", ".2g"),
    Column("largest ratio", "ratio", ".2f"),
    Column("verdict", "verdict"),
)


class Engine(NamedTuple):
    """A server to examine: its name, its command, the model's files, and the arithmetic that it claims to use."""

    name: str
    command: list[str]
    model: str
    arithmetic: str


@click.command()
@click.option("--llama-cpp-python", "llama_cpp", type=PYTHON, help="A Python with llama-cpp-python.")
@click.option("--transformers-python", "transformers", type=PYTHON, help="A Python with transformers and torch.")
def main(llama_cpp: str | None, transformers: str | None):
    """Examine our server and the others, and print a table."""
    rows, statuses = [], []
    with tempfile.TemporaryDirectory() as folder:
        for engine in engines(Path(folder), llama_cpp, transformers):
            cells, status = examine(engine)
            rows.append(cells)
            statuses.append(status)
    print(table(COLUMNS, rows), flush=True)
    sys.exit(any(statuses))


def engines(folder: Path, llama_cpp: str | None, transformers: str | None) -> Iterator[Engine]:
    """Yield the servers to examine, and write the files that they serve."""
    for dtype in ("float32", "bfloat16"):
        yield Engine(f"ours, {dtype}", our_command("stories", dtype=dtype), "stories", dtype)
    if llama_cpp:
        for name, options in FILES.items():
            path = str(folder / f"{name}.gguf")
            convert("stories", path, "--to", "gguf", *options)
            yield Engine(f"llama.cpp, {name}", [llama_cpp, str(WORKERS / "llama_cpp_server.py"), path], path, "ggml")
    if transformers:
        path = str(folder / "stories")
        convert("stories", path, "--to", "safetensors")
        for dtype in ("float32", "bfloat16"):
            command = [transformers, str(WORKERS / "transformers_server.py"), path, "--dtype", dtype]
            yield Engine(f"transformers, {dtype}", command, path, dtype)


def convert(*arguments: str) -> None:
    """Run `llamaspec convert`."""
    subprocess.run([sys.executable, "-m", "llamaspec", "convert", *arguments], check=True, capture_output=True)


def examine(engine: Engine) -> tuple[dict[str, Any], int]:
    """Start a server and examine it. Returns a row of the table, and the exit status of `conform`."""
    with served(engine.command) as server:
        command = ["conform", server.url, "--model", engine.model, "--arithmetic", engine.arithmetic, "--json"]
        done = subprocess.run([sys.executable, "-m", "llamaspec", *command], capture_output=True, text=True)
    if not done.stdout:
        raise click.ClickException(f"{engine.name}: {done.stderr.strip()}")
    report = json.loads(done.stdout)
    positions = report["positions"]
    row = {
        "server": engine.name,
        "arithmetic": engine.arithmetic,
        "positions": len(positions),
        "explained": sum(position["verdict"] == "explained" for position in positions),
        "difference": max((position["difference"] for position in positions), default=None),
        "ratio": max((position["ratio"] for position in positions), default=None),
        "verdict": report["outcome"],
    }
    odd = [finding for finding in report["findings"] if finding["verdict"] != "right"]
    for finding in odd:
        print(f"{engine.name}: {finding['verdict']}: {finding['part']}, {finding['check']}: {finding['message']}")
    return row, done.returncode


if __name__ == "__main__":
    main()
