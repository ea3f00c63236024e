"""Write eval_gguf.json: models that llama.cpp's own quantiser makes, all matrices of one type, and its logits of them.

From the root of the repository, with LLAMASPEC_DATA,

    python -m tests.goldens.make_eval_gguf write FOLDER

writes two models in float32, in the project's own environment, and in one of llama.cpp's (Python 3.11),

    pip install numpy gguf llama-cpp-python
    python -m tests.goldens.make_eval_gguf read FOLDER

has it quantise and run them. The tests make the same codes, and hold them against the hashes of its files' tensors.
stories260K's hidden vectors of 172 numbers are filled up with zeros to 192, which 32 divides.
"""

import base64
import hashlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.goldens import make_gguf

TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "IQ4_NL": 25, "MXFP4": 38}  # llama_ftype
IDS = [1, 17, 42, 63, 5, 5, 30, 21]
SHOWN = 7  # the position whose logits are kept: it sees all others
FFN = 192


def models(data: Path | None) -> dict[str, Any]:
    """In float32, as `tests.gguf_files` has files."""
    from tests import families, gguf_files

    made = {"random": gguf_files.file_of(make_gguf.CONFIG, families.random_tensors(make_gguf.CONFIG, seed=1))}
    if data:
        made["stories260K"] = padded_story(data)
    for file in made.values():
        file.keys["tokenizer.ggml.model"] = (gguf_files.STRING, "none")
    return made


def padded_story(data: Path) -> Any:
    from model.checkpoints.open import open_checkpoint
    from tests import gguf_files

    checkpoint = open_checkpoint(data / "stories260K" / "stories260K.bin")
    c, tensors = checkpoint.config, {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    for name, array in tensors.items():
        more = FFN - c.ffn
        if "gate_proj" in name or "up_proj" in name:
            tensors[name] = np.pad(array, [(0, more), (0, 0)])
        elif "down_proj" in name:
            tensors[name] = np.pad(array, [(0, 0), (0, more)])
    config = {
        "model_type": "llama", "hidden_size": c.dim, "intermediate_size": FFN, "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "vocab_size": c.vocab,
        "max_position_embeddings": c.context, "rms_norm_eps": c.eps, "rope_theta": c.theta,
    }  # fmt: skip
    return gguf_files.file_of(config, tensors)


def quantised(file: Any, type: str) -> tuple[Any, str]:
    """The file with all its matrices in `type`, and the hash of these."""
    from reference.quantizers import ggml
    from tests import gguf_files

    tensors = dict(file.tensors)
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2:
            codes = ggml.encode(np.frombuffer(tensor.data, "<f4").reshape(tensor.shape), type)
            tensors[name] = gguf_files.Tensor(tensor.shape, codes.tobytes(), gguf_files.CODES[type])
    matrices = {str(name): tensor.data for name, tensor in tensors.items() if len(tensor.shape) == 2}
    return gguf_files.File(file.keys, tensors), digest(matrices)


def digest(matrices: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(matrices[name] for name in sorted(matrices))).hexdigest()


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, file in models(Path(os.environ["LLAMASPEC_DATA"])).items():
        file.write(folder / f"{name}.gguf")


def read(folder: Path) -> None:
    from importlib import metadata

    import gguf  # pyright: ignore[reportMissingImports]
    import llama_cpp  # pyright: ignore[reportMissingImports]

    made = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("llama_cpp_python", "gguf")},
    }
    goldens: dict[str, Any] = {"made": made, "models": {}}
    for source in sorted(folder.glob("*.gguf")):
        goldens["models"][source.stem] = types = {}
        for type, ftype in TYPES.items():
            path = folder / f"{source.stem}-{type}.quantised"
            options = llama_cpp.llama_model_quantize_default_params()
            options.ftype, options.pure, options.nthread = ftype, True, 1
            code = int(gguf.GGMLQuantizationType[type])
            options.output_tensor_type = options.token_embedding_type = code
            assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), options) == 0
            matrices = [tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) == 2]
            found = {int(tensor.tensor_type) for tensor in matrices}
            rows = make_gguf.Model(path).logits(IDS)
            types[type] = {
                "types": sorted(found),
                "sha256": digest({tensor.name: tensor.data.tobytes() for tensor in matrices}),
                "logits": base64.b64encode(rows[SHOWN].tobytes()).decode(),
            }
    (Path(__file__).parent / "eval_gguf.json").write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
