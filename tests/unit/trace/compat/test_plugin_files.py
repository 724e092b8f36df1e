"""What the plug-in's figures owe to how a file says things: texts for threads, missing arguments, doubles."""

from typing import Any

import numpy as np
from kineto_trace.analysis.distributed.distributed_views import RankDevices, distributed_devices
from kineto_trace.analysis.host_time.operator_views import operators
from kineto_trace.analysis.kernels.kernel_views import kernels_by_op
from kineto_trace.analysis.memory_views import memory_curve, memory_events, memory_peak, memory_statistics
from kineto_trace.analysis.overview.overview_views import gpu_summary, gpu_utilization, sm_efficiency
from kineto_trace.compat.plugin_distributed_views import plugin_rank
from kineto_trace.compat.plugin_kernels import TickClock, plugin_sm_efficiency
from kineto_trace.compat.plugin_tree import microseconds
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.view_api.view import Compat
from support.trace_files.chrome_files import event, load_events

PLUGIN = Compat.PLUGIN
GPU = {
    "id": 0,
    "name": "T4",
    "totalGlobalMem": 1000,
    "computeMajor": 7,
    "computeMinor": 5,
    "numSms": 10,
    "warpSize": 32,
}


def op(name: str, ts: float, dur: float, number: int, **changes: Any) -> dict[str, Any]:
    return event("cpu_op", name, ts, dur, **{"pid": 1, "tid": 7, "args": {"External id": number}, **changes})


def record(ts: float, size: int, address: int | None = None, kind: int = 1, tid: Any = 7) -> dict[str, Any]:
    args = {"Bytes": size, "Device Type": kind, "Device Id": kind - 1, "Total Allocated": 64, "Total Reserved": 64}
    if address is not None:
        args["Addr"] = address
    return {
        "ph": "i",
        "s": "t",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "pid": 1,
        "tid": tid,
        "ts": ts,
        "args": args,
    }


def kernel(ts: float, dur: float, correlation: int, **args: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": 7, "correlation": correlation, "External id": correlation, **args}
    return event("kernel", "k", ts, dur, pid=0, tid=7, args=args)


def launch(ts: float, correlation: int) -> dict[str, Any]:
    args = {"correlation": correlation, "External id": correlation}
    return event("cuda_runtime", "cudaLaunchKernel", ts, 1, pid=1, tid=7, args=args)


def counted(trace: Trace, compat: Compat) -> list[tuple[str, int]]:
    rows = memory_statistics(Context(trace), compat=compat).rows()
    return [(row["operator"], row["allocation_count"]) for row in rows]


def test_a_thread_as_a_text_is_the_thread_with_that_number() -> None:
    trace = load_events(op("aten::mm", 0, 10, 1, tid="7"), record(5, 64))
    assert trace.table("cpu_op")["thread"].tolist() == trace.table("cpu_instant_event")["thread"].tolist() == [7]
    assert counted(trace, Compat.NONE) == counted(trace, PLUGIN) == [("aten::mm", 1)]


def test_the_plug_in_finds_no_operator_for_a_record_whose_thread_is_a_text() -> None:
    trace = load_events(op("aten::mm", 0, 10, 1), record(5, 64, tid="7"))
    assert counted(trace, Compat.NONE) == [("aten::mm", 1)]
    assert counted(trace, PLUGIN) == []


def test_the_same_text_in_two_processes_is_two_threads() -> None:
    trace = load_events(op("a", 0, 1, 1, tid="7"), op("b", 0, 1, 2, pid=2, tid="7"))
    assert len(set(trace.table("cpu_op")["thread"].tolist())) == 2


def test_without_addresses_nothing_says_which_release_belongs_to_which_allocation() -> None:
    context = Context(load_events(op("aten::mm", 0, 10, 1), record(5, 64), record(6, -64)))
    for compat in (Compat.NONE, PLUGIN):
        assert memory_events(context, compat=compat).rows() == []
    assert "no address" in memory_events(context).notes[0]
    assert memory_curve(context, compat=PLUGIN).rows() == []
    assert len(memory_curve(context)) == 2
    (row,) = memory_peak(context).rows()
    assert (row["operator"], row["held_bytes"], row["held_pct"]) == (None, 64, 100)


def test_the_plug_in_pairs_by_address_whatever_the_device() -> None:
    context = Context(load_events(op("aten::mm", 0, 10, 1), record(5, 64, 16, kind=1), record(6, -32, 16, kind=0)))
    (row,) = memory_events(context, compat=PLUGIN).rows()
    assert (row["device"], row["operator"], row["size_bytes"], row["duration_us"]) == ("GPU0", "aten::mm", 32, 1)
    assert len(memory_events(context)) == 2


def test_the_plug_in_shows_none_for_a_launch_shape_that_the_file_does_not_tell() -> None:
    trace = load_events(
        op("aten::mm", 0, 10, 1), launch(1, 1), kernel(20, 5, 1), launch(3, 2), op("b", 2, 5, 2),
        kernel(30, 5, 2, grid=[0, 0, 0], block=[32, 1, 1]),
    )  # fmt: skip
    rows = kernels_by_op(Context(trace), compat=PLUGIN).rows()
    assert [(row["op"], row["grid"], row["block"]) for row in rows] == [
        ("aten::mm", "None", "None"),
        ("b", "[0, 0, 0]", "[32, 1, 1]"),
    ]


def test_the_plug_in_has_launch_figures_only_where_the_file_says_them() -> None:
    shape = {"grid": [5, 1, 1], "block": [32, 1, 1], "registers per thread": 16, "shared memory": 0}
    limits = {
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerMultiprocessor": 1024,
        "regsPerBlock": 65536,
        "regsPerMultiprocessor": 65536,
        "sharedMemPerMultiprocessor": 65536,
    }
    trace = load_events(
        op("aten::mm", 0, 10, 1), launch(1, 1), kernel(0, 10, 1, **shape), deviceProperties=[GPU | limits]
    )
    (right,), (plugin,) = gpu_summary(Context(trace)).rows(), gpu_summary(Context(trace), compat=PLUGIN).rows()
    assert (right["sm_efficiency_pct"], plugin["sm_efficiency_pct"]) == (50, None)
    assert sm_efficiency(Context(trace), compat=PLUGIN).rows() == []


def test_the_plug_in_sees_a_hint_of_kernels_that_have_ended() -> None:
    start, end = np.array([0, 1, 30]), np.array([10, 20, 40])
    course = plugin_sm_efficiency(np.array([0.1, 0.2, 0.5]), start, end)  # 0.1 + 0.2 - 0.1 - 0.2 is 5.6e-17
    assert list(zip(course.start.tolist(), course.end.tolist(), strict=True)) == [
        (0, 1),
        (1, 10),
        (10, 20),
        (20, 30),
        (30, 40),
    ]
    assert 0 < course.value[3] < 1e-16


def test_the_plug_in_s_buckets_have_the_precision_of_doubles() -> None:
    base = 1_700_000_000_000_000.0  # us: doubles there are 0.25 apart
    spans = event("Trace", "PyTorch Profiler (0)", base, 200, pid=0, tid=0)
    running = event("kernel", "k", base, 1.1, pid=0, tid=7, args={"device": 0})
    trace = load_events(op("a", base, 1, 1), spans, running, baseTimeNanoseconds=0)
    plugin, right = gpu_utilization(Context(trace), compat=PLUGIN).rows(), gpu_utilization(Context(trace)).rows()
    assert (plugin[0]["utilization_pct"], right[0]["utilization_pct"]) == (10, 11)
    assert (plugin[0]["start_ns"], plugin[0]["duration_us"]) == (1_700_000_000_000_000_000, 10)


def test_times_are_the_doubles_nearest_to_what_the_file_says() -> None:
    times = np.array([1_312, -1_312, 4_306_452_651_095_381, 1_712_195_495_506_752_875])
    assert microseconds(times).tolist() == [1.312, -1.312, 4306452651095.381, 1712195495506752.875]
    assert TickClock(5, 1 << 10).unix_ns(np.array([1024, 512, -512])).tolist() == [1005, 505, -495]


def devices(worker: str, rank: int) -> tuple[int, RankDevices]:
    events = [kernel(0, 1, 1), event("kernel", "k", 0, 1, pid=5, tid=7, args={"device": 5})]
    context = Context(load_events(*events, deviceProperties=[GPU]), rank=rank, worker=worker)
    return rank, distributed_devices.partial(context, compat=PLUGIN)


def test_the_plug_in_takes_machine_and_process_from_the_name_of_the_file() -> None:
    partials = [devices("node-1_4711", 0), devices("worker0", 1), devices("another", 2)]
    rows = distributed_devices.combine(partials, compat=PLUGIN).rows()
    assert [(row["host"], row["process"]) for row in rows] == [("node-1", 4711), ("worker0", 1), ("another", 0)]
    assert [(row["device"], row["compute_capability"]) for row in rows] == [(0, "7.5")] * 3  # GPU 5 has no properties


def test_collectives_without_an_external_id_are_one_for_the_plug_in() -> None:
    rank = plugin_rank(
        Context(
            load_events(
                op("nccl:all_reduce", 0, 10, 1, args={}),
                op("nccl:broadcast", 20, 10, 1, args={}),
                op("nccl:reduce", 40, 10, 3),
                op("nccl:all_gather", 60, 10, 3),
                event("kernel", "k", 100, 5, pid=0, tid=7, args={"device": 0}),
            )
        )
    )
    assert rank.name == ("nccl:broadcast", "nccl:all_gather")
    assert list(zip(rank.node.tolist(), rank.end.tolist(), strict=True)) == [(0, 30), (0, 105), (1, 70)]


def test_lightning_s_modules_go_by_their_names_alone() -> None:
    trace = load_events(
        op("[pl][module]torch.nn.Linear: net.0", 0, 10, 1),
        launch(1, 1),
        kernel(20, 5, 1),
        Framework="pytorch-lightning",
    )
    (row,) = kernels_by_op(Context(trace), compat=PLUGIN).rows()
    assert row["op"] == "net.0"


def test_the_plug_in_sorts_by_host_time_where_all_kernels_communicate() -> None:
    trace = load_events(op("nccl:all_reduce", 0, 10, 1), launch(1, 1), kernel(20, 5, 1), op("b", 20, 90, 2))
    assert [row["name"] for row in operators(Context(trace), compat=PLUGIN).rows()] == ["b", "nccl:all_reduce"]


def test_a_kernel_that_does_not_say_its_gpu_counts_for_none_in_the_plug_in() -> None:
    trace = load_events(op("a", 0, 100, 1), event("kernel", "k", 0, 50, pid=0, tid=7, args={}))
    assert [row["utilization_pct"] for row in gpu_summary(Context(trace)).rows()] == [50]
    assert (
        gpu_summary(Context(trace), compat=PLUGIN).rows() == gpu_utilization(Context(trace), compat=PLUGIN).rows() == []
    )
