from kineto_trace.decode.activity_names import ACTIVITY_BUFFER_REQUEST
from kineto_trace.decode.time_window import apply_window, drop_trailing_requests, whole_extent
from kineto_trace.model.trace import NO_ROW, StringTable
from support.counters.trace_samples import sample
from support.trace_files.traces import START_NS, table

KERNELS = [
    {"start": 0, "duration": 10, "correlation": 1},
    {"start": 5, "duration": 10, "correlation": 2},
    {"start": 30, "duration": 10, "correlation": 3},
    {"start": 40, "duration": 10, "correlation": 4},
]
CALLS = [{"start": time, "duration": 1, "correlation": number} for number, time in ((1, 0), (2, 3), (3, 20), (4, 25))]


def test_keeps_what_overlaps_and_the_calls_that_caused_it() -> None:
    strings = StringTable()
    tables = {"kernel": table("kernel", KERNELS, strings), "cuda_runtime": table("cuda_runtime", CALLS, strings)}
    kept, outside = apply_window(tables, START_NS + 12, START_NS + 40)
    assert kept["kernel"]["correlation"].tolist() == [2, 3]
    assert kept["cuda_runtime"]["correlation"].tolist() == [2, 3, 4]
    assert outside == 3


OPS = [
    {"start": 1, "duration": 9, "thread": 7, "id": 1},  # a kept launch begins in it
    {"start": 2, "duration": 3, "thread": 8, "id": 2},  # of another thread
    {"start": 5, "duration": 3, "thread": 7, "id": 3},  # after that launch
    {"start": 14, "duration": 90, "thread": 7, "id": 4},
]


def test_an_op_outside_stays_if_a_kept_launch_lies_in_it_and_tensors_stay_with_their_op() -> None:
    strings = StringTable()
    calls = [{**call, "thread": 7} for call in CALLS]
    tables = {
        "kernel": table("kernel", KERNELS, strings),
        "cuda_runtime": table("cuda_runtime", calls, strings),
        "cpu_op": table("cpu_op", OPS, strings),
        "op_tensor": table("op_tensor", [{"op": number} for number in (1, 2, 3, 4, 4)], strings),
    }
    kept, outside = apply_window(tables, START_NS + 12, START_NS + 40)
    assert kept["cpu_op"]["id"].tolist() == [1, 4]
    assert kept["op_tensor"]["op"].tolist() == [1, 4, 4]
    assert outside == 5


def test_parents_keep_their_meaning() -> None:
    calls = [
        {"start": 0, "duration": 5, "parent": NO_ROW},
        {"start": 10, "duration": 50, "parent": NO_ROW},
        {"start": 20, "duration": 9, "parent": 1},
    ]
    tables = {"python_function": table("python_function", calls, StringTable())}
    kept, _ = apply_window(tables, START_NS + 12, START_NS + 40)
    assert kept["python_function"]["parent"].tolist() == [NO_ROW, 0]


def test_a_whole_table_is_not_copied() -> None:
    tables = {"kernel": table("kernel", KERNELS, StringTable())}
    kept, outside = apply_window(tables, START_NS, START_NS + 100)
    assert kept["kernel"] is tables["kernel"]
    assert outside == 0


def test_records_without_a_time_are_outside() -> None:
    tables = {"kernel": table("kernel", [{"start": -START_NS}], StringTable())}
    assert apply_window(tables, 0, 2**62)[1] == 1


def test_the_extent_of_everything() -> None:
    strings = StringTable()
    tables = {"kernel": table("kernel", KERNELS, strings), "gpu_memset": table("gpu_memset", [], strings)}
    assert whole_extent(tables) == (START_NS, START_NS + 51)
    assert whole_extent({}) == (0, 0)


def test_only_the_trailing_buffer_request_goes() -> None:
    strings = StringTable()
    requests = [
        {"start": 1, "duration": 2, "kind": ACTIVITY_BUFFER_REQUEST},
        {"start": 60, "duration": 2, "kind": ACTIVITY_BUFFER_REQUEST},
        {"start": 61, "duration": 2, "kind": 1 << 16},
    ]
    tables = {"kernel": table("kernel", KERNELS, strings), "overhead": table("overhead", requests, strings)}
    kept = drop_trailing_requests(tables)["overhead"]
    assert (kept["start"] - START_NS).tolist() == [1, 61]


def test_samples_of_counters_neither_stretch_the_extent_nor_hide_the_trailing_request() -> None:
    strings = StringTable()
    tables = {
        "kernel": table("kernel", KERNELS, strings),
        "overhead": table("overhead", [{"start": 60, "duration": 2, "kind": ACTIVITY_BUFFER_REQUEST}], strings),
        "counter": table("counter", [sample(-100, 500, 1)], strings),
    }
    assert whole_extent({kind: tables[kind] for kind in ("kernel", "counter")}) == (START_NS, START_NS + 51)
    assert whole_extent({"counter": tables["counter"]}) == (0, 0)
    assert not len(drop_trailing_requests(tables)["overhead"])
