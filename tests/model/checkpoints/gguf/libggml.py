"""Run libggml in a separate process, to quantize and dequantize weights and to run GGUF files.

The process needs a Python that has llama-cpp-python and gguf. It is started in the root of the repository with

    python -m tests.model.checkpoints.gguf.libggml

It reads one JSON request per line and answers {"data": RESULT}. Bytes and float32 arrays are in base64:

    {"quantize": TYPE, "cols": COLS, "data": BASE64}    the blocks of the float32 numbers in data; "importance", BASE64,
                                                        may hold the importances of the columns
    {"dequantize": TYPE, "data": BASE64}                the float32 numbers of the blocks in data
    {"logits": FILE, "ids": [...]}                      the logits in float32
    {"products": FILE, "ids": [...]}                    by matrix name, its inputs and its products in float32
    {"greedy": FILE, "text": TEXT, "count": COUNT}      the ids of the text, and of COUNT greedy tokens after it
    {"quantize_file": FILE, "to": FILE, "type": TYPE}   null; writes FILE to "to", with all matrices in TYPE
    {"mix_file": FILE, "to": FILE, "ftype": FTYPE, "importances": {NAME: BASE64, ...}}
                                                        null; writes FILE to "to" in the mixture FTYPE
"""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.processes import REPOSITORY


class Libggml:
    """A client of the process that runs libggml."""

    def __init__(self, process: "subprocess.Popen[str]"):
        assert process.stdin and process.stdout
        self._requests, self._answers = process.stdin, process.stdout

    def quantize(self, w: np.ndarray, type: str, importance: np.ndarray | None = None) -> np.ndarray:
        """Quantize float32 weights [rows, cols] to blocks of `type`, uint8 [rows, bytes]."""
        more = {} if importance is None else {"importance": _text(importance.astype("<f4").tobytes())}
        blocks = self._ask(quantize=type, cols=w.shape[1], data=_text(w.astype("<f4").tobytes()), **more)
        return np.frombuffer(base64.b64decode(blocks), np.uint8).reshape(len(w), -1)

    def dequantize(self, blocks: np.ndarray, type: str) -> np.ndarray:
        """Decode the bytes of whole blocks of `type` to float32 weights."""
        return _floats(self._ask(dequantize=type, data=_text(blocks.tobytes())))

    def logits(self, file: Path, ids: list[int]) -> np.ndarray:
        """Compute llama.cpp's logits, float32 [seq, vocab]."""
        return _floats(self._ask(logits=str(file), ids=ids)).reshape(len(ids), -1)

    def products(self, file: Path, ids: list[int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return llama.cpp's inputs and products of each matrix, by tensor name. Both are float32 [seq, features]."""
        products, seq = self._ask(products=str(file), ids=ids), len(ids)
        return {name: (_floats(x).reshape(seq, -1), _floats(y).reshape(seq, -1)) for name, (x, y) in products.items()}

    def greedy(self, file: Path, text: str, count: int) -> list[int]:
        """Return the tokens of `text` and `count` greedy tokens after it."""
        return self._ask(greedy=str(file), text=text, count=count)

    def quantize_file(self, file: Path, to: Path, type: str) -> None:
        """Quantize all matrices of the GGUF file `file` to `type` with llama.cpp, and write the result to `to`."""
        self._ask(quantize_file=str(file), to=str(to), type=type)

    def mix_file(self, file: Path, to: Path, ftype: int, importances: Mapping[str, np.ndarray] | None = None) -> None:
        """Quantize the GGUF file `file` to the mixture `ftype`, and write the result to `to`.

        `importances` maps a tensor's name to the importances of its columns.
        """
        texts = {name: _text(array.astype("<f4").tobytes()) for name, array in (importances or {}).items()}
        self._ask(mix_file=str(file), to=str(to), ftype=ftype, importances=texts)

    def _ask(self, **request: Any) -> Any:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return json.loads(self._answers.readline())["data"]


@contextmanager
def libggml(python: str) -> Iterator[Libggml]:
    """Start the libggml process with the interpreter `python`."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [python, "-m", "tests.model.checkpoints.gguf.libggml"], text=True, cwd=REPOSITORY, **pipes
    ) as process:
        try:
            yield Libggml(process)
        finally:
            process.terminate()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


def main() -> None:
    import llama_cpp  # pyright: ignore[reportMissingImports]

    from tests.goldens import make_eval_gguf, make_mixtures
    from tests.goldens.make_gguf import Model
    from tests.goldens.quantizers.make_ggml import Ggml

    @llama_cpp.llama_log_callback
    def silent(level: Any, text: Any, user_data: Any) -> None:
        pass

    llama_cpp.llama_log_set(silent, None)
    ggml = Ggml()

    ftypes = {type: ftype for types in make_eval_gguf.TYPES.values() for type, ftype in types.items()}

    def answer(request: dict[str, Any]) -> Any:
        raw = base64.b64decode(request.get("data", ""))
        match request:
            case {"quantize": type, "cols": cols}:
                columns = base64.b64decode(request.get("importance", ""))
                importance = np.frombuffer(columns, "<f4") if columns else None
                return _text(ggml.quantize(np.frombuffer(raw, "<f4").reshape(-1, cols), type, importance))
            case {"dequantize": type}:
                return _text(ggml.dequantize(np.frombuffer(raw, np.uint8), type).astype("<f4").tobytes())
            case {"logits": file, "ids": ids}:
                return _text(Model(Path(file)).logits(ids).astype("<f4").tobytes())
            case {"products": file, "ids": ids}:
                products = Model(Path(file)).products(ids)
                return {name: [_text(part.tobytes()) for part in pair] for name, pair in products.items()}
            case {"greedy": file, "text": text, "count": count}:
                return Model(Path(file)).greedy(text, count)[0]
            case {"quantize_file": file, "to": to, "type": type}:
                make_eval_gguf.quantize(Path(file), Path(to), type, ftypes[type])
            case {"mix_file": file, "to": to, "ftype": ftype, "importances": texts}:
                importances = {name: np.frombuffer(base64.b64decode(text), "<f4") for name, text in texts.items()}
                make_mixtures.quantize(Path(file), Path(to), ftype, importances)

    for line in sys.stdin:
        print(json.dumps({"data": answer(json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
