"""Compare a server's text with the proven text in a file from `llamaspec prove --out FILE`. Needs only Python.

    python check_vectors.py vectors.json http://127.0.0.1:8000 MODEL

The server must speak OpenAI's API (llama.cpp, vLLM, SGLang, LM Studio, llamaspec). Exits with 0 if its greedy text is
the proven one, and with 1 if it differs.
"""

import json
import sys
import urllib.request


def completion(url: str, model: str, prompt: str, tokens: int) -> str:
    """Ask the server how `prompt` continues at temperature 0."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body["repetition_penalty"] = 1.0  # a model's generation_config.json may state another one
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["text"]


def main() -> int:
    path, url, model = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        vectors = json.load(file)
    proven = vectors["text"]
    if not proven:
        print("the file has no proven text")
        return 1
    actual = completion(url, model, vectors["prompt"], sum(vectors["decided"]))
    if actual == proven:
        print(f"right: all {len(proven)} characters equal the proven text")
        return 0
    same = next((i for i, pair in enumerate(zip(actual, proven, strict=False)) if pair[0] != pair[1]), len(actual))
    print(f"wrong after {same} characters: expected {proven[same:]!r}, got {actual[same:]!r}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
