"""Equal fingerprints, equal bits: servers that start together, each with an empty cache, compute the same numbers."""

import subprocess
import sys

from tests.processes import REPOSITORY

PROCESSES = 3
SECONDS = 240.0  # a process takes five, and more if the machine is busy

SERVER = """
import hashlib, sys, threading
import jax
import numpy as np
from llamaspec.commands.serve import _fingerprint
from llamaspec.serving.loading import load_engine
from llamaspec.serving.request import Finished, Request
from tests.random_models import CONFIGS, random_checkpoint
from tests.serving_site import TOKENIZER

jax.config.update("jax_enable_compilation_cache", False)
print("ready", flush=True)
sys.stdin.readline()
checkpoint = random_checkpoint(CONFIGS["2 to 1, wide, tied"], seed=0)
engine = load_engine(checkpoint, context=48, width=3)
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
print(_fingerprint("random", dict.fromkeys(names), TOKENIZER, None), digest.hexdigest(), flush=True)
"""


def test_servers_that_compile_at_once_under_load_give_equal_bits():
    command = [sys.executable, "-c", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    servers = [subprocess.Popen(command, **pipes) for _ in range(PROCESSES)]
    try:
        for server in servers:
            assert server.stdout and server.stdout.readline() == "ready\n"
        for server in servers:  # All of them begin to compile at the same time.
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
