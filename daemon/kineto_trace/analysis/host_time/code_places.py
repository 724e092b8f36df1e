"""Whose code a Python function is, where it is, and what part of a training step it begins: told by its name.

Theory of operation
    A function of the trace is called "file(first line): name". structure/python/python_frames.py tells which files are
    of libraries; all others are the user's own. Functions without a file ("<built-in method sleep …>") belong to
    nobody.

    A phase begins in a function of torch: the DataLoader's iterators, the call of a module, backward(), an optimizer.
"""

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kineto_trace.model.context import Context
from kineto_trace.structure.python.python_frames import library_kind

FRAME = re.compile(r"^(?P<file>[^()]+)\((?P<line>\d+)\): (?P<name>.+)$", re.DOTALL)

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int8]


class StepPhase(IntEnum):
    """The parts of a training step on the host."""

    NONE = 0
    LOADING = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4


_BEGINS = (
    (StepPhase.LOADING, r"(?:^|/)torch/utils/data/[^:]*: "),
    (StepPhase.OPTIMIZER, r"(?:^|/)torch/optim/[^:]*: |(?:^|/)torch/amp/grad_scaler\.py[^:]*: "),
    (
        StepPhase.BACKWARD,
        r"(?:^|/)torch/_tensor\.py[^:]*: (?:Tensor\.)?backward$"
        r"|(?:^|/)torch/autograd/(?:__init__\.py[^:]*: (?:backward|grad)$|graph\.py[^:]*: _engine_run_backward)",
    ),
    (
        StepPhase.FORWARD,
        r"(?:^|/)torch/nn/(?:modules/|functional\.py|parallel/)[^:]*: (?!Module\.(?:_apply|__init__|named_|parameters"
        r"|state_dict|load_state|train|eval|zero_grad|__getattr__|__setattr__|register_))|^nn\.Module: ",
    ),
)


@dataclass(frozen=True, slots=True)
class CodeNames:
    """One value per string of the trace. user: the name of a function in the user's code. begins: a StepPhase."""

    user: Flags
    begins: Numbers


def code_names(context: Context) -> CodeNames:
    """Tells for each string what it is as the name of a Python function."""
    strings = context.trace.strings
    user, begins = np.zeros(len(strings), np.bool_), np.zeros(len(strings), np.int8)
    patterns = [(phase, re.compile(text)) for phase, text in _BEGINS]
    for number in np.unique(context.trace.table("python_function")["name"]).tolist():
        text = strings[number]
        user[number] = is_user_code(text)
        if not user[number]:
            begins[number] = next((phase for phase, pattern in patterns if pattern.search(text)), StepPhase.NONE)
    return CodeNames(user, begins)


def is_user_code(text: str) -> bool:
    """Tells whether a function of this name is in the user's own code."""
    return library_kind(text) is None and FRAME.match(text) is not None


@dataclass(frozen=True, slots=True)
class CodePlace:
    """A function, with the line at which it was; 0: unknown."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return self._with(self.file)

    @property
    def short(self) -> str:
        """Returns the place with the name of the file alone."""
        return self._with(self.file.rpartition("/")[2])

    def _with(self, file: str) -> str:
        line = f":{self.line}" if self.line else ""
        return f"{self.function} ({file}{line})" if file else self.function


def place_of(text: str, line: int = 0) -> CodePlace:
    """Returns the place of a function by its name in the trace. line: 0 for that of its definition."""
    found = FRAME.match(text)
    if found is None:
        return CodePlace("", text, 0)
    return CodePlace(found["file"], found["name"].replace(".<locals>", ""), line or int(found["line"]))
