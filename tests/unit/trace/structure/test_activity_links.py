from kineto_trace.analysis.kernels.kernel_views import kernels_by_op
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import NOTHING, call_owners, owners
from support.trace_files.traces import trace


def made() -> Context:
    calls = [
        {"name": "cudaLaunchKernel", "start": at, "duration": 5, "thread": 1, "correlation": at} for at in (20, 60, 90)
    ]
    kernels = [{"name": f"k{at}", "start": at + 100, "duration": 7, "correlation": at} for at in (20, 60, 90)]
    annotations = [
        {"name": "ProfilerStep#1", "start": 0, "duration": 80, "thread": 1, "id": 2, "finished": 1},
        {"name": "Optimizer.step#FusedAdam.step", "start": 50, "duration": 30, "thread": 1, "id": 3, "finished": 1},
        {"name": "of another thread", "start": 85, "duration": 30, "thread": 2, "id": 4, "finished": 1},
    ]
    ops = [{"name": "aten::mm", "start": 10, "duration": 30, "thread": 1, "id": 1, "finished": 1}]
    return Context(trace({"cuda_runtime": calls, "kernel": kernels, "user_annotation": annotations, "cpu_op": ops}))


def test_what_no_op_launched_belongs_to_the_innermost_annotation_of_its_thread() -> None:
    context = made()
    for found in (context.get(owners), context.get(call_owners)):
        names = [context.trace.strings[number] if number != NOTHING else None for number in found.tolist()]
        assert names == ["aten::mm", "Optimizer.step#FusedAdam.step", None]
    assert sorted((row["name"], row["op"]) for row in kernels_by_op(context).rows()) == [
        ("k20", "aten::mm"),
        ("k60", "Optimizer.step#FusedAdam.step"),
        ("k90", None),
    ]


def test_a_trace_without_anything_has_no_owners() -> None:
    assert len(Context(trace({})).get(owners)) == 0
