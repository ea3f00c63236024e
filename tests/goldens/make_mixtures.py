"""Write mixtures.json: the type that llama.cpp gives each matrix in its mixtures, for every architecture that we write.

Run it from the root of the repository. In the project's environment,

    python -m tests.goldens.make_mixtures write FOLDER

writes a GGUF file for each case: all tensors of a model, but with matrices of two rows. In an environment with
llama.cpp (Python 3.11),

    pip install numpy gguf llama-cpp-python
    python -m tests.goldens.make_mixtures read FOLDER

quantizes the files. "with importances" is IQ4_NL with an importance matrix. For each part of a block, the golden lists
the types of the layers in order, with the number of consecutive layers of a type; it leaves out parts that have the
mixture's main type in all layers. Models with 80 layers have only Q2_K, because it shows the rule for them.
"""

import ctypes
import json
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

WEIGHTED = "with importances"
# llama_ftype and the main type
FTYPES = {
    "q2_k": (10, "Q2_K"), "q3_k_m": (12, "Q3_K"), "q4_k_m": (15, "Q4_K"), "q5_k_m": (17, "Q5_K"), "q6_k": (18, "Q6_K"),
    "iq4_nl": (25, "IQ4_NL"), WEIGHTED: (25, "IQ4_NL"),
}  # fmt: skip


def cases() -> dict[str, Any]:
    """Return configurations by name: every architecture with 10 and 80 layers, and variants of Llama and Mixtral."""
    from llamaspec.model.checkpoints.checkpoint import CheckpointError
    from llamaspec.model.family import architectures, nearest_family
    from tests.goldens.make_families import FOLDER
    from tests.support.families import FAMILIES

    files = [json.loads(path.read_text())["config"] for path in sorted(FOLDER.glob("*.json"))]
    configs: dict[str, Any] = {}
    for values in (*FAMILIES.values(), *files):
        with suppress(CheckpointError, KeyError):  # some configurations permit no other sizes
            config = resized(values, 10)
            architecture = nearest_family(config).gguf
            if architecture.name not in configs and not architecture.lacks(config):
                configs |= {architecture.name: config, f"{architecture.name} 80": resized(values, 80)}
    missing = set(architectures()) - set(configs)
    assert not missing, missing

    def llama(layers: int, heads: int, kv_heads: int, **more: Any) -> Any:
        grouped = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        return resized(FAMILIES["llama-2"] | grouped | more, layers)

    def mixtral(heads: int, experts: int) -> Any:
        grouped = {"num_attention_heads": heads, "num_key_value_heads": 2, "num_local_experts": experts}
        return resized(FAMILIES["mixtral"] | grouped, 18)

    return configs | {
        "llama gqa": llama(26, 8, 2),
        "llama tied": llama(10, 8, 8, tie_word_embeddings=True),
        "llama 80 gqa": llama(80, 8, 1),
        "llama 80 mha": llama(80, 8, 8),
        "qwen2 80 mha": resized(
            FAMILIES["qwen2"] | {"num_key_value_heads": FAMILIES["qwen2"]["num_attention_heads"]}, 80
        ),
        "llama in blocks of 32": resized(FAMILIES["llama-2"], 10, dim=160, ffn=352),
        "mixtral gqa": mixtral(8, 8),
        "mixtral": mixtral(4, 8),
        "mixtral with four experts": mixtral(8, 4),
    }


def resized(values: dict[str, Any], layers: int, *, dim: int = 2304, ffn: int = 512) -> Any:
    """Make the config of the config.json `values`, but with `layers` layers and the widths `dim` and `ffn`.

    A list with an entry for each layer is repeated until it has an entry for each of the new layers.
    """
    from llamaspec.model.checkpoints.huggingface.config import read_config

    own = values["num_hidden_layers"]
    lists = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == own}
    repeated = {key: [value[i % own] for i in range(layers)] for key, value in lists.items()}
    sizes: dict[str, Any] = {"hidden_size": dim, "intermediate_size": ffn, "num_hidden_layers": layers}
    head_dim = dim // values["num_attention_heads"]
    sizes |= {"head_dim": head_dim, "query_pre_attn_scalar": head_dim}
    sizes |= {key: 512 for key in ("moe_intermediate_size", "shared_expert_intermediate_size") if key in values}
    rope = values.get("rope_scaling") or {}
    if "short_factor" in rope:
        pairs = int(head_dim * values.get("partial_rotary_factor", 1)) // 2
        sizes["rope_scaling"] = rope | {"short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs}
    return read_config(values | repeated | sizes, "config.json")


def tensors(config: Any, mixture: str = "q6_k", *, weighted: bool = False) -> list[Any]:
    """Return the `GGUFTensor`s of a model in a mixture of ours."""
    from llamaspec.model.checkpoints.gguf import write

    checkpoint = empty_checkpoint(config)
    return list(write._stored(checkpoint, write.architecture_for(checkpoint), mixture, weighted=weighted))


def empty_checkpoint(config: Any) -> Any:
    """Return a checkpoint of float32 tensors that cannot be read."""
    import numpy as np

    from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor
    from llamaspec.model.tensors import tensor_shapes

    def no_weights() -> np.ndarray:
        raise AssertionError("this model has no weights")

    shapes = tensor_shapes(config)
    named = {name: Tensor(shape, np.dtype(np.float32), no_weights) for name, shape in shapes.items()}
    return Checkpoint("empty", "safetensors", config, named, None, frozenset())


def write_case(path: Path, config: Any) -> None:
    """Write all tensors of a model as zeros. Matrices have two rows."""
    import numpy as np

    from llamaspec.model.checkpoints.gguf import write

    checkpoint, stored = empty_checkpoint(config), []
    for tensor in tensors(config):
        rows = tensor.shape if len(tensor.shape) == 1 else (*tensor.shape[:-2], 2, tensor.shape[-1])
        stored.append(tensor._replace(shape=rows, type="F32"))
    keys = write._keys(checkpoint, write.architecture_for(checkpoint), 0) | {"tokenizer.ggml.model": "none"}
    with open(path, "wb") as file:
        write._write_header(file, keys, stored, {})
        for tensor in stored:
            write._write_padded(file, np.zeros(tensor.shape, "<f4").tobytes())


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, config in cases().items():
        write_case(folder / f"{name}.gguf", config)


def quantize(source: Path, path: Path, ftype: int, importances: Mapping[str, Any]) -> None:
    """Quantize a GGUF file with llama.cpp to a mixture. `importances` has float32 arrays by tensor name."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = ftype, 1
    if importances:
        options.imatrix = (llama_cpp.llama_model_imatrix_data * (len(importances) + 1))()
        for entry, (name, values) in zip(options.imatrix, importances.items(), strict=False):
            entry.name, entry.size = name.encode(), values.size
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), options) == 0


def by_part(types: dict[str, str], main: str) -> dict[str, str]:
    """Summarize types by name: for each part, the numbers of consecutive layers and their type.

    Parts with the type `main` in all layers are left out.

    >>> by_part({"blk.1.up.weight": "F16", "blk.0.up.weight": "F16", "head.weight": "F32"}, "F32")
    {'up': '2 F16'}
    """
    layers: dict[str, dict[int, str]] = {}
    for name, type in types.items():
        *block, part, _ = name.split(".")
        layers.setdefault(part, {})[int(block[1]) if block else 0] = type
    summary = {}
    for part in sorted(layers):
        runs = [(type, len(list(run))) for type, run in groupby(layers[part][i] for i in sorted(layers[part]))]
        if {type for type, _ in runs} != {main}:
            summary[part] = ", ".join(f"{count} {type}" for type, count in runs)
    return summary


def mixtures_of(case: str) -> list[str]:
    """Return the mixtures that the golden has for a case."""
    return ["q2_k"] if " 80" in case else list(FTYPES)


def read(folder: Path) -> None:
    from importlib import metadata

    import gguf  # pyright: ignore[reportMissingImports]
    import numpy as np

    versions = {name: metadata.version(name) for name in ("llama_cpp_python", "gguf")}
    goldens: dict[str, Any] = {"made": {"python": platform.python_version(), **versions}, "types": {}}
    for path in sorted(folder.glob("*.gguf")):
        goldens["types"][path.stem] = {}
        for name in mixtures_of(path.stem):
            ftype, main = FTYPES[name]
            importances = {"no matrix of the model": np.ones(1, np.float32)} if name == WEIGHTED else {}
            quantize(path, folder / "quantized", ftype, importances)
            types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(folder / "quantized").tensors}
            matrices = {name: type for name, type in types.items() if type != "F32"}
            goldens["types"][path.stem][name] = by_part(matrices, main)
    (Path(__file__).parent / "mixtures.json").write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
