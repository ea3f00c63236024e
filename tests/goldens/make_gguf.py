"""Write gguf.json: llama.cpp's results for GGUF files that we write, one file per type, and the ids of some texts.

Run it from the root of the repository. In the project's environment,

    python -m tests.goldens.make_gguf write FOLDER

makes the files. In an environment with llama.cpp (Python 3.11),

    pip install numpy llama-cpp-python
    python tests/goldens/make_gguf.py read FOLDER

reads them with llama.cpp. The tests make the files again, and check their hashes. Floats are in base64. With
LLAMASPEC_DATA set, stories260K is converted too, with its tokenizer, and continues "Once upon a time".
"""

import base64
import ctypes
import hashlib
import json
import math
import os
import platform
import sys
from itertools import count, takewhile
from pathlib import Path

import numpy as np

IDS = [1, 17, 42, 63, 5, 5, 30, 21, 8, 54]
TEXTS = (
    "", " ", "  ", "\n", "\t\n", "Hello world", " Hello world", "Hello, world!", "Hello  world", "   Hello",
    "\n\nHello\n", "it's I'LL we've", "1234567", "3.14159", "a1b2", "über café naïve", "日本語", "👋🏽👩‍👩‍👧",
    "x == y && z != 0;", "<s>", "<|eot_id|>", "\u200b\u00a0", "Ａｂｃ", "ſ's",
)  # fmt: skip
WRITTEN = ("float32", "float16", "bfloat16", "q8_0", "q4_0", "mxfp4")  # by our writer
TYPES = ("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "TQ1_0", "TQ2_0")
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "rope_parameters": {
        "rope_theta": 500_000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def write_model(path: Path, type: str) -> None:
    """Write a random model with its matrices in `type`. If our writer lacks `type`, only layers' matrices have it."""
    from llamaspec.model.checkpoints import open_checkpoint
    from llamaspec.model.checkpoints.gguf.write import write_gguf
    from llamaspec.model.tokenizers.gguf_writer import vocabulary_keys
    from llamaspec.reference.quantizers import ggml
    from tests.support import families, gguf_files

    folder = path.with_suffix(".hf")
    if type in WRITTEN:
        folder.mkdir()
        families.write_checkpoint(folder, CONFIG, seed=1)
        checkpoint = open_checkpoint(folder)
        write_gguf(checkpoint, path, to=type, vocabulary=vocabulary_keys(checkpoint, None))
        return
    file = gguf_files.file_of(CONFIG, families.random_tensors(CONFIG, seed=1))
    file.keys["tokenizer.ggml.model"] = (gguf_files.STRING, "none")
    for name, tensor in file.tensors.items():
        if str(name).startswith("blk.") and len(tensor.shape) == 2:
            weights = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
            file.tensors[name] = gguf_files.Tensor(
                tensor.shape, ggml.encode(weights, type).tobytes(), gguf_files.CODES[type]
            )
    file.write(path)


def write_tokenizer(path: Path, kind: str) -> None:
    """Write a one-layer model with a tokenizer inside: SentencePiece, or byte-level as in Llama 3 or SmolLM."""
    from dataclasses import replace

    from llamaspec.model.checkpoints.gguf.write import write_gguf
    from llamaspec.model.tokenizers.gguf_writer import vocabulary_keys
    from llamaspec.model.tokenizers.load import load_tokenizer
    from tests.support import tiny_tokenizers
    from tests.support.random_models import SMALL, random_checkpoint

    beside = path.with_suffix(".tokenizer")
    makers = {
        "sentencepiece": tiny_tokenizers.llama2c,
        "llama3": tiny_tokenizers.llama3,
        "chatml": tiny_tokenizers.chatml,
    }
    raw = makers[kind]()
    beside.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    tokenizer = load_tokenizer(beside)
    config = replace(SMALL, dim=32, layers=1, heads=1, kv_heads=1, head_dim=32, ffn=32, vocab=tokenizer.vocab)
    checkpoint = random_checkpoint(config, seed=0)
    zeros = {
        name: tensor._replace(read=lambda tensor=tensor: np.zeros(tensor.shape, np.float32))
        for name, tensor in checkpoint.tensors.items()
    }
    checkpoint = replace(checkpoint, tensors=zeros, stops=frozenset({2}))
    write_gguf(checkpoint, path, to="float32", vocabulary=vocabulary_keys(checkpoint, tokenizer))


def write_story(path: Path, data: Path) -> None:
    """Write stories260K with its tokenizer."""
    from llamaspec.model.checkpoints import open_checkpoint
    from llamaspec.model.convert import convert

    folder = data / "stories260K"
    checkpoint = open_checkpoint(folder / "stories260K.bin")
    convert(checkpoint, path, to="gguf", tokenizer=folder / "tok512.model")


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for type in (*WRITTEN, *TYPES):
        write_model(folder / f"{type}.gguf", type)
    for kind in ("sentencepiece", "llama3", "chatml"):
        write_tokenizer(folder / f"tokenizer-{kind}.gguf", kind)
    if data := os.environ.get("LLAMASPEC_DATA"):
        write_story(folder / "stories260K.gguf", Path(data))


# llama.cpp's names of a matrix's inputs and products, followed by the layer's number.
PRODUCTS = {
    "attn_q": ("attn_norm", "Qcur"), "attn_k": ("attn_norm", "Kcur"), "attn_v": ("attn_norm", "Vcur"),
    "attn_output": ("kqv_out", "attn_out"), "ffn_gate": ("ffn_norm", "ffn_gate"), "ffn_up": ("ffn_norm", "ffn_up"),
    "ffn_down": ("ffn_swiglu", "ffn_out"), "output": ("result_norm", "result_output"),
}  # fmt: skip
TIE = (
    "Q5_0",
    "blk.1.ffn_gate",
    4,
)  # type, product, and position of a number at a tie: see test_eval_emulation.py


class Model:
    """A GGUF file loaded in llama.cpp, with a float32 cache and one thread."""

    def __init__(self, path: Path):
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self.c = llama_cpp
        options = self.c.llama_model_default_params()
        options.n_gpu_layers = 0
        options.use_extra_bufts = False  # blocks keep their layout: rearranging them crashes on some processors
        self.model = self.c.llama_model_load_from_file(str(path).encode(), options)
        assert self.model, f"llama.cpp does not load {path}"
        self.vocabulary = self.c.llama_model_get_vocab(self.model)
        self.size = self.c.llama_vocab_n_tokens(self.vocabulary)

    def logits(self, ids: list[int], seen: dict[str, np.ndarray] | None = None) -> np.ndarray:
        """Compute logits [seq, vocab].

        Append every tensor of llama.cpp's graph to `seen` by name, as flat float32 arrays.
        """
        options = self.c.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = 0
        options.flash_attn_type = 0
        watch = self._watch(seen) if seen is not None else None  # llama.cpp holds only a pointer
        if watch:
            options.cb_eval = watch
        context = self.c.llama_init_from_model(self.model, options)
        batch = self.c.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, id in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = id, i, 1, 1
            batch.seq_id[i][0] = 0
        if seen is not None:
            seen.clear()  # tensors of the warm-up run
        assert self.c.llama_decode(context, batch) == 0
        rows = np.ctypeslib.as_array(self.c.llama_get_logits(context), shape=(len(ids) * self.size,))
        rows = rows.reshape(len(ids), self.size).copy()
        self.c.llama_batch_free(batch)
        self.c.llama_free(context)
        return rows

    def greedy(self, text: str, count: int) -> tuple[list[int], float]:
        """Continue a text greedily.

        Return all tokens, and the smallest difference between the largest two logits of a step.
        """
        ids, margin = self.tokens(text), math.inf
        for _ in range(count):
            logits = self.logits(ids)[-1]
            second, first = np.sort(logits)[-2:]
            ids, margin = [*ids, int(logits.argmax())], min(margin, float(first - second))
        return ids, margin

    def text(self, ids: list[int]) -> str:
        """Decode tokens to text. Control tokens, including BOS, give no text."""
        buffer, tokens = ctypes.create_string_buffer(10_000), (ctypes.c_int32 * len(ids))(*ids)
        count = self.c.llama_detokenize(self.vocabulary, tokens, len(ids), buffer, len(buffer), True, False)
        assert count >= 0
        return buffer.raw[:count].decode()

    def products(self, ids: list[int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return each matrix's inputs and products in llama.cpp, [seq, features] each."""
        self.logits(ids, seen := {})
        pairs = {}
        for name, pair in PRODUCTS.items():
            if name == "output":
                pairs[name] = tuple(seen[vectors] for vectors in pair)
            for layer in takewhile(lambda layer, y=pair[1]: f"{y}-{layer}" in seen, count()):
                pairs[f"blk.{layer}.{name}"] = tuple(seen[f"{vectors}-{layer}"] for vectors in pair)
        return {name: (x.reshape(len(ids), -1), y.reshape(len(ids), -1)) for name, (x, y) in pairs.items()}

    def _watch(self, seen: dict[str, np.ndarray]) -> object:
        from importlib import resources

        ggml = ctypes.CDLL(str(resources.files(self.c) / "lib" / "libggml-base.so"))
        ggml.ggml_get_name.restype = ctypes.c_char_p
        ggml.ggml_nbytes.restype = ctypes.c_size_t

        def watch(tensor: int, ask: bool, data: object) -> bool:
            name = ggml.ggml_get_name(ctypes.c_void_p(tensor)).decode()
            if not ask and name not in seen:  # views have the same name, and come later
                seen[name] = np.empty(ggml.ggml_nbytes(ctypes.c_void_p(tensor)) // 4, np.float32)
                place, size = seen[name].ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(seen[name].nbytes)
                ggml.ggml_backend_tensor_get(ctypes.c_void_p(tensor), place, ctypes.c_size_t(0), size)
            return True

        return self.c.ggml_backend_sched_eval_callback(watch)

    def tokens(self, text: str) -> list[int]:
        """Encode a text with BOS if the model adds one; names of control tokens are plain text."""
        raw, buffer = text.encode(), (ctypes.c_int32 * 1000)()
        count = self.c.llama_tokenize(self.vocabulary, raw, len(raw), buffer, 1000, True, False)
        assert count >= 0
        return list(buffer[:count])


def read(folder: Path) -> None:
    from importlib import metadata

    def sha(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    versions = {"python": platform.python_version(), "llama_cpp_python": metadata.version("llama_cpp_python")}
    goldens: dict[str, object] = {"made": versions, "ids": IDS}
    logits = {}
    for type in (*WRITTEN, *TYPES):
        rows = Model(folder / f"{type}.gguf").logits(IDS)
        logits[type] = {"sha256": sha(folder / f"{type}.gguf"), "logits": base64.b64encode(rows.tobytes()).decode()}
    goldens["logits"] = logits
    type, matrix, position = TIE
    x, y = (rows[position] for rows in Model(folder / f"{type}.gguf").products(IDS)[matrix])
    goldens["tie"] = {"x": base64.b64encode(x.tobytes()).decode(), "y": base64.b64encode(y.tobytes()).decode()}
    tokens = {}
    for path in sorted(folder.glob("tokenizer-*.gguf")):
        model = Model(path)
        ids = {text: model.tokens(text) for text in TEXTS}
        tokens[path.stem.removeprefix("tokenizer-")] = {"sha256": sha(path), "ids": ids}
    goldens["tokens"] = tokens
    if (path := folder / "stories260K.gguf").exists():
        model = Model(path)
        ids, _ = model.greedy("Once upon a time", 100 - len(model.tokens("Once upon a time")))
        goldens["story"] = {"sha256": sha(path), "ids": ids, "texts": {text: model.tokens(text) for text in TEXTS}}
    text = json.dumps(goldens, indent=1, ensure_ascii=True) + "\n"
    (Path(__file__).parent / "gguf.json").write_text(text)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
