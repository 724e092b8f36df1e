"""Python functions as rows of a diff: the time in which each was the innermost one, from samples or recorded calls.

Theory of operation
    Line numbers and folders change with the version of a program, so that a function is matched by its file and name
    alone: the path below site-packages or the standard library, else the name of the file (with the folder of a
    package's __init__.py).
"""

import re

import numpy as np

from kineto_trace.analysis.diff.step_samples import HOST, StepSamples, TimedEvents, samples
from kineto_trace.model.context import Context
from kineto_trace.structure.nesting import nest_tables
from kineto_trace.structure.python.code_places import code_place
from kineto_trace.structure.python.python_samples import sample_period_ns

NO_PYTHON = "a trace has no Python functions: record with stacks (with_stack=True, or kinetod's sampler)"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_INSTALLED = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python\d+\.\d+)/")


def function_samples(context: Context) -> StepSamples:
    """The innermost Python function of each moment, with the C code that it calls."""
    table = context.trace.table("python_function")
    sampled = np.flatnonzero(table["self_samples"] > 0)
    period = sample_period_ns(context.trace)
    exact = np.flatnonzero(table["samples"] == 0)
    nested = nest_tables([table.take(exact)], context.trace.window_end_ns)
    calls = exact[nested.order]
    rows = np.concatenate([sampled, calls])
    took = np.concatenate([table["self_samples"][sampled].astype(np.int64) * period, nested.tree.self_time])
    names = [function_name(text) for text in context.trace.strings]
    number = {name: place for place, name in enumerate(dict.fromkeys(names))}
    key = np.array([number[name] for name in names] or [0], np.int64)[table["name"][rows]]
    part = TimedEvents(HOST, key, table["start"][rows], took)
    return samples(context, [part], list(number), [] if len(rows) else [NO_PYTHON])


def function_name(text: str) -> str:
    """A function as two versions of a program both have it."""
    place = code_place(text)
    if not place.file:
        return _ADDRESS.sub("", text)
    path = place.path
    installed = _INSTALLED.sub("", path)
    parts = path.split("/")
    own = "/".join(parts[-2:] if parts[-1] == "__init__.py" else parts[-1:])
    return f"{own if installed == path else installed}: {place.function}"
