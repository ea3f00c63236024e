"""Attention with a mask, and its three forms in kernels: prefill, decoding, and decoding from pages."""

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
from hypothesis import strategies as st
from jaxtyping import Float

from llamaspec.reference.attention import attention, causal_mask
from llamaspec.reference.cached_attention import attention_decode, attention_paged, attention_prefill
from llamaspec.reference.softmax import softmax
from llamaspec.verify.bounds.precision import TINY, Precision, U, precision
from llamaspec.verify.bounds.running_error import attended, exactly
from llamaspec.verify.bounds.summation import Roundings, roundings
from llamaspec.verify.contract import (
    Arguments,
    Claim,
    Contract,
    Expected,
    Large,
    Law,
    Trial,
    as_float64,
    beyond,
    independent,
)
from llamaspec.verify.draws import reach
from llamaspec.verify.draws.draw import HIDDEN, Values, hide, integers, seeds, sizes, values

BLOCKS = 8  # most blocks of keys of an online softmax, or of a split over keys


def _bounded(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> Expected:
    """Compute attention and its error bounds for one sequence.

    The shapes are q [queries heads head_dim], k and v [keys kv_heads head_dim], and mask [queries keys].
    """
    if not mask.size:
        zeros = np.zeros(q.shape)
        return Expected(zeros, zeros, zeros, zeros, sums=lambda: Roundings(zeros, zeros, zeros.astype(int)))
    dtype = precision(v.dtype.name)
    unit, smallest = dtype.unit, dtype.smallest if dtype.unit else 0.0  # float32 weights are not rounded
    exact = attended(exactly(q), exactly(k), exactly(v), mask, blocks=BLOCKS, unit=unit, smallest=smallest)
    sizes = [np.abs(as_float64(a)) for a in (q, k, v)]
    added = attention(as_float64(q), as_float64(k), sizes[2], mask)
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("ihd,jhd->ihj", sizes[0], np.repeat(sizes[1], group, axis=1)) / np.sqrt(q.shape[-1])
    largest = np.max(np.where(np.isneginf(mask)[:, None], 0, scores), axis=-1, initial=0)[..., None]
    off = (64 + (8 + 4 * np.sqrt(q.shape[-1])) * largest) * U + unit
    # An error `off` of a score multiplies its weight by e^off. e^300 exceeds any hard bound and does not overflow.
    alarm = np.expm1(np.minimum(off, 300)) * added
    underflow = (4 * TINY + smallest) * len(k) * (1 + float(np.max(sizes[2], initial=0)))
    sums = partial(_sums, q, k, sizes[2], mask, added)
    return Expected(exact.value, exact.error, alarm + underflow, added, sums=sums)


def _sums(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, added: np.ndarray) -> Roundings:
    """Return the errors that the model allows in two sums over keys: of weights, and of weighted values.

    `v` has the sizes of the values, and `added` is the exact sum of the weighted sizes.
    """
    keys, values = (np.repeat(as_float64(a), q.shape[1] // k.shape[1], axis=1) for a in (k, v))
    weights = softmax(np.einsum("ihd,jhd->hij", as_float64(q), keys) / np.sqrt(q.shape[-1]) + mask)
    total = roundings(weights, lambda part: part.sum(axis=-1, keepdims=True)).map(lambda part: part.swapaxes(0, 1))
    sums = roundings(weights, lambda part: part @ values.swapaxes(0, 1)).map(lambda part: part.swapaxes(0, 1))
    return sums.plus(Roundings(total.running * added, total.blocked * added, total.terms))


def _stacked(rows: list[Expected]) -> Expected:
    return Expected(
        value=np.stack([row.value for row in rows]),
        hard=np.stack([row.hard for row in rows]),
        alarm=np.stack([row.alarm for row in rows]),
        size=np.stack([row.size for row in rows]),
        sums=lambda: Roundings(*(np.stack(parts) for parts in zip(*(row.sums() for row in rows), strict=True))),
    )


def expect(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> Expected:
    return _stacked([_bounded(*row) for row in zip(q, k, v, as_float64(mask), strict=True)])


def expect_prefill(q: np.ndarray, k: np.ndarray, v: np.ndarray, offsets: np.ndarray, *, window: int | None) -> Expected:
    rows = []
    for query, keys, value_rows, offset in zip(q, k, v, offsets.tolist(), strict=True):
        used = offset + len(query)
        mask = causal_mask(len(query), used, offset=offset, window=window)
        rows.append(_bounded(query, keys[:used], value_rows[:used], mask))
    return _stacked(rows)


def expect_decode(q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray, *, window: int | None) -> Expected:
    rows = []
    for query, keys, value_rows, length in zip(q, k, v, lengths.tolist(), strict=True):
        start = 0 if window is None else max(length - window, 0)
        output = _bounded(query[None], keys[start:length], value_rows[start:length], np.zeros((1, length - start)))
        sums = partial(_first, output.sums)
        rows.append(Expected(*(np.asarray(part)[0] for part in output[:4]), sums=sums))
    return _stacked(rows)


def _first(sums: Callable[[], Roundings]) -> Roundings:
    """Return `sums()` without its first axis, which has the only query of a sequence."""
    return sums().map(lambda part: part[0])


def expect_paged(
    q: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray, table: np.ndarray, lengths: np.ndarray
) -> Expected:
    k, v = (pages[table].reshape(len(table), -1, *pages.shape[2:]) for pages in (k_pages, v_pages))
    return expect_decode(q, k, v, lengths, window=None)


def _only_value(o: np.ndarray, v: np.ndarray) -> Claim:
    """Claim that o equals the value v of the only visible key, repeated for the heads that share it.

    A kernel may round the weight 1 and the total 1, so we allow a few roundings.
    """
    values = np.repeat(as_float64(v), o.shape[-2] // v.shape[-2], axis=-2)
    unit = 8 * U + 2 * precision(v.dtype.name).unit + precision(o.dtype.name).unit
    return Claim(o, np.broadcast_to(values, o.shape), unit * np.abs(values) + precision(v.dtype.name).smallest)


def _one_key(trial: Trial) -> Claim | None:
    """Hide all keys except the last. This reveals a number added to the sum of weights, such as an epsilon."""
    v = trial.arguments["v"]
    if not v.shape[1]:
        return None
    mask = np.full_like(trial.arguments["mask"], -np.inf)
    mask[..., -1] = 0
    return _only_value(trial.again(mask=mask)[0], v[:, -1:])


def _one_position(trial: Trial) -> Claim:
    lengths = np.minimum(trial.arguments["lengths"], 1)
    values = np.where((lengths > 0)[:, None, None], as_float64(trial.arguments["v"][:, 0]), 0.0)
    return _only_value(trial.again(lengths=lengths)[0], values.astype(trial.arguments["v"].dtype))


MASKS = ("causal", "window", "ragged", *HIDDEN)


def mask_named(which: str, batch: int, queries: int, keys: int) -> Float[np.ndarray, "batch queries keys"]:
    """Make a mask of 0 and -inf. If there are more causal queries than keys, the first queries see no key."""
    if which in ("causal", "window"):
        window = 3 if which == "window" else None
        mask = causal_mask(queries, keys, offset=keys - queries, window=window)
        masks = np.broadcast_to(mask, (batch, queries, keys))
    elif which == "ragged":
        lengths = np.maximum(keys - 3 * np.arange(batch), 0)[:, None, None]
        masks = np.where(np.broadcast_to(np.arange(keys), (batch, queries, keys)) < lengths, 0.0, -np.inf)
    else:
        masks = np.broadcast_to(np.where(hide(which, queries, keys), -np.inf, 0.0), (batch, queries, keys))
    return masks.astype(np.float32)


def _heads(precision: Precision, q: Values, k: Values, v: Values, shift: float, shapes: list[tuple[int, ...]]):
    """Make q, k and v. Their first features add the constant shift * abs(shift) / sqrt(head_dim) to all scores."""
    drawn = [
        value.array(name, *shape, precision=precision)
        for name, value, shape in zip("qkv", (q, k, v), shapes, strict=True)
    ]
    if shift:
        drawn[0][..., 0], drawn[1][..., 0] = abs(shift), shift
    return drawn


def arguments(
    *,
    precision: Precision,
    batch: int,
    queries: int,
    keys: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    q: Values,
    k: Values,
    v: Values,
    shift: float,
    mask: str,
) -> Arguments:
    cached = (batch, keys, kv_heads, head_dim)
    arrays = _heads(precision, q, k, v, shift, [(batch, queries, kv_heads * group, head_dim), cached, cached])
    return {"q": arrays[0], "k": arrays[1], "v": arrays[2], "mask": mask_named(mask, batch, queries, keys)}


def prefill_arguments(
    *,
    precision: Precision,
    offsets: tuple[int, ...],
    queries: int,
    spare: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    q: Values,
    k: Values,
    v: Values,
    shift: float,
    window: int | None,
    padding: float,
) -> Arguments:
    capacity = max(offsets) + queries + spare
    cached = (len(offsets), capacity, kv_heads, head_dim)
    shapes = [(len(offsets), queries, kv_heads * group, head_dim), cached, cached]
    arrays = _heads(precision, q, k, v, shift, shapes)
    for row, offset in enumerate(offsets):
        arrays[1][row, offset + queries :] = arrays[2][row, offset + queries :] = padding
    return {
        "q": arrays[0],
        "k": arrays[1],
        "v": arrays[2],
        "offsets": np.array(offsets, np.int32),
        "window": window,
    }


def decode_arguments(
    *,
    precision: Precision,
    lengths: tuple[int, ...],
    spare: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    q: Values,
    k: Values,
    v: Values,
    shift: float,
    window: int | None,
    padding: float,
) -> Arguments:
    capacity = max(max(lengths) + spare, 1)
    cached = (len(lengths), capacity, kv_heads, head_dim)
    arrays = _heads(precision, q, k, v, shift, [(len(lengths), kv_heads * group, head_dim), cached, cached])
    for row, length in enumerate(lengths):
        arrays[1][row, length:] = arrays[2][row, length:] = padding
    return {"q": arrays[0], "k": arrays[1], "v": arrays[2], "lengths": np.array(lengths, np.int32), "window": window}


def paged_arguments(
    *,
    precision: Precision,
    lengths: tuple[int, ...],
    page: int,
    spare: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    q: Values,
    k: Values,
    v: Values,
    shift: float,
    order: int,
    padding: float,
    shared: int = 0,
) -> Arguments:
    """Make arguments with the pages in a random order; unused positions and an unused page hold `padding`.

    A sequence shares up to `shared` of its first pages with sequence 0. A page is shared only if both sequences fill it
    to the same position.
    """
    batch = len(lengths)
    blocks = max(-(-max(lengths) // page), 1) + spare
    filled = [[min(page, length - start) for start in range(0, length, page)] for length in lengths]
    common = [_common(row, filled[0], most=shared) if number else 0 for number, row in enumerate(filled)]
    nobodys = sum(map(len, filled)) - sum(common)
    cached = (nobodys + 1, page, kv_heads, head_dim)
    arrays = _heads(precision, q, k, v, shift, [(batch, kv_heads * group, head_dim), cached, cached])
    places = np.argsort(integers(order, "order", nobodys + 1, below=2**31), kind="stable").astype(np.int32)
    table = np.full((batch, blocks), places[nobodys], np.int32)
    for pages in arrays[1:]:
        pages[places[nobodys]] = padding
    used = 0
    for row, count in enumerate(map(len, filled)):
        table[row, : common[row]] = table[0, : common[row]]
        own = count - common[row]
        table[row, common[row] : count] = places[used : used + own]
        used += own
        if lengths[row] % page:
            for pages in arrays[1:]:
                pages[table[row, count - 1], lengths[row] % page :] = padding
    return {
        "q": arrays[0],
        "k_pages": arrays[1],
        "v_pages": arrays[2],
        "table": table,
        "lengths": np.array(lengths, np.int32),
    }


def _common(filled: list[int], first: list[int], *, most: int) -> int:
    """Count the leading pages, up to `most`, that two sequences can share.

    `filled` and `first` have the number of used positions of each page. Sequences can share pages with equal numbers.

    >>> _common([4, 4, 3], [4, 4, 4, 1], most=3), _common([4, 4, 3], [4, 4, 3], most=3)
    (2, 3)
    """
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(filled, first, strict=False))
    return min(most, len(list(pairs)))


def _ones(trial: Trial) -> Claim:
    """Set v to 1 everywhere: the result must be 1 for every query that sees a key."""
    v = np.ones_like(trial.arguments["v"])
    o = as_float64(trial.again(v=v)[0])
    seen = np.any(np.isfinite(trial.arguments["mask"]), axis=-1)[..., None, None]
    keys = v.shape[1]
    unit = precision(v.dtype.name)
    return Claim(o, np.broadcast_to(seen * 1.0, o.shape), 4 * (keys + 16) * U + 2 * unit.unit + unit.smallest)


def _reversed_keys(trial: Trial) -> Claim:
    k, v, mask = trial.arguments["k"], trial.arguments["v"], trial.arguments["mask"]
    flipped = {"k": k[:, ::-1], "v": v[:, ::-1], "mask": mask[..., ::-1]}
    again = trial.again(**{name: np.ascontiguousarray(array) for name, array in flipped.items()})
    return Claim(again[0], trial.outputs[0], 2 * trial.bounds[0])


def _repeated_heads(trial: Trial) -> Claim:
    k, v = trial.arguments["k"], trial.arguments["v"]
    group = trial.arguments["q"].shape[2] // k.shape[2]
    again = trial.again(k=np.repeat(k, group, axis=2), v=np.repeat(v, group, axis=2))
    return Claim(again[0], trial.outputs[0], 2 * trial.bounds[0])


def _causal(trial: Trial) -> Claim | None:
    """Change k and v at the last position of each sequence: only the result of the last query may change."""
    queries = trial.arguments["q"].shape[1]
    if queries == 1:
        return None
    k, v = trial.arguments["k"].copy(), trial.arguments["v"].copy()
    for row, offset in enumerate(trial.arguments["offsets"].tolist()):
        k[row, offset + queries - 1] = v[row, offset + queries - 1] = 3
    return Claim(trial.again(k=k, v=v)[0][:, :-1], trial.outputs[0][:, :-1], 0.0)


def _beyond(trial: Trial) -> Claim:
    k, v = trial.arguments["k"].copy(), trial.arguments["v"].copy()
    for row, length in enumerate(trial.arguments["lengths"].tolist()):
        k[row, length:] = v[row, length:] = -5
    return Claim(trial.again(k=k, v=v)[0], trial.outputs[0], 0.0)


def _elsewhere(trial: Trial) -> Claim:
    """Move every page to the next place in memory, and change the table accordingly: the result must not change."""
    moved = {name: np.roll(trial.arguments[name], 1, axis=0) for name in ("k_pages", "v_pages")}
    table = (trial.arguments["table"] + 1) % len(moved["k_pages"])
    return Claim(trial.again(**moved, table=table.astype(np.int32))[0], trial.outputs[0], 0.0)


KEYS = sizes(8, 16, 32, most=65)
LENGTHS = st.lists(st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 0]), min_size=1, max_size=3).map(tuple)
HEADS = {
    "kv_heads": st.sampled_from([1, 2, 3]),
    "group": st.sampled_from([1, 2, 3, 7]),
    "head_dim": st.sampled_from([1, 2, 3, 5, 8, 16, 64]),
}
DRAWN = {
    "q": values(-4, 4),
    "k": values(-4, 4),
    "v": values(-8, 8),
    "shift": st.sampled_from([0.0, -160.0, 160.0, -16.0]),
}
PADDING = st.sampled_from([0.0, 100.0, float("nan")])
WINDOW = st.sampled_from([None, 1, 3, 8, 16])
MANY_HEADS = {"kv_heads": beyond(8, 32, 1024), "group": beyond(8, 32, 1024), "head_dim": (65, 96, 128, 513)}
HEADS_ENDS = {"kv_heads": reach.HEADS, "group": reach.HEADS, "head_dim": reach.WIDTH}
BESIDE = {"kv_heads": [2], "group": [2], "head_dim": [8], "spare": [3]}
FEW_SEQUENCES = {
    "kv_heads": {"lengths": [(9,)], "group": [1]},
    "group": {"lengths": [(9,)]},
}
BOUND = (
    "hard: running error analysis of scores (gamma_(head_dim + 3) |q| |k|), exponentials, the sum over keys, and the "
    "rounding of the weights to the dtype of v, 2^-25 each at least for float16; alarm: (e^a - 1) p |v|, a being "
    "(64 + (8 + 4 sqrt(head_dim)) max |q| |k|) u + u_v, and u A p |v| more for two running sums over keys, each with "
    "A = n / 2 for equal terms (verify/bounds/summation.py)"
)

ATTENTION = Contract(
    definition=attention,
    shapes={
        "batch": st.sampled_from([1, 2, 3]),
        "queries": st.sampled_from([1, 2, 3, 5, 8, 9]),
        "keys": KEYS,
        **HEADS,
    },
    values={**DRAWN, "mask": st.sampled_from(["none", *(name for name in MASKS if name != "none")])},
    arguments=arguments,
    expect=expect,
    domain="q [batch queries heads head_dim], k and v [batch keys kv_heads head_dim] of one dtype, mask [batch queries "
    "keys] float32 of 0 and -inf; head h reads key head h // (heads / kv_heads); a query that sees no key gives 0",
    bound=BOUND,
    laws=[
        independent("a sequence", "q", "k", "v", "mask"),
        Law("values of 1 give 1 for every query that sees a key", _ones),
        Law("the order of the keys does not change the result", _reversed_keys, sets=("mask",)),
        Law("repeating a shared key head for each of its query heads does not change the result", _repeated_heads),
        Law("a query that sees only one key gives the value of that key", _one_key, sets=("mask",)),
    ],
    large=Large(
        {
            "batch": beyond(8, 64, 1024),
            "queries": beyond(16, 128, 8192),
            "keys": beyond(128, 512, 1024, 8192),
            **MANY_HEADS,
        },
        beside={
            "batch": [2],
            "queries": [3],
            "keys": [20],
            "kv_heads": [2],
            "group": [2],
            "head_dim": [8],
            "mask": ["causal", "ragged", "window", "every other"],
        },
        closer={
            "batch": {"queries": [1], "kv_heads": [1]},
            "kv_heads": {"batch": [1], "group": [1]},
            "group": {"batch": [1]},
        },
        ends={"batch": reach.SEQUENCES, **HEADS_ENDS},
    ),
)
PREFILL = Contract(
    definition=attention_prefill,
    shapes={
        "offsets": st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 16, 31]), min_size=1, max_size=3).map(tuple),
        "queries": st.sampled_from([1, 2, 3, 5, 8, 9, 16, 17]),
        "spare": st.sampled_from([0, 1, 7, 16]),
        **HEADS,
    },
    values={**DRAWN, "window": WINDOW, "padding": PADDING},
    arguments=prefill_arguments,
    expect=expect_prefill,
    domain="q [batch queries heads head_dim], k and v [batch capacity kv_heads head_dim] of one dtype, offsets [batch] "
    "int32; cache rows from offset + queries on may hold anything, even NaN (--set padding=0 fills them with 0)",
    bound=BOUND,
    laws=[
        independent("a sequence", "q", "k", "v", "offsets"),
        Law("a query's result does not depend on later positions, bit for bit", _causal),
    ],
    large=Large(
        {
            "offsets": [(64,), (131,), (515, 3), (2,) * 66, (3,) * 1041, (8321,)],
            "queries": beyond(32, 128, 1024),
            "spare": (65, 8321),
            **MANY_HEADS,
        },
        beside={**BESIDE, "offsets": [(5, 2)], "queries": [3]},
        closer={
            "queries": {"offsets": [(5,)], "kv_heads": [1]},
            "kv_heads": {"offsets": [(5,)], "group": [1]},
            "group": {"offsets": [(5,)]},
        },
        ends={
            "queries": "the number of scores, and the time to judge them, grow with the square of a prompt's length",
            "offsets, how many": reach.SEQUENCES,
            **HEADS_ENDS,
        },
    ),
)
DECODE = Contract(
    definition=attention_decode,
    shapes={"lengths": LENGTHS, "spare": st.sampled_from([0, 1, 7, 16]), **HEADS},
    values={**DRAWN, "window": WINDOW, "padding": PADDING},
    arguments=decode_arguments,
    expect=expect_decode,
    domain="q [batch heads head_dim], k and v [batch capacity kv_heads head_dim] of one dtype, lengths [batch] int32 "
    "from 0; cache rows beyond a length may hold anything, even NaN (--set padding=0 fills them with 0)",
    bound=BOUND,
    laws=[
        independent("a sequence", "q", "k", "v", "lengths"),
        Law("cache rows beyond a length do not change the result, bit for bit", _beyond),
        Law("a query that sees only one key gives the value of that key", _one_position, sets=("lengths",)),
    ],
    large=Large(
        {
            "lengths": [(67,), (131, 5), (5,) * 17, (521,), (2,) * 66, (1041, 3), (2,) * 1041, (33_281,)],
            "spare": (65, 8321),
            **MANY_HEADS,
        },
        beside={**BESIDE, "lengths": [(19, 5)]},
        closer=FEW_SEQUENCES,
        ends={"lengths, how many": reach.SEQUENCES, **HEADS_ENDS},
    ),
)
PAGED = Contract(
    definition=attention_paged,
    shapes={
        "lengths": LENGTHS,
        "page": st.sampled_from([1, 2, 4, 8, 16]),
        "spare": st.sampled_from([0, 1, 2]),
        **HEADS,
    },
    values={**DRAWN, "order": seeds, "padding": PADDING, "shared": st.sampled_from([0, 1, 3])},
    arguments=paged_arguments,
    expect=expect_paged,
    domain="q [batch heads head_dim], k_pages and v_pages [pages page kv_heads head_dim] of one dtype, table [batch "
    "blocks] and lengths [batch] int32; rows may share their first pages (a prefix cache); positions beyond a length "
    "hold anything, even NaN",
    bound=BOUND,
    laws=[
        independent("a sequence", "q", "table", "lengths"),
        Law("the places of pages in memory do not change the result, bit for bit", _elsewhere),
    ],
    large=Large(
        {
            "lengths": [(67,), (131, 5), (5,) * 17, (521,), (2,) * 66, (1041, 3), (2,) * 1041, (33_281,)],
            "page": (32, 64, 96, 257, 8321),
            "spare": (65, 8321),
            **MANY_HEADS,
        },
        beside={**BESIDE, "lengths": [(291, 5)], "page": [4]},  # 33,281 positions are 8,321 pages
        closer={**FEW_SEQUENCES, "page": {"lengths": [(8400, 5)]}},
        ends={"lengths, how many": reach.SEQUENCES, **HEADS_ENDS},
    ),
)
