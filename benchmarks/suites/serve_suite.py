"""Measures a server under load: ours in `bench --suite serve`, or another server in the same way.

We send all requests several times: first all at once, which shows the maximum speed of the server, then at several
rates. A server never finds the prompts of one run in its cache in another run.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from llamaspec.benchmarks.common import svg
from llamaspec.benchmarks.common.load import Ask, Workload, arrivals, draw_requests, send, summarize
from llamaspec.benchmarks.common.report import Column, table
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.insight.machine import about
from llamaspec.model.options import choose_context
from llamaspec.model.weights.loading import Progress, no_progress

WIDTH = 16  # requests that decode at once
SHARES = (0.25, 0.5, 0.75, 1.0)  # default rates, relative to the rate when all requests come at once
START = 600.0  # seconds within which a server must be ready
HIDDEN = "LLAMASPEC_API_KEY"  # a variable that would make our server require an API key
COLUMNS = [
    Column("requests/s due", "due"),
    Column("served", "requests_a_second", ".2f"),
    Column("tokens/s", "tokens_a_second", ",.0f"),
    Column("first token, ms", "first_token"),
    Column("between tokens, ms", "between_tokens"),
    Column("longest pause, ms", "longest_pause"),
    Column("in cache", "hits"),
    Column("processor, s", "processor_seconds", ",.1f"),
]


class Served(NamedTuple):
    """A server that answers: its address, and its process."""

    url: str
    pid: int


def our_command(
    model: str, *, width: int = WIDTH, dtype: str | None = None, quantize: str | None = None, kernels: str = "auto"
) -> list[str]:
    """Make the command that serves a model, without the port. The queue is long enough for all requests."""
    command = [sys.executable, "-m", "llamaspec", "serve", model, "--max-batch", str(width), "--kernels", kernels]
    for name, value in (("--dtype", dtype), ("--quantize", quantize)):
        command += [name, value] if value else []
    return [*command, "--max-queue", "100000", "--max-connections", "100000"]


@contextmanager
def served(command: Sequence[str]) -> Iterator[Served]:
    """Start a server, and wait until it is healthy. Kills the server at the end of the block.

    Raises ValueError with the server's last line if the server ends before it is healthy.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START
    with tempfile.TemporaryFile() as log:
        environment = {name: value for name, value in os.environ.items() if name != HIDDEN}
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=environment)
        try:
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    last = log.read().decode(errors="replace").strip().rpartition("\n")[2]
                    raise ValueError(f"the server did not start: {last or 'no message on stderr'}")
                time.sleep(0.1)
            yield Served(url, process.pid)
        finally:
            process.kill()
            process.wait()


def _is_healthy(url: str) -> bool:
    try:
        _read(f"{url}/health", seconds=5)
    except (OSError, HTTPException):
        return False
    return True


def _read(url: str, *, seconds: float) -> str:
    """Return the text at a URL of a server on this machine. Raises OSError unless the status is 200."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=seconds) as reply:
        return reply.read().decode()


def processor_seconds(pid: int) -> float | None:
    """Read the processor time of all threads of a process. None if the system does not report it."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None


def cache_counts(url: str) -> dict[str, float]:
    """Read how many prompt tokens our server has received, and how many of these it found in its cache."""
    lines = _read(f"{url}/metrics", seconds=30).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(values[f"llamaspec_{name}_total"]) for name in ("prompt_tokens", "cached_tokens")}


def measure_rates(
    asks: Sequence[Ask],
    rates: Sequence[float],
    *,
    open_server: Callable[[], Any],
    metrics: bool,
    seed: int,
    progress: Progress = no_progress,
) -> list[dict[str, Any]]:
    """Measure a server with all requests at once, then at each rate in requests per second.

    Without `rates`, we use `SHARES` of the rate that the server reached with all requests at once. `open_server` makes
    a context manager that yields a `Served`. If `metrics`, this is our server. Each run then has its own
    cache salt, so it finds no prompts of earlier runs in the cache. We start any other server again for each run.
    """
    rows: list[dict[str, Any]] = []
    texts: list[str] | None = None

    def run(server: Served, rate: float | None) -> None:
        nonlocal texts
        url, began = server.url, processor_seconds(server.pid)
        name = "all at once" if rate is None else f"{rate:.2f}"
        extra = {"cache_salt": f"{seed} {len(rows)}"} if metrics else {}
        before = cache_counts(url) if metrics else {}
        answers = send(
            url,
            asks,
            arrivals(len(asks), rate, seed=seed).tolist(),
            extra=extra,
            done=lambda count: progress(f"{name}: {count} of {len(asks)}", count / len(asks)),
        )
        row = {"rate": rate, "due": name, **summarize(answers, texts)}
        if metrics:
            row["cached_tokens"] = int(cache_counts(url)["cached_tokens"] - before["cached_tokens"])
        ended = processor_seconds(server.pid)
        row["processor_seconds"] = None if began is None or ended is None else ended - began
        texts = texts or [answer.text for answer in answers]
        rows.append(row)

    def all_rates() -> Iterator[float]:
        yield from rates or (share * rows[0]["requests_a_second"] for share in SHARES if rows[0]["requests_a_second"])

    if metrics:
        with open_server() as server:
            _warm(server.url)
            run(server, None)
            for rate in all_rates():
                run(server, rate)
        return rows
    with open_server() as server:
        run(server, None)
    for rate in all_rates():
        with open_server() as server:
            run(server, rate)
    return rows


def _warm(url: str) -> None:
    """Send one request before we measure, because the first request of a server is slow."""
    send(url, [Ask((1, 2, 3), 4, 0)], [0.0], extra={})


def run_suite(
    *,
    model: str,
    rates: Sequence[float],
    requests: int,
    context: int | None,
    width: int,
    progress: Progress = no_progress,
    **options: Any,
) -> dict[str, Any]:
    """Serve a model in a new process, and send load to the server. Returns a report for `as_text` and `as_svg`.

    `context` is the median prompt length.

    Raises the errors of `open_checkpoint`. Raises ValueError for prompts beyond the model's context, and if the server
    ends early.
    """
    config = open_checkpoint(model).config
    longest = choose_context(None, config.context)
    work = Workload(requests=requests, **({"prompt": context} if context else {}))
    if work.prompt > longest // 2:
        raise ValueError(f"prompts of {work.prompt} tokens and their answers exceed the context of {longest} tokens")
    asks = draw_requests(work, vocab=config.vocab, context=longest)
    progress("starting the server", 0.0)
    command = our_command(model, width=width, **options)
    rows = measure_rates(
        asks, rates, open_server=lambda: served(command), metrics=True, seed=work.seed, progress=progress
    )
    return {
        **{"suite": "serve", "about": about(), "model": {"name": model, "width": width, **options}},
        **{"workload": asdict(work), "rows": rows},
    }


def as_text(report: Mapping[str, Any]) -> str:
    """Describe the load in words, and show a row for each rate."""
    work, model, machine = report["workload"], report["model"], report["about"]
    chosen = [model[name] for name in ("dtype", "quantize") if model.get(name)]
    rows = report["rows"]
    lines = [
        f"{machine['device']}, {machine['processor']}, "
        + ", ".join(f"{name} {number}" for name, number in machine["versions"].items()),
        ", ".join([model["name"], *chosen, f"{model['width']} at once"]),
        f"{work['requests']} requests per row. Prompts: median {work['prompt']} tokens, sigma {work['spread']}; "
        f"{100 * work['shared']:.0f} % of them with one of {work['prefixes']} shared prefixes of {work['prefix']}. "
        f"Answers: mean {work['answer']} tokens (geometric). Times are p50 / p95 / p99.",
        "",
        table(COLUMNS, [row_cells(row) for row in rows]),
        "",
    ]
    if compared := [row for row in rows[1:] if "different" in row]:
        number = sum(row["different"] for row in compared)
        lines.append(f"{number} of {sum(row['requests'] for row in compared)} texts differ from the first row's")
    return "\n".join(lines) + "\n"


def row_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Format the percentiles of a row, one cell for each delay, and the share of prompt tokens found in the cache.

    >>> row = {"first_token": {"p50": 0.1, "p95": 2.0, "p99": None}, "prompt_tokens": 8, "cached_tokens": 2}
    >>> row_cells(row)["first_token"], row_cells(row)["hits"]
    ('100 / 2,000 / -', '25 %')
    """
    percentiles = {
        name: " / ".join(
            "-" if seconds is None else f"{1e3 * seconds:,.{name == 'between_tokens':d}f}" for seconds in of
        )
        for name, of in ((name, value.values()) for name, value in row.items() if isinstance(value, dict))
    }
    hits = f"{100 * row['cached_tokens'] / row['prompt_tokens']:.0f} %" if row["prompt_tokens"] else None
    return {**row, **percentiles, "hits": hits}


def as_svg(report: Mapping[str, Any]) -> str:
    """Draw percentiles of the delay of the first token and of the time between tokens, over the rate of requests."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, key in (("first token", "first_token"), ("between", "between_tokens")):
        for row in report["rows"]:
            for p, seconds in row[key].items():
                if row["rate"] and seconds:
                    lines.setdefault(f"{name} {p}", []).append((row["rate"], 1e3 * seconds))
    lines = {name: sorted(points) for name, points in lines.items()}
    remark = f"{report['model']['name']}; {report['about']['device']}, {report['about']['processor']}"
    return svg.lines(
        "Delay of the first token, and time between tokens, by the rate of requests",
        remark,
        lines,
        x="requests/s",
        y="ms",
    )


def wrong(report: Mapping[str, Any]) -> list[str]:
    """List the runs in which requests failed, or in which texts differ from the first run's."""
    complaints = []
    for row in report["rows"]:
        if row["errors"]:
            complaints.append(f"{row['due']}: {len(row['errors'])} requests failed, for example: {row['errors'][0]}")
        if row.get("different"):
            complaints.append(f"{row['due']}: {row['different']} texts differ from the run with all requests at once")
    return complaints
