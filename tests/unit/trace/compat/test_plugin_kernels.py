"""Rounding as Python does it."""

import numpy as np
from kineto_trace.compat.plugin_kernels import rounded


def test_values_are_rounded_by_what_they_really_are() -> None:
    found = rounded(np.array([0.265, 2.675, 0.125, np.nan]), 2)
    assert found[:3].tolist() == [0.27, 2.67, 0.12]
    assert np.isnan(found[3])
