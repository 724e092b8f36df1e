"""How the plug-in moves backward operators below modules, and what its figures owe to that."""

from typing import Any

from kineto_trace.analysis.host_time.operator_views import operators
from kineto_trace.analysis.kernels.kernel_views import kernels_by_op
from kineto_trace.analysis.memory_views import memory_events, memory_statistics
from kineto_trace.compat.plugin_backward import plugin_backward
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.view_api.view import Compat
from support.trace_files.chrome_files import event, load_events

Event = dict[str, Any]
EVALUATE = "autograd::engine::evaluate_function: MulBackward0"


def op(name: str, ts: float, dur: float, number: int, tid: int = 1) -> Event:
    return event("cpu_op", name, ts, dur, tid=tid, args={"External id": number})


def module(name: str, ts: float, dur: float, number: int) -> Event:
    args = {"Python id": number, "Python parent id": None, "Python module id": number}
    return event("python_function", f"nn.Module: {name}", ts, dur, tid=1, args=args)


def link(forward: float, backward: float, tid: int = 2) -> list[Event]:
    ends = (("s", 1, forward), ("f", tid, backward))
    common = {"id": 1, "pid": 1, "cat": "fwdbwd", "name": "fwdbwd"}
    return [{**common, "ph": phase, "tid": at, "ts": ts} for phase, at, ts in ends]


def gemm(ts: float, number: int, tid: int) -> list[Event]:
    """A kernel for tensor cores, launched by the operator with that external id."""
    args = {"correlation": number, "External id": number}
    call = event("cuda_runtime", "cudaLaunchKernel", ts, 1, tid=tid, args=args)
    return [call, event("kernel", "s1688gemm", ts + 500, 5, pid=0, tid=7, args={**args, "device": 0, "stream": 7})]


def record(ts: float, size: int, address: int = 16) -> Event:
    args = {"Bytes": size, "Device Type": 0, "Device Id": -1, "Addr": address}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts, "args": args}


# Thread 1: module L 0…50 > relu 5…10, then mul 200…220. Thread 2: evaluate_function 60…80 > mul 62…70.
FORWARD = [module("L", 0, 50, 0), op("aten::relu", 5, 5, 1), op("aten::mul", 200, 20, 2)]
BACKWARD = [op(EVALUATE, 60, 20, 3, 2), op("aten::mul", 62, 8, 4, 2), *link(5, 62)]


def statistics(trace: Trace) -> dict[str, tuple[int, int, int]]:
    """Of each operator: calls, allocated in all, allocated by itself."""
    rows = memory_statistics(Context(trace), compat=Compat.PLUGIN).rows()
    return {row["operator"]: (row["calls"], row["allocation_bytes"], row["self_allocation_bytes"]) for row in rows}


def test_the_call_that_comes_first_where_backward_operators_hang_tells_what_is_eligible() -> None:
    trace = load_events(*FORWARD, *BACKWARD, *gemm(205, 2, 1))
    rows = {row["name"]: row for row in operators(Context(trace), compat=Compat.PLUGIN).rows()}
    assert (rows["aten::mul"]["calls"], rows["aten::mul"]["tensor_core_eligible"]) == (2, False)
    alone = load_events(*FORWARD, *BACKWARD[:2], *gemm(205, 2, 1))  # without a link the thread of the module is first
    rows = {row["name"]: row for row in operators(Context(alone), compat=Compat.PLUGIN).rows()}
    assert rows["aten::mul"]["tensor_core_eligible"] is True


def test_a_record_in_the_time_of_a_backward_node_goes_to_its_operators() -> None:
    assert statistics(load_events(*FORWARD, *BACKWARD, record(63, 64))) == {
        EVALUATE: (1, 64, 0),
        "aten::mul": (2, 64, 64),
    }


def test_sums_inside_of_what_hangs_twice_are_added_once_more() -> None:
    # relu has a child that starts with it: evaluate_function comes twice. mul: 64, then 128 in all; around it 64 + 128
    twice = load_events(*FORWARD, op("aten::clamp", 5, 2, 9), *BACKWARD, record(63, 64))
    assert statistics(twice) == {EVALUATE: (2, 192, 0), "aten::mul": (3, 128, 64)}


def test_a_module_without_a_backward_of_its_own_hides_what_comes_after_its_first_operator_begins() -> None:
    # N.backward has the times of N, 100…150; it hangs in aten::add 105…110 and lasts beyond it
    other = [module("N", 100, 50, 1), op("aten::add", 105, 5, 5), op("aten::sub", 120, 20, 6)]
    trace = load_events(*FORWARD, *other, *BACKWARD, record(106, 64), record(125, 32, 32), record(210, 8, 48))
    moved = plugin_backward(Context(trace))
    assert (moved.start.tolist(), moved.end.tolist()) == ([60, 100], [80, 150])
    assert statistics(trace) == {"aten::mul": (1, 8, 8)}
    rows = memory_events(Context(trace), compat=Compat.PLUGIN).rows()
    assert [row["operator"] for row in rows] == ["<unknown>", "<unknown>", "aten::mul"]


def test_calls_of_a_thread_whose_operators_all_moved_are_lost() -> None:
    launch, kernel = gemm(65, 7, 2)
    launch["args"]["External id"] = 0
    names = [
        row["op"]
        for row in kernels_by_op(Context(load_events(*FORWARD, *BACKWARD, launch, kernel)), compat=Compat.PLUGIN).rows()
    ]
    assert names == []
    alone = load_events(*FORWARD, *BACKWARD[:2], launch, kernel)
    assert [row["op"] for row in kernels_by_op(Context(alone), compat=Compat.PLUGIN).rows()] == ["CallTreeRoot"]
