import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overspill.layers.mask import attention_mask


def by_hand(batch, length, segment_ids, mask, window):
    out = np.zeros((batch, length, length), bool)
    for b in range(batch):
        for i in range(length):
            for j in range(length):
                visible = j <= i
                if window is not None:
                    visible = visible and i - window < j
                if segment_ids is not None:
                    visible = visible and segment_ids[b, i] == segment_ids[b, j]
                if mask is not None:
                    visible = visible and mask[b, j]
                out[b, i, j] = visible
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_against_loops(window, packed, padded):
    # Segment ids include zero and come back later in the row: only equality counts.
    segments = np.array([[0, 0, 0, 5, 5, 1, 1, 0], [3, 3, 3, 3, 3, 3, 3, -1]]) if packed else None
    mask = np.array([[0, 0, 1, 1, 1, 1, 0, 1], [0] * 8]).astype(bool) if padded else None
    got = jax.jit(lambda s, m: attention_mask(8, segment_ids=s, mask=m, window=window))(segments, mask)
    rows = 2 if packed or padded else 1
    assert got.shape == (rows, 8, 8) and got.dtype == jnp.bool_
    np.testing.assert_array_equal(got, by_hand(rows, 8, segments, mask, window))


def test_bad_input():
    with pytest.raises(ValueError, match="window must be 1 or larger, or None for no window, got 0"):
        attention_mask(4, window=0)
    with pytest.raises(ValueError, match="segment_ids has length 5, the sequence 4"):
        attention_mask(4, segment_ids=jnp.zeros((1, 5), jnp.int32))
    with pytest.raises(ValueError, match="mask has length 3, the sequence 4"):
        attention_mask(4, mask=jnp.ones((1, 3), bool))
