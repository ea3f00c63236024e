"""Write rope.json: transformers' RoPE frequencies, plain and rescaled.

    python -m tests.goldens.make_rope

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch transformers

The goldens are computed in float32, in which theta^(2i/d) has a relative error of about ln(theta) roundings.
"""

import json
import platform
from pathlib import Path

import numpy as np

COMMAND = "python -m tests.goldens.make_rope"


def llama3(factor: float, low: float, high: float, original_context: int) -> dict:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original_context,
    }


CASES = [
    (128, 10_000.0, {"rope_type": "default"}),  # Llama 2
    (128, 500_000.0, {"rope_type": "default"}),  # Llama 3
    (64, 1_000_000.0, {"rope_type": "default"}),  # Qwen2
    (6, 10_000.0, {"rope_type": "default"}),
    (128, 10_000.0, {"rope_type": "linear", "factor": 4.0}),
    (10, 500_000.0, {"rope_type": "linear", "factor": 2.5}),
    (128, 500_000.0, llama3(8.0, 1.0, 4.0, 8192)),  # Llama 3.1
    (64, 500_000.0, llama3(32.0, 1.0, 4.0, 8192)),  # Llama 3.2 1B
    (16, 10_000.0, llama3(3.0, 2.0, 5.0, 100)),
]


def frequencies(head_dim: int, theta: float, parameters: dict) -> np.ndarray:
    """Compute frequencies with transformers, [head_dim / 2] float32."""
    # Imported here, since pytest imports every module for its doctests, and may run without these packages.
    from transformers import LlamaConfig  # pyright: ignore[reportMissingImports]
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # pyright: ignore[reportMissingImports]
    from transformers.models.llama.modeling_llama import (  # pyright: ignore[reportMissingImports]
        LlamaRotaryEmbedding,
    )

    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters={**parameters, "rope_theta": theta},
    )
    rope_type = parameters["rope_type"]
    default = LlamaRotaryEmbedding.compute_default_rope_parameters
    compute = default if rope_type == "default" else ROPE_INIT_FUNCTIONS[rope_type]
    result, attention_factor = compute(config)
    assert attention_factor == 1.0
    return result.numpy()


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
    lines = []
    for head_dim, theta, parameters in CASES:
        values = frequencies(head_dim, theta, parameters)
        assert values.shape == (head_dim // 2,) and values.dtype == np.float32
        shortest = [float(np.format_float_scientific(x, unique=True)) for x in values]
        entry = {"head_dim": head_dim, "theta": theta, "parameters": parameters, "frequencies": shortest}
        lines.append(json.dumps(entry))
    text = f'{{"made": {json.dumps(versions)},\n"cases": [\n' + ",\n".join(lines) + "\n]}\n"
    assert len(json.loads(text)["cases"]) == len(CASES)
    (Path(__file__).parent / "rope.json").write_text(text)


if __name__ == "__main__":
    main()
