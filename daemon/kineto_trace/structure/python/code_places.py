"""Reads the names of Python functions in traces: "file(first line): function", or without a file.

Theory of operation
    A file's path and a function's name may contain anything, also what looks like a line: "/runs (1): b/x.py(12): f".
    The line is the first number in parentheses that follows the ending of a Python file, otherwise the first one at
    all ("<string>(5): f", "/usr/bin/torchrun(8): main"). C functions, which the interpreter describes as
    "<built-in method sleep …>", and the calls of modules ("nn.Module: Linear_0") have no file, whatever follows.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.model.context import Context

_LINE = re.compile(r"\(([0-9]{1,9})\): (?=.)", re.DOTALL)
_PYTHON_FILES = (".py", ".pyw", ".pyx", ".pxd", ".pxi")
_NO_FILE = re.compile(r"nn\.Module: |<(?:built-in|method|method-wrapper|slot wrapper|class|function|bound method) ")
_WINDOWS = re.compile(r"[A-Za-z]:\\|\\\\|[^/]*\\[^/]*$")

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CodePlace:
    """A function, with the line at which it was, or its first one; 0: unknown. file: "" for one without a file."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return self._with(self.file)

    @property
    def path(self) -> str:
        """Returns the file with "/" between folders, on whatever system it was."""
        return self.file.replace("\\", "/") if _WINDOWS.match(self.file) else self.file

    @property
    def name(self) -> str:
        """Returns "path: function", or the function alone: what patterns of names are searched in."""
        return f"{self.path}: {self.function}" if self.file else self.function

    @property
    def shown(self) -> str:
        """Returns the function's name without the marks of functions inside functions."""
        return self.function.replace(".<locals>", "")

    @property
    def short(self) -> str:
        """Returns the place with the name of the file alone."""
        return self._with(self.path.rpartition("/")[2])

    def _with(self, file: str) -> str:
        line = f":{self.line}" if self.line else ""
        return f"{self.shown} ({file}{line})" if file else self.shown


def code_place(text: str, line: int = 0) -> CodePlace:
    """Returns the place of a function by its name in the trace. line: 0 for that of its definition."""
    found = [] if _NO_FILE.match(text) else [match for match in _LINE.finditer(text) if match.start()]
    ends = (match for match in found if text.endswith(_PYTHON_FILES, 0, match.start()))
    match = next(ends, found[0] if found else None)
    if match is None:
        return CodePlace("", text, 0)
    return CodePlace(text[: match.start()], text[match.end() :], line or int(match[1]))


def function_places(context: Context) -> Mapping[int, CodePlace]:
    """Returns the place of each name (number into Trace.strings) in the table python_function."""
    trace = context.trace
    return {
        number: code_place(trace.strings[number])
        for number in unique_values(trace.table("python_function")["name"]).tolist()
    }


def functions_named(context: Context, pattern: re.Pattern[str]) -> Flags:
    """Tells for each string whether it is a function of the trace in whose CodePlace.name the pattern is found."""
    flags = np.zeros(len(context.trace.strings), np.bool_)
    flags[[number for number, place in context.get(function_places).items() if pattern.search(place.name)]] = True
    return flags
