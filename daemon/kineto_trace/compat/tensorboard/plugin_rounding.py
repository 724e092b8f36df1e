"""Rounds to decimal places as Python and so the plug-in does: the double 0.265 is a little more, so it becomes 0.27."""

import numpy as np
import numpy.typing as npt


def rounded(values: npt.NDArray[np.float64], digits: int) -> npt.NDArray[np.float64]:
    """Rounds each value to that many decimal places; NaN stays. It goes value by value: use it for short columns."""
    return np.array([round(value, digits) for value in values.tolist()], np.float64)
