import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.pallas_kernels.parts.compat import Target
from llamaspec.pallas_kernels.parts.key_ring import KeyRing, OpenRing, visible_keys


@given(
    tile=st.sampled_from([64, 128]),
    splits=st.sampled_from([1, 4, 12, 16, 32]),
    length=st.integers(-1, 9000),
    window=st.none() | st.integers(1, 9000),
)
def test_each_tile_that_has_keys_is_one_step_of_one_block(tile, splits, length, window):
    ring = KeyRing(64, np.dtype(jnp.bfloat16), splits, tile, stages=2, pieces=1)
    start, stop = visible_keys(length, 8192, window)
    blocks = [OpenRing(ring, {}, lambda ref, tile: [], split, start, stop, {}, Target()) for split in range(splits)]
    firsts = [int(block.first_key(step)) for block in blocks for step in range(int(block.steps))]
    assert sorted(firsts) == list(range(int(start) // tile * tile, int(stop), tile))
