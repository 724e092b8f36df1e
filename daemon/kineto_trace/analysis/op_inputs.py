"""The inputs of operators: their arguments "Input Dims", "Input type", … by call.

Equal inputs share one text in the trace, so that texts are few and each is read once.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.context import Context
from kineto_trace.analysis.groups import group

SHAPES = ("Input Dims", "Input dims")  # newer and older traces

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OpInputs:
    """number: per row of cpu_op, a place in `arguments`. arguments: of each distinct text, {} where it is no JSON."""

    number: Ints
    arguments: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class OpTexts:
    """number: per row of cpu_op, a place in `texts`; texts: distinct; None: the operator has no such argument."""

    number: Ints
    texts: tuple[str | None, ...]


def op_inputs(context: Context) -> OpInputs:
    """The inputs of all operators; {} for operators whose inputs were not recorded."""
    column = context.trace.table("cpu_op")["inputs"]
    groups = group([column])
    numbers = column[groups.first].tolist()
    return OpInputs(groups.number, tuple(_parsed(context.trace.strings[n]) if n >= 0 else {} for n in numbers))


def _parsed(text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads("{" + text + "}")
    except ValueError:
        return {}
    return found


def input_shapes(context: Context) -> OpTexts:
    """The shapes of the inputs of all operators as Python prints the lists: "[[64, 512], []]"."""
    inputs = context.get(op_inputs)
    shown = [next((str(each[name]) for name in SHAPES if name in each), None) for each in inputs.arguments]
    texts = tuple(dict.fromkeys(shown))
    place = {text: number for number, text in enumerate(texts)}
    of_input = np.array([place[text] for text in shown], np.int64)
    return OpTexts(of_input[inputs.number], texts)
