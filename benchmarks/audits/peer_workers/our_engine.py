"""Times llamaspec as `generate` runs it: in bursts (calls that draw many tokens), with the host's work after each
burst.

python -m llamaspec.benchmarks.audits.peer_workers.our_engine MODEL float32|bfloat16|SCHEME|stored [CONTEXT]

`stored` keeps weights in the dtypes of the file. Activations and the cache have the dtypes that `generate` chooses.
The engine answers requests on standard input, as the package describes. It also answers `{"read": tokens}` with two
numbers: the read bandwidth of this machine in bytes per second, and the bytes that a step reads after `tokens` decoded
tokens.
"""

import json
import sys
from time import perf_counter
from typing import Any

import jax

from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.insight.cost import decode_cost
from llamaspec.model.insight.machine import Reader, about
from llamaspec.model.llama import choose_dtype, load_backend
from llamaspec.model.options import RunOptions, SamplingOptions
from llamaspec.model.running.session import Session
from llamaspec.model.weights.loading import abstract_params

PROMPT = 8
VERSIONS = ("llamaspec", "jax", "jaxlib")
GREEDY = SamplingOptions(temperature=0.0)


class LlamaspecEngine:
    def __init__(self, path: str, form: str, context: str | None = None):
        checkpoint = open_checkpoint(path)
        self.vocab, self.config = checkpoint.config.vocab, checkpoint.config
        dtype: Any = form if form in ("float32", "bfloat16") else None
        scheme = None if form in ("float32", "bfloat16", "stored") else form
        options = {"context": int(context) if context else None, "dtype": dtype, "quantize": scheme}
        self.backend = load_backend(checkpoint, RunOptions(**options, greedy=True, own_process=True))
        run = quantized(checkpoint, scheme) if scheme else checkpoint
        chosen = choose_dtype(dtype, run, platform=jax.default_backend())
        self.params = abstract_params(self.config, dtype=chosen, positions=1, tensors=run.tensors)
        self.reader: Reader | None = None

    def draw(self, prompt: int, count: int) -> tuple[list[float], list[int]]:
        """Draw `count` tokens after a prompt.

        Returns a list of times and the tokens. The list has the time of the start, and then the end of each burst.
        """
        ids = [i % self.vocab for i in range(prompt)]
        session = Session[Any, Any](self.backend, vocab=self.vocab)
        times, drawn = [perf_counter()], []
        for burst, _ in session.bursts(ids, max_new_tokens=count, options=GREEDY, seed=0, stops=frozenset()):
            times.append(perf_counter())
            drawn += burst
        return times, drawn

    def prefill(self, count: int) -> dict:
        (began, ended), _ = self.draw(count, 1)
        return {"seconds": ended - began}

    def decode(self, count: int) -> dict:
        (_, first, *_, last), ids = self.draw(PROMPT, count + 1)
        return {"seconds": last - first, "ids": ids}

    def read(self, count: int) -> dict:
        cost = decode_cost(self.params, self.config, position=PROMPT + count / 2, batch=1)
        self.reader = self.reader or Reader()
        return {"read": self.reader(), "bytes": cost.bytes}


def main():
    engine = LlamaspecEngine(*sys.argv[1:])
    versions = about()["versions"]  # llamaspec has none if it runs from a checkout
    print(json.dumps({"versions": {name: versions[name] for name in VERSIONS if name in versions}}), flush=True)
    for line in sys.stdin:
        ((request, count),) = json.loads(line).items()
        print(json.dumps(getattr(engine, request)(count)), flush=True)


if __name__ == "__main__":
    main()
