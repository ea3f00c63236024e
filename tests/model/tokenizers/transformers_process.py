"""Run transformers' tokenizers in a separate process, with the files of a folder.

The process uses the first Python with transformers that LLAMASPEC_OTHER_PYTHON names.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SOURCE = """
import json, sys
from transformers import AutoTokenizer
for line in sys.stdin:
    folder, texts = json.loads(line)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        answer = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


class Transformers:
    """A client of a process that reads a folder and texts on each line, and writes the texts' ids."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def encode(self, folder: Path, texts: Sequence[str]) -> list[list[int]] | str:
        """Return the ids of each text without BOS, or the message of the error that transformers raises."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([str(folder), list(texts)]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def transformers_process(python: str) -> Iterator[Transformers]:
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": ""}
    with subprocess.Popen(
        [python, "-c", SOURCE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | quiet,
        text=True,
    ) as process:
        yield Transformers(process)
        assert process.stdin
        process.stdin.close()
