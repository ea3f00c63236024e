"""Options for running a model and for generating text, checked before anything is loaded."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

MAX_SEED = 2**64 - 1
LONGEST_DEFAULT_CONTEXT = 4096  # tokens; we allocate a longer cache only if the user asks for it


class Range(NamedTuple):
    """The values that an option may have."""

    low: float | int
    high: float | int
    words: str  # the range, as an error message describes it
    above: bool = False  # whether `low` itself is excluded

    def holds(self, value: float | int) -> bool:
        """Return whether `value` is in the range. NaN and infinity never are."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high and value < math.inf


def _sampled(default: float | int, range: Range, help: str) -> Any:
    return field(default=default, metadata={"range": range, "help": help})


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options for choosing a token. `reference.sampling` defines each filter. Raises ValueError for a value out of
    range.

    Commands and servers make their own options from these fields. A new option also needs a field in
    `model.sampling.Sampling`, and code in `model.sampling` that applies it.
    """

    temperature: float = _sampled(  # 0: greedy
        0.8,
        Range(0, math.inf, "0 or more"),
        "Flatten the distribution (above 1) or sharpen it (below 1); 0 takes the likeliest token.",
    )
    top_k: int = _sampled(
        0, Range(0, 2**31 - 1, "a whole number, 0 or more"), "Draw from the K likeliest tokens; 0 draws from all."
    )
    top_p: float = _sampled(  # 1: off
        0.95,
        Range(0, 1, "above 0 and at most 1", above=True),
        "Draw from the likeliest tokens that together have probability P.",
    )
    min_p: float = _sampled(  # 0: off
        0.0, Range(0, 1, "between 0 and 1"), "Drop tokens below this share of the top token's probability."
    )
    repetition_penalty: float = _sampled(  # 1: off; outside of the range, ordinary logits would overflow float32
        1.0,
        Range(0.01, 100, "between 0.01 and 100"),
        "Above 1, make tokens that occurred before less likely.",
    )

    def __post_init__(self):
        for option in SAMPLING.values():
            value = getattr(self, option.name)
            holds = option.range.holds(value) and (option.kind is float or isinstance(value, int))
            _check(option.name.replace("_", "-"), value, holds, option.range.words)

    @property
    def greedy(self) -> bool:
        """True if we choose the likeliest token: if the temperature is 0, or too small for a normal float32 number."""
        return self.temperature < 2**-126


BackendName = Literal["jax", "reference"]
DtypeName = Literal["float32", "bfloat16"]
CacheName = Literal["int8"]
ParallelName = Literal["tensor", "context"]


@dataclass(frozen=True)
class RunOptions:
    """Options for running a model; `model.llama.load` explains most of them.

    Raises ValueError for a value out of range.
    """

    context: int | None = None
    dtype: DtypeName | None = None
    backend: BackendName = "jax"
    kernels: str = "auto"
    quantize: str | None = None
    cache: CacheName | None = None
    greedy: bool = False
    devices: int = 1
    parallel: ParallelName = "tensor"
    speculate: bool = False  # whether to verify drafts of `model.running.speculation`
    compile_cache: str | Path | None = None  # a folder of `model.running.program_store`; None: no folder
    # The number of tokens in the first prompt, or None if it is unknown. At the start we compile only the programs that
    # this prompt needs, and each other program at its first use. A large model on a CPU ignores the number.
    prompt: int | None = None
    emulate_activations: str | None = None  # a method of `model.ops.emulated.roundings`
    # Whether this process does nothing except run the model. Then we return the compiler's memory to the system, and
    # for a large model on a CPU we change how the process allocates memory (`model.running.process`).
    own_process: bool = False

    def __post_init__(self):
        if self.backend not in get_args(BackendName):
            raise ValueError(f"backend must be jax or reference, got {self.backend}")
        if self.dtype not in (None, *get_args(DtypeName)):
            raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype}")
        if self.cache not in (None, *get_args(CacheName)):
            raise ValueError(f"cache must be int8, or None for the dtype of the weights, got {self.cache}")
        if self.speculate and (self.backend == "reference" or self.devices != 1 or self.emulate_activations):
            raise ValueError("speculate needs the jax backend, one device, and no emulated activations")
        if self.devices != 1 and (self.backend == "reference" or self.emulate_activations):
            raise ValueError(
                f"devices must be 1 for the reference backend and for emulated activations, got {self.devices}"
            )


class SamplingOption(NamedTuple):
    """A field of `SamplingOptions`, with its default, range and help."""

    name: str
    kind: type  # int or float
    default: float | int
    range: Range
    help: str


# Dataclasses do not say that the type of a field is a class, nor that it has a default.
SAMPLING = {
    option.name: SamplingOption(option.name, option.type, option.default, **option.metadata)  # type: ignore
    for option in fields(SamplingOptions)
}


def check_seed(seed: int | None) -> int:
    """Return `seed`, or a random seed if it is None. Raises ValueError for a seed out of range."""
    if seed is None:
        return secrets.randbelow(2**32)
    _check("seed", seed, 0 <= seed <= MAX_SEED, "between 0 and 2^64 - 1")
    return seed


def check_max_new_tokens(count: int) -> int:
    """Return `count`, the largest number of tokens to generate.

    Raises ValueError if it is negative or not an integer.
    """
    _check("max-new-tokens", count, isinstance(count, int) and count >= 0, "a whole number, 0 or more")
    return count


def choose_context(context: int | None, trained: int) -> int:
    """Return `context`; if it is None, return the smaller of `trained` and 4096 tokens.

    `trained` is the context for which the model was trained. Raises ValueError if `context` is out of range.
    """
    if context is None:
        return min(trained, LONGEST_DEFAULT_CONTEXT)
    _check("context", context, 1 <= context <= trained, f"between 1 and the model's {trained} tokens")
    return context


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Raise ValueError for an id outside a vocabulary of `vocab` tokens, and TypeError for a str in place of ids."""
    if isinstance(ids, str):
        raise TypeError("expected token ids, got a str: `Llama.encode` turns a text into ids")
    for id in ids:
        _check("a token id", id, 0 <= id < vocab, f"between 0 and {vocab - 1}, the vocabulary")


def check_length(ids: Sequence[int], context: int) -> None:
    """Raise ValueError for a sequence that is empty or longer than the context."""
    if not ids:
        raise ValueError(
            "expected at least one token: an empty text works only with a model that begins texts with BOS"
        )
    if len(ids) > context:
        raise ValueError(f"expected at most {context} tokens (the context length), got {len(ids)}")


def _check(name: str, value: float | int, holds: bool, domain: str):
    if not holds:  # also refuses NaN, because comparisons with NaN are false
        raise ValueError(f"{name} must be {domain}, got {value}")
