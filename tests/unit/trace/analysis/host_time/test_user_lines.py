"""The line of the program's own code at each moment."""

from dataclasses import replace

import numpy as np
from kineto_trace.analysis.host_time.user_lines import user_lines
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from support.trace_files.sampled_stacks import BACKWARD, MAIN, TORCH, sampled_trace

CALLED = TORCH + "autograd/function.py(327): apply"


def lines(*, cut: bool) -> list[int]:
    """Of samples in `apply`, which backward calls at 333 and main calls that at 36. cut: backward ends too early."""
    whole = sampled_trace([(*MAIN, BACKWARD, CALLED)] * 4)
    table = whole.table("python_function")
    names = np.array([whole.strings[number] for number in table["name"]])
    call_line = np.select([names == CALLED, names == BACKWARD], [333, 36], 0).astype(table["call_line"].dtype)
    duration = np.where(cut & (names == BACKWARD), table["duration"] - 1, table["duration"])
    changed = Table(table.kind, {**table.columns, "call_line": call_line, "duration": duration})
    found: list[int] = user_lines(Context(replace(whole, tables={**whole.tables, table.kind: changed}))).tolist()
    return found


def test_the_line_is_that_at_which_the_function_called_a_library() -> None:
    assert set(lines(cut=False)) == {36}


def test_a_line_of_a_library_is_not_taken_where_the_slice_between_ended_too_early() -> None:
    assert 333 not in lines(cut=True)
