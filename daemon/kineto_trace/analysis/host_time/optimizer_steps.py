"""When optimizers step, by torch's annotations, on whatever thread."""

import re

from kineto_trace.arrays.intervals import Union, union
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context

_STEP = re.compile(r"^Optimizer\.step#")


def optimizer_steps(context: Context) -> Union:
    """Returns when an optimizer was in its step."""
    table = context.trace.table("user_annotation")
    own = matches(context.trace.strings, _STEP)[table["name"]]
    return union(table["start"][own], table.end()[own])


def optimizer_name(context: Context) -> str:
    """Returns the class and method of the first optimizer, such as SGD.step; "" if none stepped."""
    return next((_STEP.sub("", text) for text in context.trace.strings if _STEP.match(text)), "")
