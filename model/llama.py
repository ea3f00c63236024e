"""A model, its tokenizer and a backend as one object, for the commands and for users of the library."""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float

from llamaspec.model.chat.channels import Channels
from llamaspec.model.checkpoints.adapter import with_adapter
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.mapped import refused_if_cut_short
from llamaspec.model.checkpoints.open import open_checkpoint, place_of
from llamaspec.model.device import default_device
from llamaspec.model.generation import Generation
from llamaspec.model.ops.emulated import roundings
from llamaspec.model.options import (
    BackendName,
    CacheName,
    DtypeName,
    ParallelName,
    RunOptions,
    SamplingOptions,
    check_ids,
    check_length,
    check_max_new_tokens,
    check_seed,
    choose_context,
)
from llamaspec.model.running.backend import Backend
from llamaspec.model.running.jax_backend import JaxBackend
from llamaspec.model.running.load import load_on_one_device
from llamaspec.model.running.memory import check_fits
from llamaspec.model.running.process import keep_compiled
from llamaspec.model.running.programs import Layout, longest_burst, prompt_chunk, wide_chunks
from llamaspec.model.running.reference_backend import ReferenceBackend, load_reference_params, reference_memory
from llamaspec.model.running.session import Session
from llamaspec.model.running.speculation import DRAFTS, DRAFTS_OF_CODES, speculation_for
from llamaspec.model.running.start_clock import StartClock
from llamaspec.model.system import available_bytes
from llamaspec.model.tensors import quantizable
from llamaspec.model.tokenizers.of_model import fitted, tokenizer_of
from llamaspec.model.tokenizers.tokenizer import Tokenizer, decode, encode_text, named_tokens
from llamaspec.model.weights.loading import Progress, check_weights, no_progress
from llamaspec.reference.config import Config, for_sequences

log = logging.getLogger("llamaspec")


class Llama:
    """A model that is ready to use. `load` makes one. Every call of `generate` has its own cache."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        backend: Backend,
        *,
        stops: frozenset[int],
        places: Sequence[str | Path] = (),
    ):
        """Combine a backend with the tokenizer of its model.

        `stops` are the ids that end a text. `places` are the files or directories that may have a chat template.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.stops = stops
        self.places = tuple(places)  # files or directories that may have a chat template, in the order in which we look
        self._backend = backend

    @property
    def context(self) -> int:
        """The largest number of tokens in a sequence."""
        return self._backend.capacity

    def describe_run(self) -> str:
        """Describe in one line how the model runs: its dtype, its device, and which ops run without a kernel and why.

        >>> load("stories", backend="reference").describe_run()
        'float64 on CPU, by the NumPy reference'
        """
        return self._backend.describe()

    def bytes_read(self, position: float) -> float | None:
        """Count the bytes of memory that decoding reads for one token after `position` tokens.

        Returns None for the reference.
        """
        return self._backend.bytes_read(position)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Encode a text as token ids, with BOS first if the model uses BOS and `bos` is true.

        Raises TypeError for anything but a str.

        >>> load("stories", backend="reference").encode("Once upon a time")
        [1, 373, 433, 378, 290, 263, 768]
        """
        if not isinstance(text, str):
            raise TypeError(
                f"expected a str, got {type(text).__name__}; pass token ids to `logits`, `decode` or `continue_ids`"
            )
        return encode_text(self.tokenizer, text, bos=bos)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode the ids of a complete text. Bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for ids out of range.

        >>> llama = load("stories", backend="reference")
        >>> llama.decode(llama.encode("Once upon a time"))
        'Once upon a time'
        """
        ids = ids if isinstance(ids, Sequence) else list(ids)
        check_ids(ids, self.config.vocab)
        return decode(self.tokenizer, ids)

    def generate(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int = 256,
        sampling: SamplingOptions | None = None,
        seed: int | None = None,
        stop: str | Iterable[str] = (),
    ) -> Generation:
        """Continue `prompt`. Iterate over the result to get tokens as they are drawn.

        `stop` is a string or the name of a control token, or several of them. Each ends the completion, and is not part
        of it. The same seed gives the same text on either backend. If `seed` is None, we draw a seed and store it in
        `Generation.seed`. Raises ValueError for a request out of range or a prompt longer than the context, before
        anything is computed.

            for token in llama.generate("Once upon a time", seed=7):
                print(token.text, end="", flush=True)
        """
        ids = self.encode(prompt)
        return self.continue_ids(
            self.session(),
            ids,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            stop=stop,
        )

    def session(self) -> Session:
        """Make an empty sequence, to pass to `continue_ids`."""
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
        channels: Channels | None = None,
    ) -> Generation:
        """Continue `ids` in a session, and reuse the session's cache for the first ids that it already contains.

        - `prompt` is the text at the end of `ids`, after the last control token. "" means that the completion begins a
          text: then we remove the space that some tokenizers put before the first word.
        - `stops` are the ids that end the completion; None: the model's own.
        - `interrupted` is called again and again, each time after a few tokens were drawn. Once it returns True, the
          generation ends.
        - `channels` separates the answer from reasoning.

        The other arguments are as in `generate`.
        """
        check_ids(ids, self.config.vocab)
        check_length(ids, self.context)
        seed = check_seed(seed)
        stop_texts = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
        stops = (self.stops if stops is None else stops) | named_tokens(self.tokenizer, stop_texts)
        sampling = sampling or SamplingOptions()
        speculation = speculation_for(self._backend, ids, greedy=sampling.greedy)
        bursts = session.bursts(
            ids,
            max_new_tokens=check_max_new_tokens(max_new_tokens),
            options=sampling,
            seed=seed,
            stops=stops,
            interrupted=interrupted,
            speculation=speculation,
        )
        return Generation(
            bursts,
            self.tokenizer,
            prompt=prompt,
            prompt_ids=ids,
            stop_texts=stop_texts,
            stops=stops,
            seed=seed,
            channels=channels,
            speculation=speculation,
        )

    def logits(self, ids: Sequence[int]) -> Float[np.ndarray, "seq vocab"]:
        """Compute the logits after each of `ids`, in float32 (in float64 if the backend is the reference).

        Raises TypeError for a str, ValueError for ids out of range, FloatingPointError for logits that are not finite.

            likeliest = llama.logits(llama.encode("Once upon a time"))[-1].argmax()
        """
        check_ids(ids, self.config.vocab)
        check_length(ids, self.context)
        return self._backend.logits(ids)


def load(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    adapter: str | Path | None = None,
    context: int | None = None,
    dtype: DtypeName | None = None,
    backend: BackendName = "jax",
    kernels: str = "auto",
    quantize: str | None = None,
    cache: CacheName | None = None,
    greedy: bool = False,
    compile_cache: str | Path | None = None,
    devices: int = 1,
    parallel: ParallelName = "tensor",
    speculate: bool = False,
    progress: Progress | bool = False,
) -> Llama:
    """Load a checkpoint (a GGUF file, a file of llama2.c or a Hugging Face directory) and its tokenizer.

    - `tokenizer` is a file or directory. If it is None, we look inside and next to the model.
    - `adapter` is the folder of a LoRA adapter in PEFT's format. Matrices of floats are merged with it. Quantized
      matrices keep their codes, and products add the adapter's part.
    - `context` is the length of a sequence in tokens; None means the model's own, but at most 4096.
    - `dtype` is the dtype of activations and of weights that are not quantized. None means float32 on a CPU; on a GPU
      it means bfloat16, unless the matrices are stored in float32 (`choose_dtype`).
    - `quantize` is one of `reference.quantizers.schemes`, for the matrices (`model.checkpoints.codes.quantized`). None
      keeps matrices in the form in which they are stored.
    - `cache` is the dtype of keys and values (`reference.quantizers.kv_cache`); None means `dtype`.
    - `greedy` says that the first completion will use temperature 0. Temperature 0 and higher temperatures need two
      different programs; the other one is compiled when it is first needed.
    - `compile_cache` is a folder where JAX keeps compiled programs, for this whole process, so that the next start is
      fast. None does not change JAX's own setting (`jax_compilation_cache_dir`). The command line uses
      `~/.cache/llamaspec/compiled`.
    - `devices` is the number of devices that share the model (docs/parallel.md). If `parallel` is "tensor", each device
      has some heads and columns; if it is "context", some positions of the cache. We use the first of JAX's devices.
      These may belong to several processes (`jax.distributed`); every process must then make the same calls with the
      same seeds.
    - `speculate` drafts tokens from the text itself and verifies several at once (`model.running.speculation`). This
      changes only the time that a text takes. It needs the jax backend on one device, a CPU.
    - `progress` is called with a stage and the share of it that is done; True prints the stages on stderr.

    Raises CheckpointError for files that cannot be used, ValueError for arguments out of range, MemoryError for a model
    that does not fit. Each message is a single line.

        from llamaspec import Chat, load

        chat = Chat(load("stories", progress=True))
        for token in chat.reply("Tell me a story about a fox.", seed=7):
            print(token.text, end="", flush=True)
    """
    options = RunOptions(
        context=context,
        dtype=dtype,
        backend=backend,
        kernels=kernels,
        quantize=quantize,
        cache=cache,
        greedy=greedy,
        compile_cache=compile_cache,
        devices=devices,
        parallel=parallel,
        speculate=speculate,
    )
    with refused_if_cut_short():
        checkpoint = open_checkpoint(path) if adapter is None else with_adapter(open_checkpoint(path), adapter)
        vocabulary = tokenizer_of(checkpoint, tokenizer)
        checkpoint = fitted(checkpoint, vocabulary)
        for note in checkpoint.notes:
            log.warning("%s", note)
        if compile_cache is not None:
            keep_compiled(Path(compile_cache))
        report = print_progress() if progress is True else progress or no_progress
        running = load_backend(checkpoint, options, progress=report)
    places = [place for place in (tokenizer, place_of(path)) if place]
    return Llama(checkpoint.config, vocabulary, running, stops=checkpoint.stops, places=places)


def print_progress() -> Progress:
    """Make a `Progress` that prints the name of each stage on stderr when the stage begins."""
    latest = ""

    def report(stage: str, share: float) -> None:
        nonlocal latest
        if stage != latest:
            latest = stage
            print(stage, file=sys.stderr)

    return report


def load_backend(
    checkpoint: Checkpoint,
    options: RunOptions = RunOptions(),  # noqa: B008
    *,
    progress: Progress = no_progress,
    clock: StartClock | None = None,
) -> JaxBackend | ReferenceBackend:
    """Load a model without a tokenizer. Checks the options before it reads any weight.

    `clock` records the time of each phase. Raises the same errors as `load`.
    """
    clock = clock or StartClock()
    capacity = choose_context(options.context, checkpoint.config.context)
    config = for_sequences(checkpoint.config, capacity)
    checkpoint = replace(checkpoint, config=config)
    run = quantized(checkpoint, options.quantize) if options.quantize else checkpoint
    emulated = roundings(run, options.emulate_activations) if options.emulate_activations else {}
    if options.backend == "reference":
        clock.begin("read")
        check_fits(reference_memory(config, context=capacity), context=capacity, available=available_bytes())
        check_weights(checkpoint, progress=progress)
        params = load_reference_params(run, emulated)
        clock.end()
        return ReferenceBackend(params, config, capacity=capacity, int8_cache=options.cache == "int8")
    clock.begin("device")
    device = default_device()
    clock.begin("read")
    dtype = choose_dtype(options.dtype, run, platform=device.platform)
    codes = any(tensor.stored.codes for tensor in run.tensors.values())
    layout = Layout(
        batch=1,
        capacity=capacity,
        chunk=min(prompt_chunk(config, device.platform), capacity),
        burst=longest_burst(device.platform),
        cache_dtype=np.dtype(np.int8) if options.cache == "int8" else dtype,
        wide=wide_chunks(device.platform, capacity, codes=codes),
    )
    if options.speculate:
        drafts = DRAFTS_OF_CODES if codes else DRAFTS
        layout = layout._replace(drafts=min(drafts, layout.chunk))  # the cache has room for `chunk` rows of padding
    placement: dict[str, Any] = {"layout": layout, "dtype": dtype, "device": device}
    if options.devices != 1:
        from llamaspec.model.parallel.load import load_parallel  # imported here, because most runs do not need it

        return load_parallel(checkpoint, options, **placement, progress=progress, clock=clock)
    return load_on_one_device(checkpoint, run, options, **placement, roundings=emulated, progress=progress, clock=clock)


def choose_dtype(dtype: str | None, run: Checkpoint | None, *, platform: str) -> np.dtype:
    """Choose the dtype of activations, and of the weights that are not quantized.

    Returns `dtype` if it is given. Otherwise the dtype is float32 on a CPU. On other devices it is bfloat16, unless
    every matrix of `run` is stored in float32. Norms do not count, because many files store them in float32. `run` is
    the checkpoint to run, or None for a model with random weights.
    """
    if dtype:
        return np.dtype(dtype)
    stored = [run.tensors[name].stored for name in quantizable(run.config)] if run else []
    wide = bool(stored) and all(tensor.codes is None and tensor.dtype.itemsize >= 4 for tensor in stored)
    return np.dtype(np.float32) if platform == "cpu" or wide else np.dtype(ml_dtypes.bfloat16)
