"""What the calls of the training thread are for."""

import pytest
from kineto_trace.analysis.host_findings.loading import loading
from kineto_trace.analysis.host_findings.torch_use import compilation, optimizer
from kineto_trace.analysis.host_findings.user_code import user_code
from kineto_trace.analysis.host_time.moment_classes import Class, moment_classes
from support.trace_files.sampled_stacks import FORWARD, MAIN, SITE, TORCH, Stack, sampled

FINDS, RUNS = "<frozen importlib._bootstrap>(1349): _find_and_load", "<frozen importlib._bootstrap>(480): _call"
MAKES_OPTIMIZER = (*MAIN, TORCH + "optim/sgd.py(30): SGD.__init__", TORCH + "_compile.py(20): inner")
CONVERTS, RESETS = TORCH + "_dynamo/convert_frame.py(9): _compile", TORCH + "__init__.py(2400): compile"
COMPILERS = [
    TORCH + "_dynamo/convert_frame.py(1): <module>",
    TORCH + "_inductor/pattern_matcher.py(1): register",
    TORCH + "fx/graph.py(1): Graph",
    TORCH + "autograd/anomaly_mode.py(1): <module>",
    SITE + "triton/compiler/compiler.py(1): <module>",
    SITE + "jax/_src/compiler.py(1): <module>",
]
PHASES = [
    TORCH + "utils/data/dataloader.py(1): <module>",
    TORCH + "nn/modules/linear.py(1): Linear",
    TORCH + "optim/adam.py(1): <module>",
    TORCH + "autograd/graph.py(1): <module>",
]


def classes(stack: Stack) -> list[Class]:
    return [Class(kind) for kind in sampled([stack] * 3).get(moment_classes).kind.tolist()]


@pytest.mark.parametrize("imported", [*COMPILERS, *PHASES])
def test_what_runs_below_an_import_is_importing_whatever_is_imported(imported: str) -> None:
    samples = [*[(*MAIN, FINDS, RUNS, imported)] * 2, *[FORWARD] * 8] * 10
    (finding,) = user_code(context := sampled(samples, steps=10))
    assert finding.title == "_find_and_load, called in main (train.py:42) imports modules"
    assert [*compilation(context), *loading(context), *optimizer(context)] == []


def test_modules_that_a_library_imports_when_it_is_called_first_are_imported_there() -> None:
    (finding,) = user_code(sampled([*[(*MAKES_OPTIMIZER, FINDS, COMPILERS[0])] * 20, *[FORWARD] * 80]))
    assert finding.name == "user_code_import"


def test_modules_that_the_call_of_torch_compile_imports_are_not_compiled() -> None:
    assert classes((*MAIN, RESETS, FINDS, COMPILERS[0])) == [Class.OTHER] * 3
    assert classes((*MAIN, RESETS)) == [Class.COMPILE] * 3


def test_an_import_inside_a_compilation_belongs_to_it() -> None:
    assert classes((*MAIN, CONVERTS, FINDS, RUNS, COMPILERS[1])) == [Class.COMPILE] * 3


def test_the_users_module_that_is_imported_may_compile_and_train() -> None:
    runs = (*MAIN, FINDS, RUNS, "/job/experiment.py(1): <module>")
    assert classes((*runs, CONVERTS)) == [Class.COMPILE] * 3
    assert classes((*runs, *FORWARD[2:])) == [Class.FORWARD] * 3
