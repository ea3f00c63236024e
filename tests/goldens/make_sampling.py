"""Write sampling.json: the distributions that transformers' logits processors give.

    python -m tests.goldens.make_sampling

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch transformers

The processors run in float64, on logits without ties or near-ties: a library's result for ties depends on its sort.
"""

import json
import platform
from pathlib import Path

import numpy as np

COMMAND = "python -m tests.goldens.make_sampling"
VOCAB = 12
ROWS = 3  # rows of logits, each combined with every entry of `OPTIONS`
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
OPTIONS = [
    NEUTRAL,
    *({**NEUTRAL, "temperature": t} for t in (0.1, 0.7, 1.5, 10.0)),
    *({**NEUTRAL, "top_k": k} for k in (1, 2, 5, 11, 12, 50)),
    *({**NEUTRAL, "top_p": p} for p in (0.01, 0.3, 0.6, 0.9, 0.99)),
    *({**NEUTRAL, "min_p": p} for p in (0.01, 0.1, 0.5, 0.9)),
    *({**NEUTRAL, "repetition_penalty": r} for r in (0.8, 1.1, 1.5, 3.0)),
    # Combined options, where the order matters: each filter removes some tokens that the previous filter kept.
    {"temperature": 2.0, "top_k": 8, "top_p": 0.9, "min_p": 0.4, "repetition_penalty": 1.2},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 2.0},
    {"temperature": 3.0, "top_k": 7, "top_p": 0.7, "min_p": 0.7, "repetition_penalty": 0.7},
    {"temperature": 0.6, "top_k": 5, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
]


def shape(logits: list[float], seen: list[int], options: dict) -> list[float]:
    """Compute the sampling distribution with transformers' processors, in the order that its `generate` uses."""
    # Imported here, since pytest imports every module for its doctests, and may run without these packages.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    processors = [
        transformers.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]),
        transformers.TemperatureLogitsWarper(options["temperature"]),
    ]
    if options["top_k"]:
        processors.append(transformers.TopKLogitsWarper(options["top_k"]))
    if options["top_p"] < 1:
        processors.append(transformers.TopPLogitsWarper(options["top_p"]))
    if options["min_p"] > 0:
        processors.append(transformers.MinPLogitsWarper(options["min_p"]))
    scores = torch.tensor([logits], dtype=torch.float64)
    for processor in processors:
        scores = processor(torch.tensor([seen]), scores)
    return scores.softmax(dim=-1)[0].tolist()


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
    random = np.random.RandomState(0)
    blocks = []
    for _ in range(ROWS):
        logits = (2 * random.standard_normal(VOCAB)).round(3).tolist()
        seen = sorted(random.choice(VOCAB, 4, replace=False).tolist())
        assert np.diff(np.sort(logits)).min() > 1e-3
        cases = [{"options": options, "p": shape(logits, seen, options)} for options in OPTIONS]
        lines = ",\n".join(json.dumps(case) for case in cases)
        blocks.append(f'{{"logits": {json.dumps(logits)},\n"seen": {json.dumps(seen)},\n"cases": [\n{lines}]}}')
    text = f'{{"made": {json.dumps(versions)},\n"rows": [\n' + ",\n".join(blocks) + "\n]}\n"
    assert len(json.loads(text)["rows"]) == ROWS
    (Path(__file__).parent / "sampling.json").write_text(text)


if __name__ == "__main__":
    main()
