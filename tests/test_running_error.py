"""Bounds at the ends of what they allow, where no draw of a contract comes."""

from itertools import product

import numpy as np
import pytest

from verify.running_error import routed


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95, 1.0])
def test_weights_of_experts_stay_within_their_bound_however_uncertain_probabilities_are(rate):
    p = np.array([[0.6, 0.25, 0.1, 0.05]])
    chosen, weights = routed(np.ones((1, 1)), np.log(p).T, p, rate * p, experts_per_token=3, renormalized=True)
    for signs in product((-1, 1), repeat=3):
        computed = np.take_along_axis(p, chosen, axis=-1) * (1 + rate * np.array(signs))
        if total := computed.sum():
            assert np.all(np.abs(computed / total - weights.value) <= weights.error)
