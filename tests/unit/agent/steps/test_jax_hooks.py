"""The steps that a program marks for JAX's profiler are iterations."""

import sys
from types import ModuleType
from typing import Any, Iterator

import pytest
from kineto_agent.steps.counting import StepCounter
from kineto_agent.steps.jax_hooks import JaxStepHooks

NAME = "jax._src.profiler"


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As much of jax._src.profiler as is hooked."""

    class StepTraceAnnotation:
        def __init__(self, name: str, **kwargs: Any) -> None:
            if name == "fail":
                raise ValueError(name)
            self.kwargs = kwargs

    module: Any = ModuleType(NAME)
    module.StepTraceAnnotation = StepTraceAnnotation
    monkeypatch.setitem(sys.modules, NAME, module)
    before = StepTraceAnnotation.__init__
    yield module
    assert StepTraceAnnotation.__init__ is before


def test_marked_steps_count_and_the_annotation_is_as_it_was(jax: Any) -> None:
    counter = StepCounter()
    hooks = JaxStepHooks(counter)
    hooks.install()
    for number in range(3):
        assert jax.StepTraceAnnotation("train", step_num=number).kwargs == {"step_num": number}
    assert counter.count == 3
    hooks.remove()
    jax.StepTraceAnnotation("train", step_num=4)
    assert counter.count == 3


def test_steps_of_two_names_are_not_added(jax: Any) -> None:
    counter = StepCounter()
    hooks = JaxStepHooks(counter)
    hooks.install()
    for _ in range(4):
        jax.StepTraceAnnotation("train")
    jax.StepTraceAnnotation(name="without a position")
    hooks.remove()
    assert counter.count == 4


def test_a_step_that_is_not_made_does_not_count(jax: Any) -> None:
    counter = StepCounter()
    hooks = JaxStepHooks(counter)
    hooks.install()
    with pytest.raises(ValueError, match="fail"):
        jax.StepTraceAnnotation("fail")
    hooks.remove()
    assert counter.count == -1


def test_without_jax_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    meta_path = list(sys.meta_path)
    hooks = JaxStepHooks(StepCounter())
    hooks.install(wait_for_import=False)
    assert sys.meta_path == meta_path
    hooks.install()
    assert len(sys.meta_path) == len(meta_path) + 1
    hooks.remove()
    assert sys.meta_path == meta_path
