"""When autograd's thread waits for the GIL. Times in these traces are microseconds."""

from typing import Any

import pytest
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.analysis.idle_pieces import IDLE_CAUSES, gil_wait_time, gil_waits, idle_pieces
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import EVALUATE_FUNCTION
from support.trace_files.traces import START_NS, target, trace

US = 1000
MAIN, AUTOGRAD, OTHER = 1, 2, 3
STEP, STEPS = 40_000, 4
NODE = f"{EVALUATE_FUNCTION}MulBackward0"


def use(thread: int, **counts: int) -> dict[str, int]:
    zero = dict.fromkeys(("python", "running", "waiting", "idle", "has_gil", "cpu_ns"), 0)
    return {"thread": thread, "samples": 100, **zero, **counts}


def row(name: str, start: int, end: int, thread: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "start": start * US, "duration": (end - start) * US, "thread": thread, **more}


def context(
    *,
    waits: int = 20_000,
    node: str = NODE,
    waiting: int = 25,
    has_gil: int = 80,
    seen: str = "torch/autograd/graph.py(9): _engine_run_backward",
    autograd: dict[str, int] | None = None,
) -> Context:
    """Steps of 40 ms, in whose backward a node begins with a wait while the GPU is idle, and then launches a kernel."""
    ops, calls, kernels, python, steps = [], [], [], [], []
    for step in range(STEPS):
        at, launch = step * STEP, step * STEP + 5000 + waits
        steps.append(row(f"ProfilerStep#{step}", at, at + STEP, MAIN, finished=1, id=100 + step))
        ops.append(row(node, at + 5000, launch + 100, AUTOGRAD, finished=1, id=2 * step + 1))
        ops.append(row("MulBackward0", launch, launch + 90, AUTOGRAD, finished=1, id=2 * step + 2))
        calls.append(row("cudaLaunchKernel", launch + 10, launch + 20, AUTOGRAD, correlation=step + 1))
        kernel = row("k", launch + 25, at + STEP, 0, correlation=step + 1)
        kernels.append({name: value for name, value in kernel.items() if name != "thread"})
        python.append(row("train.py(1): forward", at, at + 5000, MAIN, samples=1, self_samples=1, waiting=1))
        python.append(row(seen, at + 5000, at + STEP, MAIN, samples=3, self_samples=3, idle=3, idle_lock=3))
    python.append(row("metrics.py(1): crunch", 0, STEP * STEPS, OTHER, samples=16, self_samples=16, running=16))
    uses = [
        use(MAIN, python=100, running=10, waiting=waiting, idle=65, idle_lock=65),
        {**use(AUTOGRAD, running=10, idle=90, idle_lock=90, cpu_ns=1000 * US), **(autograd or {})},
        use(OTHER, python=100, running=100, has_gil=has_gil),
    ]
    tables = {
        "cpu_op": ops,
        "cuda_runtime": calls,
        "kernel": kernels,
        "python_function": python,
        "user_annotation": steps,
    }
    told = target(thread_use=uses, threads={OTHER: "metrics"})
    return Context(trace(tables, length_ns=STEP * STEPS * US, target=told, sample_period_ns=10_000 * US))


def test_autograd_that_stands_still_while_another_thread_holds_the_gil_waits_for_it() -> None:
    found = context().get(gil_waits)
    assert list(found) == [AUTOGRAD]
    starts = ((found[AUTOGRAD].start - START_NS) // US).tolist()
    assert starts == [5000 + step * STEP for step in range(STEPS)]
    assert found[AUTOGRAD].length() == STEPS * 20_000 * US


@pytest.mark.parametrize(
    "changes",
    [
        {"waits": 4000},  # shorter than a switch interval
        {"node": "aten::big"},  # an operator may compute
        {"waiting": 2},  # nothing else says that somebody wants the GIL
        {"has_gil": 40},  # nobody held it for so long
        {"seen": "train.py(9): other"},  # no backward
        {"autograd": {"cpu_ns": 70_000 * US}},  # it ran
        {"autograd": {"idle_lock": 50}},  # it waited for something else
        {"autograd": {"python": 1}},  # samples of its stack tell
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_without_all_of_the_evidence_nothing_is_said(changes: dict[str, Any]) -> None:
    found = context(**changes)
    assert found.get(gil_waits) == {}
    assert found.get(gil_wait_time).length() == 0


def test_the_gpus_idle_time_in_such_waits_is_the_gils() -> None:
    found = context()
    pieces = found.get(idle_pieces)
    names = [found.trace.strings[name] for name in pieces.name[pieces.cause == IDLE_CAUSES.index("gil")].tolist()]
    assert NODE in names


def test_the_finding_of_the_gil_saves_the_waits_of_autograd_too() -> None:
    told = {each.name: each for each in findings(context()).findings}
    saving = told["gil"].saving_ns / (STEPS * STEP * US)
    assert saving == pytest.approx(0.5 + 0.125, abs=0.03)  # 20 ms of each 40 ms, and 5 ms of the forward
    assert "the thread of the backward pass waits for it 4 times, 80 ms in total" in told["gil"].evidence
    assert "crunch (metrics.py:1) in thread metrics" in told["gil"].title
    assert not [each for each in told if each == "host_gil" and NODE in told[each].title]


def test_waits_of_the_training_thread_while_the_gpu_works_are_not_claimed() -> None:
    """Eight steps of 50 ms: a wait of 10 ms while the GPU works, then 10 ms of an idle GPU, half of it waits."""
    calls, kernels, python, steps = [], [], [], []
    for step in range(8):
        at, waits = step * 50_000, step % 2
        steps.append(row(f"ProfilerStep#{step}", at, at + 50_000, MAIN, finished=1, id=100 + step))
        calls.append(row("cudaLaunchKernel", at + 19_980, at + 19_990, MAIN, correlation=step + 1))
        kernels.append(row("k", at + 20_000, at + 60_000, 0, correlation=step + 1))
        for name, start, end, state in (
            ("train.py(1): wait", 0, 10_000, "waiting"),
            ("train.py(1): wait" if waits else "train.py(5): run", 10_000, 20_000, "waiting" if waits else "running"),
            ("train.py(9): rest", 20_000, 50_000, "running"),
        ):
            count = (end - start) // 10_000
            python.append(row(name, at + start, at + end, MAIN, samples=count, self_samples=count, **{state: count}))
    tables = {
        "cuda_runtime": calls,
        "kernel": [{name: value for name, value in each.items() if name != "thread"} for each in kernels],
        "python_function": python,
        "user_annotation": steps,
    }
    found = Context(trace(tables, length_ns=400_000 * US, sample_period_ns=10_000 * US))
    told = {each.name: each.saving_ns for each in findings(found).findings}
    assert 4 * 9_000 * US <= told["gil"] <= 5 * 10_000 * US  # in the first step the GPU is idle during both waits
