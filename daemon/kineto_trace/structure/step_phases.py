"""The functions of torch and Keras in which the parts of a training step begin, by name.

Theory of operation
    A phase begins in a library's function: the DataLoader's iterators, the call of a module, backward(), an optimizer.
    An optimizer that is given a closure calls the whole step: what runs below the closure is not the optimizer's. A
    checkpoint computes its part of the forward again, inside the backward.
"""

import re
from enum import IntEnum

import numpy as np

from kineto_trace.base.array_types import Ints8
from kineto_trace.model.context import Context
from kineto_trace.structure.library_calls import function_kinds, function_places

_CLOSURE = r": (?:.*\.)?(?:_wrap_)?closure$|: Closure\.__call__$"  # Lightning's, and that of torch's documentation
_NO_OPTIMIZER = r"(?!\w+\.(?:__|state_dict|load_state|register_))"
_NO_FORWARD = (
    r"(?!\w+\.(?:__(?!call__)|_apply|_?named_|parameters|buffers|children|modules|state_dict|load_state|_save_to|_load_from"
    r"|train$|eval$|to$|zero_grad|requires_grad|register_)|Parameter(?:Dict|List)\.)"
)


class StepPhase(IntEnum):
    """The parts of a training step on the host.

    CLOSURE: called by an optimizer, for the loss and its gradients. RECOMPUTATION: the forward again, in the backward.
    """

    NONE = 0
    LOADING = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    CLOSURE = 5
    RECOMPUTATION = 6


_BEGINS = (
    (
        StepPhase.LOADING,
        r"(?:^|/)torch/utils/data/[^:]*: |(?:^|/)keras/(?:[^:]*/)?(?:epoch_iterator\.py|data_adapters/[^:]*): ",
    ),
    (
        StepPhase.OPTIMIZER,
        rf"(?:^|/)torch/optim/[^:]*: {_NO_OPTIMIZER}|(?:^|/)torch/amp/grad_scaler\.py: "
        r"|(?:^|/)keras/(?:[^:]*/)?optimizers/[^:]*: .*(?:apply|step)\w*$",
    ),
    (
        StepPhase.BACKWARD,
        r"(?:^|/)torch/_tensor\.py: (?:Tensor\.)?backward$"
        r"|(?:^|/)torch/autograd/(?:__init__\.py: (?:backward|grad)$|graph\.py: _engine_run_backward)",
    ),
    (StepPhase.RECOMPUTATION, r"(?:^|/)torch/utils/checkpoint\.py: (?:.*\.)?(?:unpack_hook|recompute_fn|backward)$"),
    (
        StepPhase.FORWARD,
        rf"(?:^|/)torch/nn/(?:modules/|functional\.py|parallel/)[^:]*: {_NO_FORWARD}|^nn\.Module: ",
    ),
)


def phases_by_name(context: Context) -> Ints8:
    """Returns for each string of the trace the StepPhase that it begins as the name of a Python function."""
    begins = np.zeros(len(context.trace.strings), np.int8)
    user = context.get(function_kinds).user
    for number, place in context.get(function_places).items():
        known = ((StepPhase.CLOSURE, _CLOSURE), *(() if user[number] else _BEGINS))
        begins[number] = next((phase for phase, text in known if re.search(text, place.name)), StepPhase.NONE)
    return begins
