"""The functions of torch in which the parts of a training step begin, told by their names.

A phase begins in a function of torch: the DataLoader's iterators, the call of a module, backward(), an optimizer. An
optimizer that is given a closure calls the whole step: what runs below the closure is not the optimizer's.
"""

import re
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kineto_trace.model.context import Context
from kineto_trace.structure.python.code_places import function_places
from kineto_trace.structure.python.library_calls import function_kinds


class StepPhase(IntEnum):
    """The parts of a training step on the host. CLOSURE: called by an optimizer, for the loss and its gradients."""

    NONE = 0
    LOADING = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    CLOSURE = 5


_CLOSURE = r": (?:.*\.)?(?:_wrap_)?closure$|: Closure\.__call__$"  # Lightning's, and that of torch's documentation
_BEGINS = (
    (StepPhase.LOADING, r"(?:^|/)torch/utils/data/[^:]*: "),
    (StepPhase.OPTIMIZER, r"(?:^|/)torch/optim/[^:]*: |(?:^|/)torch/amp/grad_scaler\.py: "),
    (
        StepPhase.BACKWARD,
        r"(?:^|/)torch/_tensor\.py: (?:Tensor\.)?backward$"
        r"|(?:^|/)torch/autograd/(?:__init__\.py: (?:backward|grad)$|graph\.py: _engine_run_backward)",
    ),
    (
        StepPhase.FORWARD,
        r"(?:^|/)torch/nn/(?:modules/|functional\.py|parallel/)[^:]*: (?!Module\.(?:_apply|__init__|named_|parameters"
        r"|state_dict|load_state|train|eval|zero_grad|__getattr__|__setattr__|register_))|^nn\.Module: ",
    ),
)


def begun_phases(context: Context) -> npt.NDArray[np.int8]:
    """Returns for each string of the trace the StepPhase that it begins as the name of a Python function."""
    begins = np.zeros(len(context.trace.strings), np.int8)
    user = context.get(function_kinds).user
    for number, place in context.get(function_places).items():
        known = ((StepPhase.CLOSURE, _CLOSURE), *(() if user[number] else _BEGINS))
        begins[number] = next((phase for phase, text in known if re.search(text, place.name)), StepPhase.NONE)
    return begins
