"""Servers with equal fingerprints that start together with empty caches compute the same bits."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import numpy as np
import pytest

from llamaspec.model.device import Device
from llamaspec.model.ops.xla import XLA
from llamaspec.model.options import RunOptions
from llamaspec.model.running.compile import UNTUNED, compiler_options
from llamaspec.model.weights.loading import abstract_params
from llamaspec.serving import loading
from llamaspec.serving.programs import ProgramSizes, compile_serving
from tests.support.processes import REPOSITORY
from tests.support.random_models import CONFIGS, random_checkpoint

PROCESSES = 3
SECONDS = 240.0  # a process needs 5 s, and more on a busy machine

SERVER = """
import hashlib, sys, threading
import jax
import numpy as np
from llamaspec.commands.serve import _fingerprint
from llamaspec.model.options import RunOptions
from llamaspec.serving.loading import load_engine
from llamaspec.serving.request import Finished, Request
from tests.support.random_models import CONFIGS, random_checkpoint
from tests.serving.serving_site import TOKENIZER

jax.config.update("jax_enable_compilation_cache", False)
print("ready", flush=True)
sys.stdin.readline()
checkpoint = random_checkpoint(CONFIGS["2 to 1, wide, tied"], seed=0)
engine = load_engine(checkpoint, RunOptions(context=48), width=3)
digest, ended = hashlib.sha256(), []
requests = [Request((1, 2, 5 + i), 16, temperature=0.9, seed=i, logprobs=5, prompt_logprobs=2) for i in range(4)]
events = [[] for _ in requests]
done = [threading.Event() for _ in requests]

def deliver(i):
    def take(event):
        events[i].append(event)
        if isinstance(event, Finished):
            done[i].set()
    return take

for i, request in enumerate(requests):
    engine.submit(request, deliver(i))
for event in done:
    assert event.wait(200)
for answer in events:
    kinds = [event for event in answer if not isinstance(event, Finished)]
    tokens = [token for event in kinds if hasattr(event, "ids") for token in event.ids]
    numbers = [number for event in kinds for number in event.logprobs]
    assert len(tokens) == 16 and len(numbers) == 18, answer
    digest.update(repr(tokens).encode() + np.array(numbers).tobytes())
engine.close()
names = ("context", "dtype", "quantize", "cache", "kernels", "max_batch", "devices")
print(_fingerprint("random", dict.fromkeys(names), TOKENIZER, None, None), digest.hexdigest(), flush=True)
"""


@pytest.mark.slow  # 25 s
def test_servers_that_compile_at_once_under_load_give_equal_bits():
    command = [sys.executable, "-c", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    servers = [subprocess.Popen(command, **pipes) for _ in range(PROCESSES)]
    try:
        for server in servers:
            assert server.stdout and server.stdout.readline() == "ready\n"
        for server in servers:  # They all compile at the same time.
            assert server.stdin
            server.stdin.write("\n")
            server.stdin.flush()
        lines = {server.communicate(timeout=SECONDS)[0] for server in servers}
    finally:
        for process in (*load, *servers):
            process.kill()
            process.wait()
    (line,) = lines
    assert line.startswith("fp_")


class Recorded(Exception):
    """Raised to stop `load_engine` once the programs are compiled."""


@pytest.mark.parametrize("options", [{"backend": "reference"}, {"parallel": "context"}, {"emulate_activations": "fp8"}])
def test_an_engine_refuses_options_that_it_cannot_follow(options):
    checkpoint = random_checkpoint(CONFIGS["2 to 1, wide, tied"], seed=0)
    with pytest.raises(ValueError, match=f"got .*{next(iter(options.values()))}"):
        loading.load_engine(checkpoint, RunOptions(**options))


@pytest.mark.parametrize(("model", "scheme"), [("2 to 1, wide, tied", "q8"), ("experts", None)])
def test_no_program_of_the_server_is_tuned(monkeypatch, model, scheme):
    """No program of the server is autotuned. With autotuning, four servers on one GPU gave three sets of logprobs."""
    compiled: dict[str, dict[str, Any]] = {}
    real_compile = jax.stages.Lowered.compile

    def compile(self: jax.stages.Lowered, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
        compiled[self.as_text().split("@", 1)[1].split(" ")[0]] = options or {}
        return real_compile(self)

    def loaded(*_: Any, **__: Any) -> Any:
        raise Recorded

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    monkeypatch.setattr(loading, "default_device", lambda: Device("gpu", "NVIDIA A100", "8.0"))
    monkeypatch.setattr(loading, "load_params", loaded)
    checkpoint = random_checkpoint(CONFIGS[model], seed=0)
    with suppress(Recorded):
        loading.load_engine(checkpoint, RunOptions(context=24, quantize=scheme), width=2)
    assert compiled == dict.fromkeys(["jit_prefill", "jit_decode", "jit_set_row"], compiler_options("gpu") | UNTUNED)


def test_a_program_for_several_devices_is_not_tuned(monkeypatch):
    passed: list[dict[str, Any]] = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, options: passed.append(options))
    config = CONFIGS["2 to 1, wide, tied"]
    sizes = ProgramSizes(2, 8, 4, 4, 8, 3, np.dtype(np.float32))
    spread: list[Callable[..., Any]] = []

    def over_devices(run: Callable[..., Any], arguments: Any) -> Any:
        spread.append(run)
        return run, arguments

    params = abstract_params(config, dtype=np.dtype(np.float32), positions=24)
    compile_serving(params, config, ops=XLA, sizes=sizes, platform="gpu", spread=over_devices)
    assert len(spread) == 3 and passed == [compiler_options("gpu") | UNTUNED] * 3
