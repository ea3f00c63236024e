"""The script that looks for numbers which differ between processes: it sees one bit, and names whose it is."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks.determinism import checksum, digests, report


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_a_checksum_sees_one_bit_and_the_order(dtype):
    array = np.arange(1, 7).astype(dtype).reshape(2, 3)
    changed = array.copy()
    changed.view(np.uint8)[-1, -1] ^= 1
    sums = {int(checksum(jnp.asarray(each))) for each in (array, changed, array[::-1])}
    assert len(sums) == 3
    assert int(checksum(jnp.asarray(array))) in sums


def test_the_process_and_the_array_that_differ_are_named():
    usual = digests({"k": jnp.ones(3), "v": jnp.zeros(3)})
    other = digests({"k": jnp.ones(3), "v": jnp.full(3, -0.0)})
    lines = []
    found = [(0, "cache", usual), (1, "cache", other), (2, "cache", usual), (0, "weights", usual)]
    rows = report(found, lines.append)
    assert [row["differing"] for row in rows] == [[(1, ["['v']"])], []]
    assert lines == [
        "cache: 3 times 2 arrays, 1 times different",
        "  process 1: 1 arrays, ['v']",
        "weights: 1 times 2 arrays, 0 times different",
    ]
