"""Wrong kernels that public bug reports describe are rejected at default settings.

The draws include the inputs for which these kernels are wrong.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.candidates.worker import LAYOUTS, hand_over, placed, to_bytes
from llamaspec.verify.catalogue import CONTRACTS, IMPLEMENTATIONS
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.reports.replay import check, load
from llamaspec.verify.reports.report import counterexample
from tests.support.processes import REPOSITORY
from tests.verify.direct_calls import judged


@pytest.mark.parametrize("op", ["rope_halves", "rope_interleaved", "rope_halves_backward", "partial_rope"])
def test_positions_that_start_again_are_drawn(op: str):
    """A kernel that derives all positions of a row from the first two is rejected.

    Its results are wrong for packed texts, in which positions start again at 0.
    """

    def counts_on(x, positions, frequencies, **options):
        if positions.shape[1] > 1 and np.all(positions[:, 1] == positions[:, 0] + 1):
            positions = positions[:, :1] + np.arange(positions.shape[1], dtype=np.int32)
        return IMPLEMENTATIONS[op].function(x, positions, frequencies, **options)

    report = judged(op, counts_on)
    assert report.outcome == "violated"
    assert str(report.worst.draw["start"]).startswith("packed by")


def quantize_with(rounded: Callable = np.rint, most: int | None = None) -> Callable:
    """Make a quantizer that rounds codes with `rounded`.

    A group's scale depends on the largest of its first `most` weights, or of all its weights if `most` is None.
    """

    def quantize(w, *, scheme):
        codes, scales = IMPLEMENTATIONS["quantize"].function(w, scheme=scheme)
        if scheme in ("q8", "q8_row", "q4"):
            group, largest = w.shape[1] if scheme == "q8_row" else 64, np.float32(7 if scheme == "q4" else 127)
            for start in range(0, w.shape[1], group):
                part = w[:, start : start + group].astype(np.float32)
                scale = np.max(np.abs(part[:, :most]), axis=1, keepdims=True) / largest
                scaled = np.divide(part, scale, out=np.zeros_like(part), where=scale > 0)
                codes[:, start : start + group] = np.clip(rounded(scaled), -largest, largest)
                scales[:, start // group] = scale[:, 0]
        return codes, scales

    return quantize


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ties_between_codes_and_a_far_maximum_are_drawn(seed: int):
    assert judged("quantize", quantize_with(), seed=seed).outcome == "within bounds"
    away = quantize_with(lambda scaled: np.trunc(scaled + np.copysign(np.float32(0.5), scaled)))
    assert judged("quantize", away, seed=seed).outcome == "violated"
    assert judged("quantize", quantize_with(most=256), seed=seed).outcome == "violated"


def test_pages_that_two_sequences_share_are_drawn():
    """A kernel that stores only one owner per page is rejected.

    If sequences share a page, only the last of them can read it.
    """

    def one_owner(q, k_pages, v_pages, table, lengths):
        page = k_pages.shape[1]
        owner = {}
        for row, length in enumerate(lengths.tolist()):
            owner |= dict.fromkeys(table[row, : -(-length // page)].tolist(), row)
        lengths = lengths.copy()
        for row, pages in enumerate(table.tolist()):
            lost = [at for at, number in enumerate(pages[: -(-lengths[row] // page)]) if owner[number] != row]
            lengths[row] = min(lengths[row], *(at * page for at in lost)) if lost else lengths[row]
        return IMPLEMENTATIONS["attention_paged"].function(q, k_pages, v_pages, table, lengths)

    report = judged("attention_paged", one_owner)
    assert report.outcome == "violated"
    assert report.worst.draw["shared"] > 0


def test_a_replay_file_may_lack_a_draw_that_has_a_default():
    """A replay file without the draw `shared` is still valid, because `shared` has a default.

    Such files were written before the contract of attention_paged had this draw.
    """
    path = REPOSITORY / "docs" / "found" / "vllm-attention-paged.json"
    saved = load(path)
    assert "shared" not in saved.draw
    check(saved, CONTRACTS["attention_paged"], path)
    with pytest.raises(ValueError, match="cannot draw the inputs"):
        check(dataclasses.replace(saved, draw={"page": 4}), CONTRACTS["attention_paged"], path)


def test_arrays_that_are_not_contiguous_are_drawn_unless_the_candidate_wants_contiguous_ones():
    """A kernel that assumes contiguous rows is rejected, unless the user asks for contiguous arrays."""

    def packed(x, weight, *, eps):
        flat = np.lib.stride_tricks.as_strided(x, x.shape, (x.shape[1] * x.itemsize, x.itemsize))
        return IMPLEMENTATIONS["rmsnorm"].function(flat, weight, eps=eps)

    report = judged("rmsnorm", packed)
    assert report.outcome == "violated"
    assert report.worst.draw["layout"] in LAYOUTS
    assert f"layout={report.worst.draw['layout']!r}" in "\n".join(counterexample(report, CONTRACTS["rmsnorm"]))
    assert judged("rmsnorm", packed, contiguous=True).outcome == "within bounds"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (0, 3)])
def test_a_layout_keeps_the_numbers(layout: str, shape: tuple[int, ...]):
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    handed = hand_over(to_bytes(array)._replace(layout=layout), "numpy", None)
    np.testing.assert_array_equal(handed, array)
    handed[...] = 7  # a candidate may write to it
    np.testing.assert_array_equal(handed, np.full(shape, 7))


def test_each_layout_has_its_strides():
    array = np.ones((2, 3), np.float32)
    assert [placed(array, layout)[1:] for layout in LAYOUTS] == [((6, 1), 0), ((1, 2), 0), ((0, 1), 0), ((3, 1), 1)]
    assert placed(np.arange(6).reshape(2, 3), "expanded")[1:] == ((3, 1), 0)  # its rows differ
    zeros = np.array([[0.0], [-0.0]])
    assert placed(zeros, "expanded")[1:] == ((1, 1), 0)  # so do the bits of these


@pytest.mark.parametrize("op", [op for op, contract in CONTRACTS.items() if contract.large.empty])
def test_arrays_without_rows_are_drawn(op: str):
    """A kernel that cannot launch a grid of 0 blocks fails, and the right implementation passes."""
    right = IMPLEMENTATIONS[op]

    def launched(*arguments, **options):
        if any(not argument.size for argument in arguments if isinstance(argument, np.ndarray)):
            raise RuntimeError("invalid configuration argument")
        return right.function(*arguments, **options)

    def outcome(candidate: Callable) -> tuple[str, int]:
        options = {"precision": precision("float32"), "examples": 4, "seed": 0, "only": right.only}
        report = verify(CONTRACTS[op], Direct(candidate), shrink=False, **options)
        return report.outcome, report.examples

    assert outcome(launched) == ("violated", 4)
    assert outcome(right.function) == ("within bounds", 4)
