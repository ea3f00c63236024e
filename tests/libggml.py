"""libggml in a process of its own, of a Python that has llama-cpp-python and gguf: what it makes of weights and files.

    python -m tests.libggml

from the root of the repository answers requests, a line of JSON each: {"quantize": TYPE, "cols": COLS, "data": BASE64}
of float32, {"dequantize": TYPE, "data": BASE64} of blocks, {"logits": FILE, "ids": [...]}; with {"data": BASE64}.
"""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]


class Libggml:
    """The process, from the side of who asks it."""

    def __init__(self, process: "subprocess.Popen[str]"):
        assert process.stdin and process.stdout
        self._requests, self._answers = process.stdin, process.stdout

    def quantize(self, w: np.ndarray, type: str) -> np.ndarray:
        """Of float32 [rows, cols], bytes [rows, bytes]."""
        raw = self._ask(quantize=type, cols=w.shape[1], data=_text(w.astype("<f4").tobytes()))
        return np.frombuffer(raw, np.uint8).reshape(len(w), -1)

    def dequantize(self, blocks: np.ndarray, type: str) -> np.ndarray:
        """The float32 that bytes of whole blocks stand for, one after the other."""
        return np.frombuffer(self._ask(dequantize=type, data=_text(blocks.tobytes())), "<f4")

    def logits(self, file: Path, ids: list[int]) -> np.ndarray:
        """What llama.cpp computes, float32 [seq, vocab]."""
        return np.frombuffer(self._ask(logits=str(file), ids=ids), "<f4").reshape(len(ids), -1)

    def _ask(self, **request: Any) -> bytes:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return base64.b64decode(json.loads(self._answers.readline())["data"])


@contextmanager
def libggml(python: str) -> Iterator[Libggml]:
    """Of a Python that has it."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([python, "-m", "tests.libggml"], text=True, cwd=ROOT, **pipes) as process:
        try:
            yield Libggml(process)
        finally:
            process.terminate()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main() -> None:
    import llama_cpp  # pyright: ignore[reportMissingImports]

    from tests.goldens.make_gguf import Model
    from tests.goldens.quantizers.make_ggml import Ggml

    @llama_cpp.llama_log_callback
    def silent(level: Any, text: Any, user_data: Any) -> None:
        pass

    llama_cpp.llama_log_set(silent, None)
    ggml = Ggml()

    def answer(request: dict[str, Any]) -> bytes:
        raw = base64.b64decode(request.get("data", ""))
        match request:
            case {"quantize": type, "cols": cols}:
                return ggml.quantize(np.frombuffer(raw, "<f4").reshape(-1, cols), type)
            case {"dequantize": type}:
                return ggml.dequantize(np.frombuffer(raw, np.uint8), type).astype("<f4").tobytes()
            case _:
                return Model(Path(request["logits"])).logits(request["ids"]).astype("<f4").tobytes()

    for line in sys.stdin:
        print(json.dumps({"data": _text(answer(json.loads(line)))}), flush=True)


if __name__ == "__main__":
    main()
