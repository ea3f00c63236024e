"""Add llama.cpp's results to the files in tests/goldens/families. llama.cpp reads the GGUF files that we write.

    python -m tests.goldens.make_families_gguf write FOLDER     # in this project's environment
    python -m tests.goldens.make_families_gguf run FOLDER       # in a separate environment

Run both from the root of the repository, after `make_families`. The second environment needs `pip install xllamacpp`,
which includes llama.cpp (2026.10.11549 here). The entry "llama_cpp" gets the log-probabilities of the token after the
golden's tokens.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.goldens.make_families import FOLDER, write_checkpoint

VOCAB = 48
# llama.cpp's server decodes ids, so a file needs some vocabulary.
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(chr(65 + i) for i in range(VOCAB - 3))],
    "tokenizer.ggml.scores": -np.arange(VOCAB).astype(np.float32),
    "tokenizer.ggml.token_type": np.array([2, 3, 3, *[1] * (VOCAB - 3)], np.int32),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
}


def write(folder: Path) -> None:
    """Write a GGUF file for every golden config with an architecture that llama.cpp supports."""
    from llamaspec.model.checkpoints.checkpoint import CheckpointError
    from llamaspec.model.checkpoints.gguf.write import write_gguf
    from llamaspec.model.checkpoints.open import open_checkpoint

    for path in sorted(FOLDER.glob("*.json")):
        with tempfile.TemporaryDirectory() as directory:
            write_checkpoint(Path(directory), json.loads(path.read_text()))
            try:
                write_gguf(open_checkpoint(directory), folder / f"{path.stem}.gguf", vocabulary=VOCABULARY)
            except CheckpointError as error:
                print(error)


def log_probabilities(path: Path, tokens: list[int]) -> list[float]:
    """Compute the log-probabilities of the token after `tokens` with llama.cpp in float32."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx, parameters.n_parallel, parameters.warmup, parameters.fit_params = 256, 1, False, False
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    completion = {"prompt": tokens, "n_predict": 1, "n_probs": VOCAB, "temperature": 0, "cache_prompt": False}
    answer = xllamacpp.Server(parameters).handle_completions(completion)
    entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return [entry["logprob"] for entry in sorted(entries, key=lambda entry: entry["id"])]


def main() -> None:
    verb, folder = sys.argv[1], Path(sys.argv[2])
    if verb == "write":
        write(folder)
    elif verb == "one":
        print(json.dumps(log_probabilities(folder, json.loads(sys.argv[3]))))
    else:
        for path in sorted(folder.glob("*.gguf")):
            place = FOLDER / f"{path.stem}.json"
            golden = json.loads(place.read_text())
            command = [sys.executable, "-m", "tests.goldens.make_families_gguf", "one", str(path)]
            run = subprocess.run([*command, json.dumps(golden["tokens"])], capture_output=True, text=True)
            assert run.stdout, run.stderr
            rounded = [round(value, 6) for value in json.loads(run.stdout.splitlines()[-1])]
            before = place.read_text().split('"logits": [')[0].split('"llama_cpp": ')[0]
            after = place.read_text().split('"logits": [')[1]
            place.write_text(f'{before}"llama_cpp": {json.dumps(rounded)},\n"logits": [{after}')
            print(path.stem)


if __name__ == "__main__":
    main()
