import pytest
from support.trace_files.hta_events import Event, gpu, rows

TYPES = ("kernel_type", "sum_us", "share_pct")
KERNELS = ("kernel_type", "name", "count", "sum_us", "max_us", "min_us", "mean_us", "std_us")


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
