"""Write logits.json: transformers' logits for a random checkpoint of each of `tests.support.families`.

    python -m tests.goldens.make_logits

Run it in the root of the repository, in a separate environment:

    pip install torch transformers safetensors ml_dtypes

The goldens are float32 and have float32's roundoff: about 1e-6 times the largest logit.
"""

import json
import platform
import tempfile
from pathlib import Path

import numpy as np

from tests.support.families import FAMILIES, write_checkpoint

COMMAND = "python -m tests.goldens.make_logits"
SEQ = 24
POSITIONS = [0, 6, 7, 13, 23]  # with Mistral's window of 7, position 6 is the last that sees every token


def logits(directory: Path, tokens: list[int]) -> np.ndarray:
    """Compute logits with transformers, [seq, vocab] float32."""
    # Imported here, since pytest imports every module for its doctests, and may run without these packages.
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report  # no missing, unexpected or mismatched keys
    model.eval()
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def shortest(x: np.float32) -> float:
    """Return the float with the fewest digits that rounds to `x`.

    >>> shortest(np.float32(0.1))
    0.1
    """
    return float(np.format_float_scientific(x, unique=True))


def golden(config: dict) -> dict:
    """Draw tokens, and compute the logits at `POSITIONS`."""
    tokens = np.random.RandomState(1).randint(config["vocab_size"], size=SEQ).tolist()
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), config)
        all_logits = logits(Path(directory), tokens)
    assert all_logits.shape == (SEQ, config["vocab_size"]) and all_logits.dtype == np.float32
    assert np.abs(all_logits).max() >= 5, "too small to tell one model from another"
    return {
        "tokens": tokens,
        "positions": POSITIONS,
        "logits": [[shortest(x) for x in all_logits[position]] for position in POSITIONS],
    }


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    versions = {
        "command": COMMAND,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }
    torch.set_num_threads(1)  # with several threads, the order of some sums changes from run to run
    families = {name: golden(config) for name, config in FAMILIES.items()}
    # Write one line per list of numbers, so that a diff shows which position changed.
    lines = [f'{{"made": {json.dumps(versions)},', '"families": {']
    for name, entry in families.items():
        rows = ",\n".join(json.dumps(row) for row in entry["logits"])
        lines += [f'"{name}": {{"tokens": {entry["tokens"]},', f'"positions": {entry["positions"]},']
        lines += [f'"logits": [\n{rows}]}}' + ("" if name == list(families)[-1] else ",")]
    text = "\n".join([*lines, "}}", ""])
    assert json.loads(text) == {"made": versions, "families": families}
    (Path(__file__).parent / "logits.json").write_text(text)


if __name__ == "__main__":
    main()
