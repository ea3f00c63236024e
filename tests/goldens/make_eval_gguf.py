"""Write eval_gguf.json: models in which llama.cpp quantized all matrices to one type, and llama.cpp's logits.

Run it from the root of the repository, with LLAMASPEC_DATA set. In the project's environment,

    python -m tests.goldens.make_eval_gguf write FOLDER

writes the models in float32. In an environment with llama.cpp (Python 3.11),

    pip install numpy ml_dtypes gguf llama-cpp-python
    python -m tests.goldens.make_eval_gguf read FOLDER

quantizes and runs them. The tests quantize with our code, and compare the hash of the tensors with llama.cpp's. The
models are:

- stories260K: hidden vectors of 172 numbers are padded with zeros to 192, a multiple of 32
- a random model
- a model for Q2_K to Q6_K: rows consist of sixteen random superblocks
- a model with a tokenizer of single bytes that reads a text. We store its loss, and its divergence from the float32
  model.
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

BLOCKS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "IQ4_NL": 25, "MXFP4": 38}  # llama_ftype
SUPERBLOCKS = {"Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18}
TYPES = {
    "random": {"F16": 1, "BF16": 32, **BLOCKS, "TQ1_0": 36, "TQ2_0": 37},
    "stories260K": BLOCKS,
    "superblocks": SUPERBLOCKS,
}
MULTIPLIED = {type: BLOCKS[type] for type in ("Q8_0", "Q5_0", "IQ4_NL", "MXFP4")}  # for the model that reads a text
TEXT = "One day"
IDS = [1, 17, 42, 63, 5, 5, 30, 21]
STORED_LOGITS = 64  # logits per position, at equal distances in the vocabulary
DISTINCT = 16  # distinct superblocks of 256 weights


def model(name: str, data: Path | None = None) -> Any:
    """Build the float32 model `name` with `tests.support.gguf_files`.

    The model stories260K comes from the folder `data`.
    """
    from tests.support import families, gguf_files

    if name == "stories260K":
        assert data
        file = padded_story(data)
    else:
        tensors = families.random_tensors(make_gguf.CONFIG, seed=1)
        if name == "superblocks":
            tensors |= {at: superblocks()[chosen].reshape(tensors[at].shape) for at, chosen in choices().items()}
        file = gguf_files.file_of(make_gguf.CONFIG, tensors)
    file.keys["tokenizer.ggml.model"] = (gguf_files.STRING, "none")
    return file


def reader() -> Any:
    """Build the float32 model that computes a loss on `TEXT`, with a tokenizer of single bytes."""
    from tests.support import families, gguf_files, tiny_tokenizers

    spec = json.loads(tiny_tokenizers.chatml())
    config = {**make_gguf.CONFIG, "vocab_size": len(spec["model"]["vocab"]) + len(spec["added_tokens"])}
    file = gguf_files.file_of(config, families.random_tensors(config, seed=1))
    file.keys |= gguf_files.byte_level_keys(spec, pre="gpt-2")
    file.keys["tokenizer.ggml.bos_token_id"] = (gguf_files.U32, config["vocab_size"] - 3)
    file.keys["tokenizer.ggml.add_bos_token"] = (gguf_files.BOOL, True)
    return file


def superblocks() -> np.ndarray:
    """Draw the 16 different superblocks that make up all rows, [16, 256]."""
    return (np.random.RandomState(5).standard_normal((DISTINCT, 256)) / 16).astype(np.float32)


def choices() -> dict[str, np.ndarray]:
    """Draw the index of every superblock of every matrix; return arrays [rows, superblocks per row] by matrix name."""
    from tests.support import families

    random = np.random.RandomState(3)
    shapes = {name: shape for name, shape in families.tensor_shapes(make_gguf.CONFIG).items() if len(shape) == 2}
    return {name: random.randint(0, DISTINCT, (rows, cols // 256)) for name, (rows, cols) in shapes.items()}


def padded_story(data: Path) -> Any:
    from llamaspec.benchmarks.audits.scheme_forms import padded
    from llamaspec.model.checkpoints.open import open_checkpoint
    from tests.support import gguf_files

    checkpoint = padded(open_checkpoint(data / "stories260K" / "stories260K.bin"), 32)
    c, tensors = checkpoint.config, {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    config = {
        "model_type": "llama", "hidden_size": c.dim, "intermediate_size": c.ffn, "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "vocab_size": c.vocab,
        "max_position_embeddings": c.context, "rms_norm_eps": c.eps, "rope_theta": c.theta,
    }  # fmt: skip
    return gguf_files.file_of(config, tensors)


def quantized(file: Any, type: str) -> tuple[Any, str]:
    """Quantize all matrices of a GGUF file to `type`; return the file and a hash of its tensors."""
    from llamaspec.reference.quantizers import ggml
    from tests.support import gguf_files

    def encoded(w: np.ndarray) -> bytes:
        return (w.astype(gguf_files.DTYPES[type]) if type in gguf_files.DTYPES else ggml.encode(w, type)).tobytes()

    tensors = dict(file.tensors)
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2:
            weights = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
            tensors[name] = gguf_files.Tensor(tensor.shape, encoded(weights), gguf_files.CODES[type])
    matrices = {str(name): tensor.data for name, tensor in tensors.items() if len(tensor.shape) == 2}
    return gguf_files.File(file.keys, tensors), digest(matrices)


def digest(matrices: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(matrices[name] for name in sorted(matrices))).hexdigest()


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in TYPES:
        model(name, Path(os.environ["LLAMASPEC_DATA"])).write(folder / f"{name}.gguf")
    reader().write(folder / "reader.gguf")


def quantize(source: Path, path: Path, type: str, ftype: int) -> dict[str, Any]:
    """Quantize all matrices to one type with llama.cpp; return the bytes [rows, bytes] by name."""
    import gguf  # pyright: ignore[reportMissingImports]
    import llama_cpp  # pyright: ignore[reportMissingImports]

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.pure, options.nthread = ftype, True, 1
    options.output_tensor_type = options.token_embedding_type = int(gguf.GGMLQuantizationType[type])
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), options) == 0
    matrices = [tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) == 2]
    assert {tensor.tensor_type.name for tensor in matrices} == {type}
    return {tensor.name: np.ascontiguousarray(tensor.data).view(np.uint8) for tensor in matrices}


def read(folder: Path) -> None:
    from importlib import metadata

    versions = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("llama_cpp_python", "gguf")},
    }
    goldens: dict[str, Any] = {"made": versions, "models": {}, "text": read_text(folder)}
    for model, types in TYPES.items():
        goldens["models"][model] = golden = {}
        for type, ftype in types.items():
            path = folder / f"{model}-{type}.gguf"
            codes = quantize(folder / f"{model}.gguf", path, type, ftype)
            rows = make_gguf.Model(path).logits(IDS)
            golden[type] = {
                "sha256": digest({name: blocks.tobytes() for name, blocks in codes.items()}),
                "logits": text(np.ascontiguousarray(stored_logits(rows))),
            }
    lines = json.dumps(goldens, indent=1) + "\n"
    (Path(__file__).parent / "eval_gguf.json").write_text(lines)


def read_text(folder: Path) -> dict[str, Any]:
    """Compute the loss on `TEXT` and the divergence from the float32 model, in nats."""
    base = make_gguf.Model(folder / "reader.gguf")
    ids = base.tokens(TEXT)

    def predicted(model: make_gguf.Model) -> np.ndarray:
        """Return the log-probabilities of the next token at each position but the last, [seq - 1, vocab]."""
        logits = model.logits(ids)[:-1].astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    p, places = predicted(base), (np.arange(len(ids) - 1), ids[1:])
    golden: dict[str, Any] = {"text": TEXT, "ids": ids, "loss": -p[places].mean(), "types": {}}
    for type, ftype in MULTIPLIED.items():
        path = folder / f"reader-{type}.gguf"
        codes = quantize(folder / "reader.gguf", path, type, ftype)
        q = predicted(make_gguf.Model(path))
        golden["types"][type] = {
            "sha256": digest({name: blocks.tobytes() for name, blocks in codes.items()}),
            "loss": -q[places].mean(),
            "divergences": (np.exp(p) * (p - q)).sum(axis=-1).tolist(),
        }
    return golden


def stored_logits(logits: np.ndarray) -> np.ndarray:
    """Select the logits that we store, [seq, STORED_LOGITS]."""
    return logits[:, :: logits.shape[1] // STORED_LOGITS]


def text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
