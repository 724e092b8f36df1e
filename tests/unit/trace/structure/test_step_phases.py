"""Which functions begin a part of a training step."""

import pytest
from kineto_trace.model.context import Context
from kineto_trace.structure.step_phases import StepPhase, phases_by_name
from support.trace_files.sampled_stacks import SITE, TORCH
from support.trace_files.traces import trace

KERAS = SITE + "keras/src/"
CHECKPOINT = TORCH + "utils/checkpoint.py(1): "


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        (TORCH + "nn/modules/module.py(1): Module._call_impl", StepPhase.FORWARD),
        (TORCH + "nn/modules/module.py(1): Module.__call__", StepPhase.FORWARD),
        (TORCH + "nn/modules/conv.py(1): Conv2d.forward", StepPhase.FORWARD),
        (TORCH + "nn/functional.py(1): relu", StepPhase.FORWARD),
        (TORCH + "nn/modules/module.py(1): Module.__dir__", StepPhase.NONE),
        (TORCH + "nn/modules/module.py(1): Module.modules", StepPhase.NONE),
        (TORCH + "nn/modules/container.py(1): ParameterDict.update", StepPhase.NONE),
        (TORCH + "nn/modules/linear.py(1): Linear.__init__", StepPhase.NONE),
        (TORCH + "optim/optimizer.py(1): Optimizer.profile_hook_step.<locals>.wrapper", StepPhase.OPTIMIZER),
        (TORCH + "optim/adamw.py(1): adamw", StepPhase.OPTIMIZER),
        (TORCH + "optim/optimizer.py(1): Optimizer.state_dict", StepPhase.NONE),
        (KERAS + "backend/torch/optimizers/torch_adam.py(1): Adam._parallel_update_step", StepPhase.OPTIMIZER),
        (KERAS + "optimizers/base_optimizer.py(1): BaseOptimizer.apply", StepPhase.OPTIMIZER),
        (KERAS + "optimizers/base_optimizer.py(1): BaseOptimizer.save_own_variables", StepPhase.NONE),
        (KERAS + "trainers/epoch_iterator.py(1): EpochIterator.__iter__", StepPhase.LOADING),
        (CHECKPOINT + "_checkpoint_hook.__init__.<locals>.unpack_hook", StepPhase.RECOMPUTATION),
        (CHECKPOINT + "recompute_fn", StepPhase.RECOMPUTATION),
        (CHECKPOINT + "CheckpointFunction.backward", StepPhase.RECOMPUTATION),
        (CHECKPOINT + "CheckpointFunction.forward", StepPhase.NONE),
        ("/job/train.py(1): main.<locals>.closure", StepPhase.CLOSURE),
        (SITE + "lightning/pytorch/loops/optimization/automatic.py(1): Closure.__call__", StepPhase.CLOSURE),
        ("/job/optim/optimizers/own.py(1): Own.step", StepPhase.NONE),
    ],
)
def test_functions_begin_the_parts_of_a_step(name: str, phase: StepPhase) -> None:
    context = Context(trace({"python_function": [{"name": name, "start": 0, "duration": 1}]}))
    begun = context.get(phases_by_name)[context.trace.strings.index(name)]
    assert StepPhase(int(begun)) == phase
