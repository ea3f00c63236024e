"""Many clients at once, for long: `python -m llamaspec.benchmarks.serve_load --minutes 10`.

The server is a process of its own, with the built-in model and the rows of `--together`. Each of `--connections`
clients keeps one connection and asks again and again, whole or streamed; one request in twenty leaves in the middle.
One prompt in five is long, and begins as others do, so that the cache has it in part. `--cache-tokens` leaves room for
few, so that requests give way.
Every text is compared with that of the same request alone, which is asked for before the load. A client that gets 429
waits as long as the server says. All traffic stays on this machine.

It fails if an answer is neither right nor 429 or 503, or if the server's memory grows in the second half by more than
the noise of the first. Results are one JSON object on stdout.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from llamaspec.benchmarks.load import percentiles

ROOT = Path(__file__).parents[2]
SERVE = [sys.executable, "-c", "from llamaspec import cli; cli.main()", "serve", "--port", "0"]
WORDS = "fox bird kite dog moon boat tree cake rain song".split()
BEGINNING = " ".join(f"The {one} saw a {other}." for one in WORDS for other in WORDS)  # of long prompts: 860 tokens
LEAVES = 0.05  # of all requests
SETTLE = 60.0  # seconds of load before memory counts: pages fill, and pools of the allocator grow
SAMPLE = 5.0  # seconds between two looks at memory


class Ask(NamedTuple):
    """A request."""

    path: str
    body: dict[str, Any]


def requests(count: int) -> list[Ask]:
    """Make different requests: of several lengths, at temperature 0 and above, some with log-probabilities.

    One in ten is a chat, whose template a process of its own renders. One in five continues a long text, the others a
    short one.
    """
    draw, made = random.Random(0), []
    for seed in range(count):
        body: dict[str, Any] = {"seed": seed, "max_tokens": draw.choice([16, 32, 64])}
        body["temperature"] = draw.choice([0, 0.8, 1])
        text, asks = f"a {draw.choice(WORDS)} and a {draw.choice(WORDS)}.", draw.random() < 0.25
        if seed % 10 == 0:
            body["messages"] = [{"role": "user", "content": f"Tell me a story about {text}"}]
            made.append(Ask("/v1/chat/completions", body | ({"logprobs": True, "top_logprobs": 20} if asks else {})))
        else:
            before = BEGINNING[: draw.choice([500, 1000, 2000])] + " " if seed % 5 == 1 else ""
            body["prompt"] = f"{before}Once upon a time there was {text}"
            made.append(Ask("/v1/completions", body | ({"logprobs": draw.randrange(21)} if asks else {})))
    return made


def text_in(choice: dict[str, Any]) -> str:
    """Find the text of a choice, whole or in a chunk, of either endpoint."""
    said = choice.get("message") or choice.get("delta")
    return choice.get("text", "") if said is None else said.get("content") or ""


class Load:
    """Clients of one server, and what they got."""

    def __init__(self, session: aiohttp.ClientSession, url: str, asks: list[Ask], until: float):
        """Ask for `asks` at `url` until a time of the loop's clock."""
        self.session, self.url, self.asks, self.until = session, url, asks, until
        self.texts: list[str] = []  # of each request alone
        self.outcomes: Counter[str] = Counter()
        self.seconds: list[float] = []

    async def ask(self, number: int, *, stream: bool, leave: bool = False) -> tuple[int | str, str, float]:
        """Ask once; returns status, text, and the seconds that the server wants before the next try.

        The status is 0 after leaving, -1 of a stream that breaks off, and the code of an error within a stream.
        """
        path, body = self.asks[number]
        async with self.session.post(self.url + path, json=body | {"stream": stream}) as reply:
            if reply.status != 200:
                await reply.read()
                return reply.status, "", float(reply.headers.get("Retry-After", 1))
            if not stream:
                return 200, text_in((await reply.json())["choices"][0]), 0.0
            text, ended = "", False
            async for line in reply.content:
                if line == b"data: [DONE]\n":
                    ended = True
                elif line.startswith(b"data: "):
                    said = json.loads(line[6:])
                    if "error" in said:
                        return str(said["error"]["code"]), text, 1.0
                    text += text_in(said["choices"][0])
                    if leave:
                        return 0, text, 0.0
            return (200 if ended else -1), text, 0.0

    async def client(self, seed: int) -> None:
        """Ask again and again, and judge what comes."""
        draw = random.Random(seed)
        while asyncio.get_running_loop().time() < self.until:
            number, began = draw.randrange(len(self.asks)), time.monotonic()
            leave = draw.random() < LEAVES
            try:
                stream = leave or draw.random() < 0.5
                status, text, wait = await self.ask(number, stream=stream, leave=leave)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.outcomes[f"broken: {type(error).__name__}"] += 1
                continue
            if status == 200:
                right = text == self.texts[number]
                self.outcomes["right" if right else "wrong text"] += 1
                self.seconds.append(time.monotonic() - began)
            else:
                self.outcomes["left" if status == 0 else str(status)] += 1
                await asyncio.sleep(wait * (1 + draw.random()))


def ends(values: list[float]) -> list[float] | None:
    """Give the least and the greatest; None where a short run has no values."""
    return [min(values), max(values)] if values else None


def resident(pid: int) -> float:
    """Read the resident memory of a process, in MB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


async def watch(pid: int, until: float) -> list[tuple[float, float]]:
    """Look at a process's memory again and again: seconds since the start, MB."""
    loop = asyncio.get_running_loop()
    began, seen = loop.time(), []
    while loop.time() < until:
        seen.append((loop.time() - began, resident(pid)))
        await asyncio.sleep(SAMPLE)
    return seen


async def run(options: argparse.Namespace, url: str, pid: int) -> dict[str, Any]:
    """Ask for every text alone, then load the server."""
    loop = asyncio.get_running_loop()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        load = Load(session, url, requests(options.texts), 0.0)
        for number in range(options.texts):
            status, text, _ = await load.ask(number, stream=False)
            assert status == 200
            load.texts.append(text)
        print(f"{options.texts} texts alone; now {options.connections} clients", file=sys.stderr, flush=True)
        load.until = loop.time() + 60 * options.minutes
        clients = [loop.create_task(load.client(seed)) for seed in range(options.connections)]
        memory = await watch(pid, load.until)
        await asyncio.gather(*clients)
        async with session.get(f"{url}/metrics") as reply:
            metrics = await reply.text()
    figures = {
        name: float(value)
        for name, value in re.findall(
            r"^llamaspec_((?:completion|cached|prompt)_tokens|preemptions)_total (\S+)", metrics, re.M
        )
    }
    waited = percentiles(load.seconds)
    settled = [megabytes for seconds, megabytes in memory if seconds >= min(SETTLE, 30 * options.minutes)]
    half = len(settled) // 2
    first, second = settled[:half], settled[half:]
    return {
        "connections": options.connections,
        "together": options.together,
        "minutes": options.minutes,
        "outcomes": dict(load.outcomes),
        "seconds of an answer, p50, p99": [waited["p50"], waited["p99"]],
        "tokens a second": figures["completion_tokens"] / (60 * options.minutes),
        "engine": figures,
        "MB, first half": ends(first),
        "MB, second half": ends(second),
    }


def judge(result: dict[str, Any]) -> list[str]:
    """List what must not be."""
    allowed = {"right", "left", "429", "503"}
    wrong = [f"{count} times {name}" for name, count in result["outcomes"].items() if name not in allowed]
    first, second = result["MB, first half"], result["MB, second half"]
    if first and second:
        (low, high), (_, later) = first, second
        if later > high + max(high - low, 0.01 * high):
            wrong.append(f"memory grew from {high:.0f} to {later:.0f} MB")
    return wrong


def address(log: Path, server: subprocess.Popen[str]) -> str:
    """Wait for the line of a log that says where the server is. Raises ValueError where the server ends before."""
    while True:
        ended = server.poll() is not None  # We look at it first, so that we read all of what an ended one has said.
        said = log.read_text()
        if found := re.search(r"(http://\S+)\n", said):
            return found[1]
        if ended:
            raise ValueError(f"the server did not start: {said.strip()}")
        time.sleep(0.1)


def main() -> None:
    """Start the server, load it, stop it, and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--together", type=int, default=64, help="requests that decode at once")
    parser.add_argument("--cache-tokens", type=int, help="room for keys and values (default: that of all requests)")
    parser.add_argument("--texts", type=int, default=40, help="different requests")
    options = parser.parse_args()
    limits = ["--max-batch", str(options.together), "--max-connections", str(options.connections + 8)]
    if options.cache_tokens:
        limits += ["--cache-tokens", str(options.cache_tokens)]
    with tempfile.NamedTemporaryFile() as log:  # A pipe that nobody reads fills, and then the server waits.
        with subprocess.Popen([*SERVE, *limits], cwd=ROOT, stderr=log, text=True) as server:
            try:
                result = asyncio.run(run(options, address(Path(log.name), server), server.pid))
            finally:
                server.terminate()
            result["exit status"] = server.wait(120)
    wrong = judge(result) + ([] if result["exit status"] == 0 else [f"exit status {result['exit status']}"])
    print(json.dumps(result | {"wrong": wrong}, indent=2))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
