from typing import Any

import pytest
from support.trace_files.hta_events import Event, gpu, rows

SERIES = ("kind", "time_us", "bandwidth")


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
