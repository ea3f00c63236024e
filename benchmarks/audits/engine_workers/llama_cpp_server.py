"""Serves a GGUF file with llama-cpp-python's own functions for OpenAI's API.

    python llama_cpp_server.py FILE.gguf --port 8000

Needs llama-cpp-python, but not the libraries that llama-cpp-python's server needs.
"""

from typing import Any

import numpy as np
from http_api import arguments, serve
from llama_cpp import Llama

FIELDS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repeat_penalty", "seed", "stop", "logprobs", "stream"),
    "logit_bias",
)


def fields(body: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    if "repetition_penalty" in body:
        raise ValueError("unknown field repetition_penalty")
    if body.get("n", 1) != 1:
        raise ValueError("n is not supported")
    options = {name: body[name] for name in names if body.get(name) is not None}
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
    return options


def main() -> None:
    parsed = arguments()
    # One token at a time: the products of quantized matrices with many tokens crash on some CPUs (version 0.3.36).
    model = Llama(parsed.model, n_ctx=1024, n_batch=1, logits_all=True, verbose=False, n_threads=2)

    def complete(body: dict[str, Any]) -> Any:
        options = fields(body, FIELDS)
        return plain(model.create_completion(body["prompt"], **options))

    def chat(body: dict[str, Any]) -> Any:
        options = fields(body, (*FIELDS, "top_logprobs"))
        return plain(model.create_chat_completion(body["messages"], **options))

    serve(parsed.port, complete, chat)


def plain(value: Any) -> Any:
    """Turn NumPy numbers into Python numbers, which JSON can hold."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, str | int | float | bool | None) else map(plain, value)


if __name__ == "__main__":
    main()
