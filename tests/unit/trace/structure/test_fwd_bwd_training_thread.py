from typing import Any

from kineto_trace.model.context import Context
from kineto_trace.structure.fwd_bwd import NO_THREAD, training_thread
from support.trace_files.traces import trace

US = 1000


def row(name: str, start: int, end: int, thread: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "start": start * US, "duration": (end - start) * US, "thread": thread, "finished": 1, **more}


def of(**tables: list[dict[str, Any]]) -> int:
    return Context(trace(tables)).get(training_thread)


def step(number: int, thread: int, **more: Any) -> dict[str, Any]:
    return row(f"ProfilerStep#{number}", 100 * number, 100 * number + 90, thread, **more)


STEPS = [step(1, 7), step(2, 7), step(3, 8)]
OPERATORS = [row("aten::mm", 0, 40, 5), *[row("aten::add", at, at + 1, 6) for at in range(50, 60)]]
BACKWARD = [
    row("autograd::engine::evaluate_function: MmBackward0", 0, 80, 9),
    row("MmBackward0", 1, 79, 9, forward_thread=1),
]
LAUNCHES = [row("cudaLaunchKernel", 10 * number, 10 * number + 1, 4, correlation=number) for number in (1, 2, 3)]
KERNELS = [row("k", 10 * number + 2, 10 * number + 4, 0, correlation=number, device=0) for number in (1, 2, 3)]
PYTHON = [row("a.py(1): f", 0, 100, 2, parent=-1), row("a.py(2): g", 0, 100, 3, parent=-1)]


def test_the_thread_of_most_steps_trains_whatever_other_threads_compute() -> None:
    assert of(user_annotation=STEPS, cpu_op=OPERATORS, python_function=PYTHON) == 7


def test_steps_that_were_recorded_as_a_whole_come_first() -> None:
    cut = [step(1, 8, finished=0), step(2, 8, finished=0), step(3, 7)]
    assert of(user_annotation=cut) == 7
    assert of(user_annotation=cut[:2]) == 8


def test_without_steps_the_thread_with_most_time_in_operators_trains() -> None:
    assert of(cpu_op=OPERATORS, cuda_runtime=LAUNCHES, kernel=KERNELS, python_function=PYTHON) == 5


def test_a_thread_of_autograd_does_not_train() -> None:
    assert of(cpu_op=OPERATORS + BACKWARD) == 5


def test_without_operators_the_thread_that_launches_most_trains() -> None:
    other = row("cudaLaunchKernel", 60, 61, 3, correlation=9)
    kernel = row("k", 62, 70, 0, correlation=9, device=0)
    assert of(cuda_runtime=[other, *LAUNCHES], kernel=[kernel, *KERNELS], python_function=PYTHON) == 4


def test_with_python_alone_the_thread_that_was_busy_trains() -> None:
    sampled = [
        row("a.py(1): f", 0, 100, 2, samples=10, self_samples=10, idle=9),
        row("a.py(2): g", 0, 100, 3, samples=4, self_samples=4),
    ]
    assert of(python_function=sampled) == 3


def test_of_recorded_calls_only_the_outermost_count() -> None:
    inner = [row("a.py(3): h", 0, 60, 3), row("a.py(4): i", 0, 60, 3)]
    assert of(python_function=[row("a.py(1): f", 0, 100, 2), row("a.py(2): g", 0, 60, 3), *inner]) == 2


def test_a_trace_without_threads_has_none() -> None:
    assert of() == NO_THREAD
