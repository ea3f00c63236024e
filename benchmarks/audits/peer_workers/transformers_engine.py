"""Times Hugging Face transformers on PyTorch with its cache, in a plain loop instead of its `generate`.

transformers_engine.py DIRECTORY THREADS DTYPE [DEVICE]    answers on standard input (`benchmarks.audits.peer_workers`)
"""

import json
import sys
from time import perf_counter

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

PROMPT = 8


class TransformersEngine:
    def __init__(self, path: str, dtype: str, device: str = "cpu"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self.device, self.model = device, loaded.to(device).eval()
        self.vocab = self.model.config.vocab_size

    def feed(self, ids: list[int], cache):
        """Feed tokens, and return the likeliest next token and the cache."""
        fed = torch.tensor([ids], device=self.device)
        out = self.model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax()), out.past_key_values

    def prefill(self, count: int) -> dict:
        began = perf_counter()
        self.feed([i % self.vocab for i in range(count)], None)
        return {"seconds": perf_counter() - began}

    def decode(self, count: int) -> dict:
        first, cache = self.feed([i % self.vocab for i in range(PROMPT)], None)
        ids = [first]
        began = perf_counter()
        for _ in range(count):
            drawn, cache = self.feed(ids[-1:], cache)
            ids.append(drawn)
        return {"seconds": perf_counter() - began, "ids": ids}


def main():
    path, threads, *form = sys.argv[1:]
    torch.set_num_threads(int(threads))
    engine = TransformersEngine(path, *form)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps({"versions": versions}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            ((request, count),) = json.loads(line).items()
            print(json.dumps(getattr(engine, request)(count)), flush=True)


if __name__ == "__main__":
    main()
