from typing import Any

import pytest
from support.trace_files.hta_events import Event, event, gpu, launch, op, rows

TEMPORAL = ("device", "idle_us", "compute_us", "non_compute_us", "kernel_time_us", "idle_pct")
OVERLAP = ("device", "communication_us", "overlapped_us", "overlap_pct")
TYPES = ("kernel_type", "sum_us", "share_pct")
KERNELS = ("kernel_type", "name", "count", "sum_us", "max_us", "min_us", "mean_us", "std_us")
SERIES = ("kind", "time_us", "bandwidth")


@pytest.fixture
def events() -> list[Event]:
    # computing [0, 10) and [20, 25), copying [8, 12), synchronising [12, 18): computing 15, else 2, idle 8 of 25
    return [
        gpu("gemm", 0, 10, 1),
        gpu("Memcpy HtoD (Pinned -> Device)", 8, 4, 2, stream=8, kind="gpu_memcpy"),
        event("cuda_sync", "Stream Sync", 12, 6, 0, 7, stream=7, correlation=3),
        gpu("gemm", 20, 5, 4),
    ]


def test_time_is_idle_computing_or_neither(events: list[Event]) -> None:
    assert rows(events, "temporal_breakdown", *TEMPORAL, hta=False) == [(0, 8, 15, 2, 25, 32)]


def test_hta_counts_synchronisations_as_busy(events: list[Event]) -> None:
    assert rows(events, "temporal_breakdown", *TEMPORAL) == [(None, 2, 15, 8, 25, 8)]


def test_each_device_has_its_own_time(events: list[Event]) -> None:
    other = gpu("gemm", 5, 2, 9, device=1)
    found = rows([*events, {**other, "pid": 1}], "temporal_breakdown", *TEMPORAL, hta=False)
    assert found[1] == (1, 0, 2, 0, 2, 0)


def test_hta_rounds_short_kernels_to_less_than_nothing() -> None:
    # [0.5, 1.4] -> 1 to 1; [2.1, 2.9] -> 3 to 2; [4.5, 10] -> 5 to 10: busy 0 - 1 + 5 of 9
    events = [gpu("a", 0.5, 0.9, 1), gpu("a", 2.1, 0.8, 2), gpu("a", 4.5, 5.5, 3)]
    assert rows(events, "temporal_breakdown", *TEMPORAL) == [(None, 5, 4, 0, 9, 55.56)]
    found = rows(events, "temporal_breakdown", *TEMPORAL, hta=False)
    assert found == [(0, pytest.approx(2.3), pytest.approx(7.2), 0, 9.5, pytest.approx(100 * 2.3 / 9.5))]


@pytest.mark.parametrize("hta", [False, True])
def test_without_gpu_events_there_is_no_row(hta: bool) -> None:
    assert rows([launch(1, 0)], "temporal_breakdown", *TEMPORAL, hta=hta) == []


def test_communication_overlaps_computation_where_both_run() -> None:
    # communication [0, 10) and [20, 22); computing [4, 8), [7, 12), [21, 30): both in [4, 10) and [21, 22)
    events = [
        gpu("ncclKernel_AllReduce", 0, 10, 1, stream=20),
        gpu("gemm", 4, 4, 2),
        gpu("gemm", 7, 5, 3, stream=8),
        gpu("ncclKernel_AllReduce", 20, 2, 4, stream=20),
        gpu("gemm", 21, 9, 5),
    ]
    assert rows(events, "comm_comp_overlap", *OVERLAP, hta=False) == [(0, 12, 7, pytest.approx(700 / 12))]
    assert rows(events, "comm_comp_overlap", *OVERLAP) == [(None, 12, 7, 58.33)]


def test_new_nccl_kernels_are_computation_to_hta_unless_their_name_begins_with_nccl() -> None:
    events = [gpu("void pack_ncclDevKernel()", 0, 10, 1, stream=20), gpu("gemm", 4, 4, 2)]
    assert rows(events, "comm_comp_overlap", *OVERLAP, hta=False) == [(0, 10, 4, 40)]
    assert rows(events, "comm_comp_overlap", *OVERLAP) == [(None, 0, 0, None)]


def test_without_gpu_events_hta_has_a_row_without_an_overlap() -> None:
    assert rows([op("a", 0, 5)], "comm_comp_overlap", *OVERLAP) == [(None, 0, 0, None)]
    assert rows([op("a", 0, 5)], "comm_comp_overlap", *OVERLAP, hta=False) == []


@pytest.mark.parametrize("hta", [False, True])
def test_each_moment_counts_for_the_types_that_run(hta: bool) -> None:
    # computing [0, 10), communication [5, 20), copying [18, 30)
    events = [
        gpu("gemm", 0, 10, 1),
        gpu("ncclKernel_AllReduce", 5, 15, 2, stream=8),
        gpu("Memcpy HtoD", 18, 12, 3, stream=9, kind="gpu_memcpy"),
    ]
    assert rows(events, "kernel_type_breakdown", *TYPES, hta=hta) == [
        ("MEMORY", 10, pytest.approx(33.3, abs=0.04)),
        ("COMMUNICATION", 8, pytest.approx(26.7, abs=0.04)),
        ("COMPUTATION", 5, pytest.approx(16.7, abs=0.04)),
        ("COMPUTATION overlapping COMMUNICATION", 5, pytest.approx(16.7, abs=0.04)),
        ("COMMUNICATION overlapping MEMORY", 2, pytest.approx(6.7, abs=0.04)),
    ]
    without = rows(events, "kernel_type_breakdown", *TYPES[:2], hta=hta, include_memory=False)
    assert without == [("COMMUNICATION", 10), ("COMPUTATION", 5), ("COMPUTATION overlapping COMMUNICATION", 5)]


@pytest.fixture
def kernels() -> list[Event]:
    durations = {"a": [50, 30], "b": [15], "c": [3], "d": [1, 1]}
    numbered = [(name, dur) for name, found in durations.items() for dur in found]
    return [gpu(name, 100 * place, dur, place) for place, (name, dur) in enumerate(numbered)]


@pytest.mark.parametrize("hta", [False, True])
def test_up_to_the_limit_all_kernels_are_listed_with_their_statistics(kernels: list[Event], hta: bool) -> None:
    found = rows(kernels, "kernel_breakdown", *KERNELS, hta=hta)
    assert found[0] == ("COMPUTATION", "a", 2, 80, 50, 30, 40, pytest.approx(200**0.5))
    assert found[3] == ("COMPUTATION", "d", 2, 2, 1, 1, 1, 0)


def test_beyond_the_limit_the_tail_is_one_row_with_true_statistics(kernels: list[Event]) -> None:
    found = rows(kernels, "kernel_breakdown", *KERNELS, hta=False, num_kernels=2, duration_ratio=0.99)
    assert [row[1] for row in found] == ["a", "b", "others"]
    assert found[2] == ("COMPUTATION", "others", 3, 5, 3, 1, pytest.approx(5 / 3), pytest.approx((4 / 3) ** 0.5))


def test_names_are_listed_until_they_are_the_wanted_share(kernels: list[Event]) -> None:
    found = rows(kernels, "kernel_breakdown", "name", hta=False, num_kernels=3, duration_ratio=0.8)
    assert found == [("a",), ("others",)]  # a is 80 of 100


def test_hta_then_makes_the_statistics_of_the_sums(kernels: list[Event]) -> None:
    # running sums 80, 95, 98, 100; their 0.8-quantile is 98.8: d is beyond it, c is beyond the limit
    found = rows(kernels, "kernel_breakdown", *KERNELS, num_kernels=2)
    assert found == [
        ("COMPUTATION", "a", 1, 80, 80, 80, 80, 0),
        ("COMPUTATION", "b", 1, 15, 15, 15, 15, 0),
        ("COMPUTATION", "others", 2, 5, 3, 2, 2.5, pytest.approx(0.5**0.5)),
    ]


def test_hta_always_lists_names_with_negative_sums() -> None:
    names = {"a": 50.0, "b": 20.0, "c": 10.0, "short": 0.3}
    events = [gpu(name, 100 * place + 0.5, dur, place) for place, (name, dur) in enumerate(names.items())]
    found = rows(events, "kernel_breakdown", "name", "sum_us", num_kernels=1)
    assert found == [("a", 49), ("others", 28), ("short", -1)]


def copy(name: str, ts: float, dur: float, bytes_: int, correlation: int, **args: Any) -> Event:
    kind = "gpu_memset" if name == "Memset" else "gpu_memcpy"
    full = {"Memset": "Memset (Device)", "H": "Memcpy HtoD (Pinned -> Device)"}[name]
    return gpu(full, ts, dur, correlation, kind=kind, bytes=bytes_, **args)


def test_copies_that_run_at_once_add_up() -> None:
    # [0, 10) with 20,000 bytes: 2 GB/s; [5, 10) with 5,000: 1 GB/s
    events = [copy("H", 0, 10, 20_000, 1), copy("H", 5, 5, 5_000, 2), copy("Memset", 2, 2, 1_000, 3)]
    assert rows(events, "memory_bandwidth", *SERIES, hta=False) == [
        ("Memcpy HtoD", 0, 2),
        ("Memcpy HtoD", 5, 3),
        ("Memcpy HtoD", 10, pytest.approx(1)),
        ("Memcpy HtoD", 10, 0),
        ("Memset", 2, 0.5),
        ("Memset", 4, 0),
    ]


def test_hta_takes_the_bandwidth_of_the_file_and_lets_short_copies_last_a_microsecond() -> None:
    stated = {"memory bandwidth (GB/s)": 7.5}
    events = [copy("H", 0, 0, 100, 1, **stated), copy("H", 5, 5, 100, 2)]
    assert rows(events, "memory_bandwidth", *SERIES) == [
        ("Memcpy HtoD", 0, 7.5),
        ("Memcpy HtoD", 1, 0),
        ("Memcpy HtoD", 5, 0),
        ("Memcpy HtoD", 10, 0),
    ]


@pytest.mark.parametrize("hta", [False, True])
def test_the_summary_leaves_out_times_without_copies(hta: bool) -> None:
    events = [
        copy("H", 0, 1, 2_000, 1, **{"memory bandwidth (GB/s)": 2.0}),
        copy("H", 5, 1, 4_000, 2, **{"memory bandwidth (GB/s)": 4.0}),
    ]
    found = rows(events, "memory_bandwidth_summary", "kind", "count", "mean", "min", "max", hta=hta)
    assert found == [("Memcpy HtoD", 2, 3, 2, 4)]


@pytest.mark.parametrize("hta", [False, True])
def test_without_copies_there_is_nothing(hta: bool) -> None:
    for view in ("memory_bandwidth", "memory_bandwidth_summary"):
        assert rows([gpu("k", 0, 1, 1)], view, "kind", hta=hta) == []


def test_sums_of_floats_leave_no_bandwidth_when_nothing_runs() -> None:
    # 0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3 is not 0 in floats
    events = [
        copy("H", place, 10 - place, number * (10 - place) * 100, place + 1) for place, number in enumerate((1, 2, 3))
    ]
    assert rows(events, "memory_bandwidth", "bandwidth", hta=False)[-1] == (0,)
