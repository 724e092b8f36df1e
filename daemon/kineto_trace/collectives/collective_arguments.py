"""What is known of a communication kernel's collective, as Kineto shows it: in the arguments of the kernel, too."""

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.collectives.nccl import arguments_of_ops
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_STRING, Trace

COLUMN = "collective"


def collective_columns(trace: Trace) -> dict[str, npt.NDArray[np.int32]]:
    """The column COLUMN of the kernels: numbers of ready arguments, NO_STRING where there are none. None at all: {}."""
    inputs = trace.table("cpu_op")["inputs"]
    texts = {number for number in unique_values(inputs).tolist() if number != NO_STRING}
    if not any('"Collective name"' in trace.strings[number] for number in texts):
        return {}
    rows, numbers = arguments_of_ops(Context(trace))
    column = np.full(len(trace.table("kernel")), NO_STRING, np.int32)
    column[rows] = numbers
    return {COLUMN: column}
