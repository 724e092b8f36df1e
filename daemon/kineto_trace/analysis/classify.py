"""What kind of work a GPU activity is, told by its name: communication, computation, tensor cores.

Names are judged once each: the functions give one value per string of the trace.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.context import Context

Flags = npt.NDArray[np.bool_]

COMMUNICATION = re.compile(r"(?i)nccl|rccl")  # all versions: ncclKernel_…, ncclDevKernel_…, mscclKernel_…


def matches(strings: Sequence[str], pattern: re.Pattern[str]) -> Flags:
    """For each string: whether the pattern is found in it."""
    return np.fromiter((pattern.search(text) is not None for text in strings), np.bool_, len(strings))


def communication_names(context: Context) -> Flags:
    """For each string of the trace: whether a kernel of that name is a collective or point-to-point transfer."""
    return matches(context.trace.strings, COMMUNICATION)
