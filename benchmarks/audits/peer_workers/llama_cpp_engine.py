"""llama.cpp through llama-cpp-python's bindings, as its own examples call it.

llama_cpp_engine.py MODEL.gguf THREADS            answers requests on standard input (`benchmarks.audits.peer_workers`)
llama_cpp_engine.py MODEL.gguf THREADS TO TYPE    quantizes the model with llama.cpp and writes it to TO
"""

import ctypes
import json
import sys
from time import perf_counter

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np

PROMPT = 8


@llama_cpp.llama_log_callback
def silent(level, text, user_data):
    pass


def quantize(source: str, threads: int, destination: str, kind: str):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = threads
    if failed := llama_cpp.llama_model_quantize(source.encode(), destination.encode(), ctypes.byref(params)):
        sys.exit(f"llama.cpp could not write {destination}: {failed}")


class LlamaCppEngine:
    def __init__(self, path: str, threads: int):
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            sys.exit(f"llama.cpp could not read {path}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 1024
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)

    def clear(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def feed(self, ids: list[int]) -> int:
        """Feed tokens, and return the likeliest next token."""
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, len(ids))):
            sys.exit("llama.cpp could not decode")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, -1), (self.vocab,))
        return int(logits.argmax())

    def prefill(self, count: int) -> dict:
        self.clear()
        began = perf_counter()
        self.feed([i % self.vocab for i in range(count)])
        return {"seconds": perf_counter() - began}

    def decode(self, count: int) -> dict:
        self.clear()
        ids = [self.feed([i % self.vocab for i in range(PROMPT)])]
        began = perf_counter()
        for _ in range(count):
            ids.append(self.feed(ids[-1:]))
        return {"seconds": perf_counter() - began, "ids": ids}


def main():
    path, threads = sys.argv[1], int(sys.argv[2])
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    if len(sys.argv) > 3:
        quantize(path, threads, *sys.argv[3:])
        return
    engine = LlamaCppEngine(path, threads)
    print(json.dumps({"versions": {"llama-cpp-python": llama_cpp.__version__}}), flush=True)
    for line in sys.stdin:
        ((request, count),) = json.loads(line).items()
        print(json.dumps(getattr(engine, request)(count)), flush=True)


if __name__ == "__main__":
    main()
