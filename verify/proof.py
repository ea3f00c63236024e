"""Proves the text of a model: evaluates the definition in ball arithmetic, so that each logit is a proven interval.

The text of a model follows from its weights and the definition in `reference`, read as mathematics: each token has the
largest logit, computed without rounding. If the interval of one token is above all others, this token is proven.
Otherwise we compute again with twice as many bits. If `MOST_BITS` bits do not decide a token, the text ends there.

The weights are exact, as `load_reference_params` reads them. It decodes codes without rounding, except in layouts whose
scales are quotients or products of stored numbers (NVFP4, BitNet, HQQ, and double quantization of bitsandbytes): these
scales are rounded to float32 first. RoPE's frequencies and 1 / sqrt(head_dim) are computed as balls. The other
constants are the float64 numbers of the config (eps, theta, caps, scales).
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from flint import arb, ctx

from llamaspec.reference.config import Config
from llamaspec.reference.llama import Cache, Params, empty_cache, hidden_states, map_arrays, unembed
from llamaspec.reference.rope import LinearScaling, Llama3Scaling, Rotation
from llamaspec.verify.bounds.balls import Balls, UndecidedError, operand

BITS = 256
MOST_BITS = 2048
DIGITS = 30  # after the decimal point, in the text of an interval
LISTED = 20  # logits of a token to list
BYTES_PER_WEIGHT = 80  # main memory; 62 were measured with 16.8 million weights: a float64 number, and a ball at `BITS`


class Interval(NamedTuple):
    """A logit: a number between `low` and `high`, both decimal and rounded outwards."""

    id: int
    low: str
    high: str


class ProvenToken(NamedTuple):
    """A token of the text, and what is proven about it."""

    id: int  # the token with the largest logit
    decided: bool  # whether its logit is proven to be the largest; otherwise it has the largest midpoint
    logits: tuple[Interval, ...]  # the largest, in order of their midpoints
    radius: float  # largest radius of a logit
    bits: int  # precision


class UnsupportedError(ValueError):
    """Raised for a model with a switch that proofs do not support."""


@dataclass(frozen=True)
class ExactConfig(Config):
    """A config with balls for the constants that float64 would round."""

    def rotation(self, layer: int | None = None) -> Rotation:
        """Return RoPE's rotation like `Config.rotation`, with frequencies in balls."""
        if layer is not None and not self.uses_rope(layer):
            return super().rotation(layer)
        local = self.local_theta is not None and layer is not None and self.is_local(layer)
        theta = self.local_theta if local and self.local_theta is not None else self.theta
        return Rotation(_frequencies(self.rotary_features, theta, None if local else self.scaling))


def prove(
    params: Params, prompt: Sequence[int], *, config: Config, stops: frozenset[int], max_new_tokens: int
) -> Iterator[ProvenToken]:
    """Yield the tokens that follow `prompt`, until a token in `stops`, or until a token cannot be decided.

    If `MOST_BITS` bits do not decide a comparison that the logits depend on, the text ends without an undecided token.

    Raises ValueError for a prompt without tokens, and UnsupportedError for a model with a switch that is not supported.
    """
    if not prompt:
        raise ValueError("a proof needs at least one token to start from")
    check_supported(config)
    exact, precision = _exact_params(params, config), ctx.prec
    bits, tokens = BITS, list(prompt)
    start: Cache = empty_cache(config)
    try:
        cache, done = start, 0
        while len(tokens) - len(prompt) < max_new_tokens:
            ctx.prec = bits
            token = None
            try:
                x, extended = hidden_states(exact, np.array(tokens[done:]), cache, config=_exact_config(config))
                token = _token(unembed(exact, x[-1], config=config), bits)
            except UndecidedError:
                extended = cache
            if (token is None or not token.decided) and bits < MOST_BITS:
                bits, cache, done = 2 * bits, start, 0
                continue
            if token is None:
                return
            yield token
            if not token.decided or token.id in stops:
                return
            cache, done = extended, len(tokens)
            tokens.append(token.id)
    finally:
        ctx.prec = precision


def check_supported(config: Config) -> None:
    """Raise UnsupportedError if the model's definition has a constant or a function that we cannot compute in balls."""
    unsupported = {
        "experts": config.experts > 0,
        f"the activation {config.activation}": config.activation != "silu" or not config.gated,
        "LayerNorm": config.layer_norm or config.head_qk_norm,
        "attention sinks": config.sinks,
        f"RoPE scaled by {type(config.scaling).__name__}": not isinstance(
            config.scaling, LinearScaling | Llama3Scaling | None
        ),
    }
    if reasons := [name for name, is_used in unsupported.items() if is_used]:
        raise UnsupportedError(f"a proof does not support {', '.join(reasons)}")


def vectors(
    params: Params,
    config: Config,
    prompt: str,
    prompt_ids: Sequence[int],
    tokens: Sequence[ProvenToken],
    text: str,
) -> dict[str, Any]:
    """Make known-answer vectors, the content of a JSON file: the proven text, and intervals of its logits.

    `text` is the text of the proven tokens. A token that is not decided can only be the last.
    """
    return {
        "format": "llamaspec known-answer vectors, version 1",
        "checkpoint": digest(params),
        "config": asdict(config),
        "prompt": prompt,
        "prompt_ids": list(prompt_ids),
        "tokens": [token.id for token in tokens],
        "text": text,
        "decided": [token.decided for token in tokens],
        "logits": [[logit._asdict() for logit in token.logits] for token in tokens],
        "bits": max((token.bits for token in tokens), default=BITS),
    }


def digest(params: Params) -> str:
    """Return the SHA-256 digest of all weights, in the order of `Params`.

    For each array, we digest the shape in decimal, such as "(1024, 128)", and the numbers in little-endian float64.
    """
    total = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, np.ndarray):
            total.update(str(part.shape).encode())
            total.update(np.ascontiguousarray(part, "<f8"))
        elif isinstance(part, tuple | list):
            for member in part:
                add(member)

    add(params)
    return total.hexdigest()


def needed_bytes(config: Config, weights: int, *, prompt: int) -> int:
    """Estimate the main memory for a proof with a model of `weights` weights and a prompt of `prompt` tokens."""
    scores = 4 * config.heads * prompt**2  # scores, masked scores, exponentials and probabilities of a layer
    cached = 2 * config.layers * config.kv_heads * config.head_dim * prompt
    return BYTES_PER_WEIGHT * (weights + scores + cached) + (300 << 20)


def _exact_params(params: Params, config: Config) -> Params:
    """Convert all weights to `Balls`."""
    embedding = Balls(params.embedding)
    head = embedding if config.tied else Balls(params.head)
    return Params(
        embedding=embedding,  # type: ignore[arg-type]  # `Balls` takes the place of an array
        layers=[map_arrays(layer, Balls) for layer in params.layers],
        norm=map_arrays(params.norm, Balls),
        head=head,  # type: ignore[arg-type]
    )


def _exact_config(config: Config) -> ExactConfig:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    if config.attention_scale is None:
        values["attention_scale"] = operand(1 / arb(config.head_dim).sqrt())
    return ExactConfig(**values)


def _frequencies(features: int, theta: float, scaling: LinearScaling | Llama3Scaling | Any) -> Any:
    """Compute `reference.rope.frequencies` in balls."""
    fast = [arb(theta) ** (arb(-2 * i) / features) for i in range(features // 2)]
    match scaling:
        case LinearScaling(factor):
            fast = [f / factor for f in fast]
        case Llama3Scaling(factor, low, high, original_context):
            turns = [original_context * f / (2 * arb.pi()) for f in fast]
            keep = [((turn - low) / (high - low)).max(arb(0)).min(arb(1)) for turn in turns]
            fast = [k * f + (1 - k) * f / factor for k, f in zip(keep, fast, strict=True)]
    return Balls(np.array(fast, object))


def _token(logits: Any, bits: int) -> ProvenToken | None:
    """Choose the token with the largest logit. Return None if the radius of a logit is infinite."""
    balls = list(logits.balls)
    if not all(ball.is_finite() for ball in balls):
        return None
    order = sorted(range(len(balls)), key=lambda i: -balls[i].mid())
    first = balls[order[0]]
    decided = all(first > balls[i] for i in order[1:])
    listed = tuple(Interval(i, *_decimal(balls[i])) for i in order[:LISTED])
    return ProvenToken(order[0], decided, listed, max(float(ball.rad()) for ball in balls), bits)


def _decimal(ball: arb) -> tuple[str, str]:
    """Format the ends of a ball's interval as decimal numbers, rounded outwards.

    >>> _decimal(arb(0.5))
    ('0.500000000000000000000000000000', '0.500000000000000000000000000000')
    """
    return _rounded(ball.lower(), up=False), _rounded(ball.upper(), up=True)


def _rounded(end: arb, *, up: bool) -> str:
    """Format an exact ball as a decimal number with `DIGITS` digits, rounded up or down."""
    mantissa, exponent = (int(part) for part in end.mid().man_exp())
    top, bottom = mantissa * 10**DIGITS * 2 ** max(exponent, 0), 2 ** max(-exponent, 0)
    units = -(-top // bottom) if up else top // bottom
    sign, digits = "-" * (units < 0), str(abs(units)).rjust(DIGITS + 1, "0")
    return f"{sign}{digits[:-DIGITS]}.{digits[-DIGITS:]}"
