"""A model, its tokenizer and a backend, as one object: what the command line does, without the parsing."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Float

from model.checkpoints.checkpoint import Checkpoint, Tensor
from model.checkpoints.codes import quantized
from model.checkpoints.open import open_checkpoint
from model.generation import Generation
from model.ops.emulated import emulated_ops, roundings, with_roundings
from model.options import SamplingOptions, check_ids, check_length, check_max_new_tokens, check_seed, choose_context
from model.running.jax_backend import JaxBackend, choose_ops, compile_programs, prompt_chunk
from model.running.memory import available_bytes, check_fits, device_bytes, memory_of
from model.running.reference_backend import ReferenceBackend, load_reference_params, reference_memory
from model.running.session import Backend, Session
from model.tokenizers.of_model import tokenizer_of
from model.tokenizers.tokenizer import Tokenizer, encode_text
from model.weights.params import Progress, abstract_params, check_weights, load_params, no_progress
from reference.config import Config

BackendName = Literal["jax", "reference"]


class Llama:
    """A model ready to use; `load` makes one. Every generation has a cache of its own."""

    def __init__(self, config: Config, tokenizer: Tokenizer, backend: Backend, *, stops: frozenset[int]):
        self.config = config
        self.tokenizer = tokenizer
        self.stops = stops
        self._backend = backend

    @property
    def context(self) -> int:
        """How many tokens a sequence can have."""
        return self._backend.capacity

    def bytes_read(self, position: float) -> float | None:
        """What decoding a token reads at least, with so many before it; None of the reference, which nobody times."""
        return self._backend.bytes_read(position) if isinstance(self._backend, JaxBackend) else None

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """The ids of a text, BOS first where the model's convention has it."""
        return encode_text(self.tokenizer, text, bos=bos)

    def generate(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int = 256,
        sampling: SamplingOptions | None = None,
        seed: int | None = None,
        stop: str | Iterable[str] = (),
    ) -> Generation:
        """Continue `prompt`. Iterate over the result for tokens as they are drawn.

        `stop` are texts that end the completion and are not part of it. The same seed gives the same
        text on either backend; None draws one, which the result holds. Raises ValueError for a request
        out of range or a prompt longer than the context, before anything is computed.

            for token in llama.generate("Once upon a time", seed=7):
                print(token.text, end="", flush=True)
        """
        ids = self.encode(prompt)
        return self.continue_ids(
            Session(self._backend, vocab=self.config.vocab),
            ids,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            stop=stop,
        )

    def session(self) -> Session:
        """An empty sequence, for use with `continue_ids`."""
        return Session(self._backend, vocab=self.config.vocab)

    def continue_ids(
        self,
        session: Session,
        ids: Sequence[int],
        *,
        prompt: str = "",
        max_new_tokens: int = 256,
        sampling: SamplingOptions | None = None,
        seed: int | None = None,
        stop: str | Iterable[str] = (),
        stops: frozenset[int] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """`generate` from ids, in a session whose cache serves as far as it holds the same ids.

        `prompt` is the text that the ids end with, "" if the completion begins a text. `stops` are the
        ids that end it, the model's own by default.
        `interrupted` is asked between bursts; once it says yes, the generation ends.
        """
        check_ids(ids, self.config.vocab)
        check_length(ids, self.context)
        seed = check_seed(seed)
        stops = self.stops if stops is None else stops
        bursts = session.bursts(
            ids,
            max_new_tokens=check_max_new_tokens(max_new_tokens),
            options=sampling or SamplingOptions(),
            seed=seed,
            stops=stops,
            interrupted=interrupted,
        )
        return Generation(
            bursts,
            self.tokenizer,
            prompt=prompt,
            prompt_ids=ids,
            stop_texts=[text for text in ([stop] if isinstance(stop, str) else stop) if text],
            stops=stops,
            seed=seed,
        )

    def logits(self, ids: Sequence[int]) -> Float[np.ndarray, "seq vocab"]:
        """Logits for what follows each of `ids`: float32, or float64 from the reference."""
        check_ids(ids, self.config.vocab)
        check_length(ids, self.context)
        return self._backend.logits(ids)


def load(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    context: int | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    backend: BackendName = "jax",
    kernels: str = "auto",
    quantize: str | None = None,
    cache: Literal["int8"] | None = None,
    greedy: bool = False,
    progress: Progress = no_progress,
) -> Llama:
    """Load a checkpoint (a llama2.c file or a Hugging Face directory) and its tokenizer.

    `tokenizer` is a file or directory; None looks beside the model. `context` is the length of a
    sequence in tokens; None is the model's own, 4096 at most. `dtype` is that of the weights that
    run; None is float32 on a CPU, and on a GPU bfloat16 if they are stored so. `quantize` is one of
    `reference.quantizers.schemes`, for the matrices (`model.checkpoints.codes.quantized` says which);
    None leaves those that are stored quantized as they are. `cache` is what keys and values are kept in
    (`reference.quantizers.kv_cache`); None is the dtype of the weights that run. `greedy` says that the first
    text will be of temperature 0: what decodes at 0 and above are two programs, and the other of them is
    compiled when it is first needed. `progress` is told what goes on and what share of it is done. Raises
    CheckpointError for files that cannot be used, ValueError for arguments out of range, MemoryError for a
    model that does not fit: each a single line.
    """
    checkpoint = open_checkpoint(path)
    vocabulary = tokenizer_of(checkpoint, tokenizer)
    options = {"context": context, "dtype": dtype, "backend": backend, "kernels": kernels, "quantize": quantize}
    running = load_backend(checkpoint, **options, cache=cache, greedy=greedy, progress=progress)
    return Llama(checkpoint.config, vocabulary, running, stops=checkpoint.stops)


def load_backend(
    checkpoint: Checkpoint,
    *,
    context: int | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    backend: BackendName = "jax",
    kernels: str = "auto",
    quantize: str | None = None,
    cache: Literal["int8"] | None = None,
    greedy: bool = False,
    emulate_activations: str | None = None,
    progress: Progress = no_progress,
) -> JaxBackend | ReferenceBackend:
    """The model without a tokenizer. The arguments are those of `load`, which is checked before anything is read.

    `emulate_activations` is what `model.ops.emulated.roundings` takes: q8_0 or ggml.
    """
    config = checkpoint.config
    capacity = choose_context(context, config.context)
    if backend not in get_args(BackendName):
        raise ValueError(f"no backend named {backend}: choose jax or reference")
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, got {dtype}")
    if cache not in (None, "int8"):
        raise ValueError(f"a cache is int8, or by default what the weights are, not {cache}")
    run = quantized(checkpoint, quantize) if quantize else checkpoint
    found = roundings(run, emulate_activations) if emulate_activations else {}
    if backend == "reference":
        check_fits(reference_memory(config, context=capacity), context=capacity, available=available_bytes())
        check_weights(checkpoint, progress=progress)
        weights = load_reference_params(run, found)
        return ReferenceBackend(weights, config, capacity=capacity, int8_cache=cache == "int8")
    ops = emulated_ops(choose_ops(kernels)) if found else choose_ops(kernels)
    platform = jax.default_backend()
    weights = choose_dtype(dtype, checkpoint.tensors.values(), platform=platform)
    chunk = min(prompt_chunk(config), capacity)
    rows = capacity + chunk  # the last chunk of a prompt is padded
    params = abstract_params(config, dtype=weights, positions=rows, tensors=run.tensors)
    params = with_roundings(params, found, config=config)
    cache_dtype = np.dtype(np.int8) if cache == "int8" else weights
    sizes = {"batch": 1, "context": capacity, "chunk": chunk}
    memory = memory_of(params, config, **sizes, cache_dtype=cache_dtype, platform=platform)
    check_fits(memory, context=capacity, available=device_bytes())
    check_weights(checkpoint, progress=progress)
    progress("compiling", 0.0)
    programs = compile_programs(
        params, config, ops=ops, capacity=capacity, chunk=chunk, cache_dtype=cache_dtype, greedy=greedy
    )
    params = with_roundings(load_params(run, dtype=weights, positions=rows, progress=progress), found, config=config)
    return JaxBackend(params, programs, config, ops=ops, capacity=capacity, chunk=chunk, cache_dtype=cache_dtype)


def choose_dtype(dtype: str | None, tensors: Iterable[Tensor], *, platform: str) -> np.dtype:
    """The dtype of the weights that run: the one that was asked for, for None float32 on a CPU.

    On a GPU None is bfloat16, if all of `tensors` that are not quantized are stored so.
    """
    if dtype:
        return np.dtype(dtype)
    narrow = np.dtype(ml_dtypes.bfloat16)
    stored_so = all(tensor.dtype == narrow for tensor in tensors if tensor.codes is None)
    return narrow if platform != "cpu" and stored_so else np.dtype(np.float32)
