"""The stack sampler leaves the program's objects alone."""

import gc
import weakref
from typing import Iterator, List

import pytest
from kineto_agent.sources.interface import SourceRequest, SourceSession
from kineto_agent.sources.python_stacks import PythonStacksSource
from support.waiting import until


class Tensor:
    """Something whose end can be seen."""


@pytest.fixture
def session() -> Iterator[SourceSession]:
    request = SourceRequest(frozenset(["python_function"]), 1 << 20, {"stack_sample_hz": 1000})
    made = PythonStacksSource().prepare(request)
    yield made
    made.close()


@pytest.fixture
def no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    yield
    if enabled:
        gc.enable()


def wait_for_samples(session: SourceSession) -> None:
    until(lambda: session.counts().records, "samples are taken")


def use_a_tensor(session: SourceSession, seen: List["weakref.ref[Tensor]"]) -> None:
    tensor = Tensor()
    seen.append(weakref.ref(tensor))
    wait_for_samples(session)


def test_locals_of_a_sampled_function_end_with_it(session: SourceSession, no_collection: None) -> None:
    seen: List[weakref.ref[Tensor]] = []
    session.start()
    use_a_tensor(session, seen)
    session.stop()
    assert seen[0]() is None


def test_sampling_leaves_garbage_collection_off_where_it_was_off(session: SourceSession, no_collection: None) -> None:
    session.start()
    wait_for_samples(session)
    session.stop()
    assert not gc.isenabled()


def test_sampling_leaves_garbage_collection_on_where_it_was_on(session: SourceSession) -> None:
    assert gc.isenabled()
    session.start()
    wait_for_samples(session)
    session.stop()
    assert gc.isenabled()


def test_a_free_threaded_interpreter_offers_no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False, raising=False)
    assert PythonStacksSource().activity_types() == []
    monkeypatch.setattr("sys._is_gil_enabled", lambda: True, raising=False)
    assert PythonStacksSource().activity_types() == ["python_function"]
