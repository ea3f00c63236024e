"""Run llama.cpp's and transformers' tokenizers in a separate process, to encode texts.

Start it in the root of the repository with

    python -m tests.model.tokenizers.other_tokenizers

It reads one JSON request per line and answers {"ids": [[...], ...]}:

    {"llama_cpp": FILE, "texts": [...], "special": BOOL, "ends": BOOL}
    {"transformers": FOLDER, "texts": [...], "ends": BOOL}

If "special" is true, the name of a control token in a text is encoded as this token. If "ends" is true, the ids contain
the BOS and EOS that the program puts around a text.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.processes import REPOSITORY


class OtherTokenizers:
    """A client of the process that runs other tokenizers."""

    def __init__(self, process: "subprocess.Popen[str]"):
        assert process.stdin and process.stdout
        self._requests, self._answers = process.stdin, process.stdout

    def llama_cpp(self, file: Path, *texts: str, special: bool = False, ends: bool = False) -> list[list[int]]:
        """Encode texts as llama.cpp does; return the ids of each text."""
        return self._ask(llama_cpp=str(file), texts=texts, special=special, ends=ends)

    def transformers(self, folder: Path, *texts: str, ends: bool = False) -> list[list[int]]:
        """Encode texts as transformers does; return the ids of each text."""
        return self._ask(transformers=str(folder), texts=texts, ends=ends)

    def _ask(self, **request: Any) -> list[list[int]]:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return json.loads(self._answers.readline())["ids"]


@contextmanager
def other_tokenizers(python: str) -> Iterator[OtherTokenizers]:
    """Start the tokenizer process with a Python that has llama-cpp-python, transformers, or both."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        [python, "-m", "tests.model.tokenizers.other_tokenizers"], text=True, cwd=REPOSITORY, **pipes
    ) as process:
        try:
            yield OtherTokenizers(process)
        finally:
            process.terminate()


def main() -> None:
    @cache
    def llama_cpp(path: str) -> Any:
        import llama_cpp  # pyright: ignore[reportMissingImports]

        return llama_cpp.Llama(path, vocab_only=True, verbose=False)

    @cache
    def transformers(folder: str) -> Any:
        from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

        return AutoTokenizer.from_pretrained(folder)

    def encode(request: dict[str, Any], text: str) -> Sequence[int]:
        match request:
            case {"llama_cpp": path, "special": special, "ends": ends}:
                return llama_cpp(path).tokenize(text.encode(), add_bos=ends, special=special) if text else []
            case {"transformers": folder, "ends": ends}:
                return transformers(folder).encode(text, add_special_tokens=ends)
        raise ValueError(request)

    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"ids": [list(encode(request, text)) for text in request["texts"]]}), flush=True)


if __name__ == "__main__":
    main()
