"""The shapes of the inputs of operators, as text."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.model.context import Context
from kineto_trace.structure.event_arguments import NOTHING, argument_objects

SHAPES = ("Input Dims", "Input dims")  # newer and older traces

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OpTexts:
    """number: per row of cpu_op, a place in `texts`; texts: distinct; None: the operator has no such argument."""

    number: Ints
    texts: tuple[str | None, ...]


def input_shapes(context: Context) -> OpTexts:
    """The shapes of the inputs of all operators as Python prints the lists: "[[64, 512], []]"."""
    number = np.zeros(len(context.trace.table("cpu_op")), np.int64)
    texts: dict[str | None, int] = {None: 0}
    for name in reversed(SHAPES):
        places, values = argument_objects(context, "cpu_op", name)
        shown = [0 if value is None else texts.setdefault(str(value), len(texts)) for value in values]
        number = np.where(places != NOTHING, np.array([*shown, 0], np.int64)[places], number)
    return OpTexts(number, tuple(texts))
