"""Rounding to decimal places as Python does it, and so the plug-in: 0.265 is a little more than that, thus 0.27."""

import numpy as np
import numpy.typing as npt


def rounded(values: npt.NDArray[np.float64], digits: int) -> npt.NDArray[np.float64]:
    """Each value rounded to that many decimal places; NaN stays. For short columns: it goes value by value."""
    return np.array([round(value, digits) for value in values.tolist()], np.float64)
