import pytest
from support.trace_files.hta_events import Event, event, gpu, launch, op, rows

TEMPORAL = ("device", "idle_us", "compute_us", "non_compute_us", "kernel_time_us", "idle_pct")
OVERLAP = ("device", "communication_us", "overlapped_us", "overlap_pct")


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
