"""Collectives over ranks: what they are, how fast they were and who came last."""

import json
from io import BytesIO
from typing import Any

import pytest
from kineto_trace.analysis.distributed.collective_views import collective_instances, collective_summary
from kineto_trace.collectives.nccl import bus_factor, collective_name, describe
from kineto_trace.errors import ViewError
from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import View
from support.trace_files.ranks import Event, context, document, event, launched, nccl

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GATHER = "ncclDevKernel_AllGather_RING_SIMPLE(ncclDevKernelArgsStorage<4096ul>)"


def over(view: View, *ranks: list[Event], hosts: tuple[str, ...] = ("a", "a"), **options: Any) -> Result:
    partials = [
        (rank, view.partial(context(events, rank=rank, size=len(ranks), host=hosts[rank]), **options))
        for rank, events in enumerate(ranks)
    ]
    return view.combine(partials, **options)


def all_reduce(start: float, duration: float, sequence: int, *, elements: int = 1000, stream: int = 20) -> list[Event]:
    arguments = nccl("allreduce", elements, [0, 1], sequence)
    return list(launched(ALL_REDUCE, start - 10, start, duration, sequence, stream=stream, **arguments))


def test_the_arguments_and_the_name_of_a_kernel_say_what_it_does() -> None:
    found = describe(nccl("_allgather_base", 500, [0, 2, 4, 6], 3, name="1", dtype="BFloat16"), GATHER)
    assert (found.collective, found.group, found.ranks, found.size) == ("all_gather", "1", (0, 2, 4, 6), 4)
    assert (found.in_bytes, found.out_bytes, found.bytes) == (1000, 4000, 4000)
    assert found.dtype == "BFloat16"


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_NVLS_TREE_SIMPLE(x)", ("all_reduce", "bf16")),
        ("ncclKernel_AllReduce_TREE_LL128_Sum_float(x)", ("all_reduce", "float")),
        ("ncclDevKernel_ReduceScatter_Sum_f16_COLLNET_DIRECT_SIMPLE", ("reduce_scatter", "f16")),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", ("sendrecv", None)),
        ("ncclDevKernel_Broadcast_RING_LL(x)", ("broadcast", None)),
        ("ncclDevKernel_AllGather_PAT_SIMPLE(x)", ("all_gather", None)),
    ],
)
def test_without_arguments_the_kernels_name_tells(kernel: str, expected: tuple[str | None, ...]) -> None:
    found = describe({}, kernel)
    assert (found.collective, found.dtype) == expected
    assert found.bytes is None


@pytest.mark.parametrize("view", [collective_instances, collective_summary])
def test_no_algorithm_or_protocol_is_read_from_the_name_of_a_kernel(view: View) -> None:
    row = over(view, all_reduce(100, 50, 1), all_reduce(130, 20, 1)).rows()[0]
    assert not {"algorithm", "protocol"} & set(row)
    assert not any("RING" in str(value) or str(value) == "LL" for value in row.values())


@pytest.mark.parametrize(
    ("text", "name"),
    [("allreduce_coalesced", "all_reduce"), ("nccl:all_to_all", "all_to_all"), ("send 0->1", "send"), ("new", "new")],
)
def test_all_spellings_of_a_collective_have_one_name(text: str, name: str) -> None:
    assert collective_name(text) == name


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(name, 4) for name in ("all_reduce", "all_gather", "all_to_all", "broadcast", "send")] == [
        1.5,
        0.75,
        0.75,
        1.0,
        1.0,
    ]


def test_a_collective_is_matched_over_ranks_by_group_and_number() -> None:
    # rank 1 ran its second collective first: by order they would be mixed up
    rank0 = [*all_reduce(100, 50, 1), *all_reduce(200, 40, 2, elements=2000)]
    rank1 = [*all_reduce(130, 20, 1), *all_reduce(210, 30, 2, elements=2000)]
    found = over(collective_instances, rank0, rank1).rows()
    keys = ("sequence", "ranks_seen", "duration_us", "transfer_us", "start_skew_us", "end_skew_us", "last_rank")
    assert [tuple(row[key] for key in keys) for row in found] == [
        (1, 2, 50.0, 20.0, 30.0, 0.0, 1),
        (2, 2, 40.0, 30.0, 10.0, 0.0, 1),
    ]
    # 4000 bytes in 20 us; 2 ranks: 2 x 1/2
    assert (found[0]["bytes"], found[0]["algbw_gb_s"], found[0]["busbw_gb_s"]) == (4000, 0.2, 0.2)
    assert (found[0]["group_description"], found[0]["dtype"]) == ("default_pg", "Float")


def test_clocks_of_several_hosts_are_aligned_by_the_ends_of_collectives() -> None:
    rank0 = [*all_reduce(100, 50, 1), *all_reduce(200, 40, 2), *all_reduce(300, 40, 3)]
    # the clock of rank 1 is 5000 us ahead
    rank1 = [*all_reduce(5130, 20, 1), *all_reduce(5210, 30, 2), *all_reduce(5290, 50, 3)]
    aligned = over(collective_instances, rank0, rank1, hosts=("a", "b"))
    assert aligned.values("start_skew_us") == [30.0, 10.0, 10.0]
    assert aligned.values("last_rank") == [1, 1, 0]
    assert "aligned by the ends" in aligned.notes[0] and "5 ms apart" in aligned.notes[0]
    trusted = over(collective_instances, rank0, rank1, hosts=("a", "b"), align="clock")
    assert trusted.values("start_skew_us") == [5030.0, 5010.0, 4990.0]
    assert "the clocks of ranks 1 are used as they are: their offsets are unknown" in trusted.notes
    for found in (aligned, trusted):
        assert found.values("skew_uncertainty_us") == [None, None, None]
    with pytest.raises(ViewError, match="align='gps' is not valid; use one of auto, clock, collectives"):
        over(collective_instances, rank0, rank1, align="gps")


def numbered(ahead: float, late: int) -> list[Event]:
    """Twelve all_reduces of 50 us; this rank is 20 us late in every other one."""
    events: list[Event] = []
    for number in range(12):
        start = 1000.0 * number + (20 if number % 2 == late else 0)
        events += all_reduce(start + ahead, 1000.0 * number + 50 - start, number + 1)
    return events


def measured(offset_us: float, uncertainty_us: float) -> dict[str, int]:
    return {"clock_offset_ns": int(offset_us * 1000), "clock_uncertainty_ns": int(uncertainty_us * 1000)}


def on_hosts(view: View, *ranks: tuple[list[Event], str, dict[str, int]], **options: Any) -> Result:
    partials = []
    for rank, (events, host, clock) in enumerate(ranks):
        text = json.dumps({**document(events, rank=rank, size=len(ranks), host=host), "kinetod": clock})
        partials.append((rank, view.partial(Context(load_chrome(BytesIO(text.encode()), name=f"rank{rank}.json")))))
    return view.combine(partials, **options)


def test_offsets_that_were_measured_are_applied_and_their_uncertainty_is_said() -> None:
    ranks = (numbered(0, 0), "a", measured(0, 30)), (numbered(500, 1), "b", measured(-490, 40))
    found = on_hosts(collective_instances, *ranks, align="clock")
    # 10 us of the 500 are left
    assert found.values("start_skew_us")[:2] == [10.0, 30.0]
    assert set(found.values("skew_uncertainty_us")) == {70.0}
    assert found.notes == (
        "clocks are aligned to that of rank 0: 1 by the measured offsets",
        "clocks with known uncertainty are within 70 µs of that of rank 0",
    )


def test_collectives_refine_what_was_measured() -> None:
    ranks = (numbered(0, 0), "a", measured(0, 30)), (numbered(500, 1), "b", measured(-490, 40))
    found = on_hosts(collective_instances, *ranks)
    assert found.values("start_skew_us")[:2] == [20.0, 20.0]
    (uncertainty,) = set(found.values("skew_uncertainty_us"))
    assert 30 <= uncertainty <= 32  # 50 us less the 20 that one was late, and what timestamps may be wrong
    assert found.notes[0] == "clocks are aligned to that of rank 0: 1 refined by collectives"


def test_ranks_of_one_host_have_one_clock_whatever_it_says() -> None:
    own = measured(-400, 100)
    ranks = (numbered(400, 0), "a", own), (numbered(400, 1), "a", own), (numbered(0, 1), "b", measured(0, 90))
    found = on_hosts(collective_summary, *(ranks[:2]))
    assert (found.values("mean_start_skew_us"), found.values("skew_uncertainty_us")) == ([20.0], [2.0])
    assert found.notes == ("all ranks ran on one host and share its clock, which is accurate to within 1 µs",)
    found = on_hosts(collective_instances, *ranks, align="clock")
    assert set(found.values("skew_uncertainty_us")) == {190.0}


def test_clocks_are_joined_over_the_groups_that_ranks_share() -> None:
    def reduce(start: float, group: list[int], sequence: int, name: str) -> list[Event]:
        arguments = nccl("allreduce", 10, group, sequence, name=name)
        return list(launched(ALL_REDUCE, start - 10, start, 20, int(start), stream=20, **arguments))

    # 0 with 1, 1 with 2; clock 1 is 1000 us ahead, clock 2 is 300 us behind
    ranks = (
        reduce(100, [0, 1], 1, "1"),
        [*reduce(1100, [0, 1], 1, "1"), *reduce(1200, [1, 2], 1, "2")],
        reduce(-100, [1, 2], 1, "2"),
    )
    found = over(collective_instances, *ranks, hosts=("a", "b", "c"))
    assert found.values("start_skew_us") == [0.0, 0.0]
    assert "1 ms apart" in found.notes[0]


def test_one_rank_alone_has_no_skew_and_says_what_its_bandwidth_is_worth() -> None:
    found = over(collective_instances, all_reduce(100, 50, 1))
    row = found.rows()[0]
    assert (row["start_skew_us"], row["last_rank"], row["algbw_gb_s"]) == (None, None, 0.08)
    assert "lower bounds" in found.notes[-1]


def test_compute_beside_a_collective_is_its_overlap() -> None:
    events = [*all_reduce(100, 50, 1), *launched("gemm", 90, 120, 10, 55), *launched("gemm", 92, 140, 100, 56)]
    assert over(collective_instances, events).values("compute_pct") == [40.0]


def test_without_numbers_order_and_time_count_and_a_note_says_so() -> None:
    def plain(*starts: float) -> list[Event]:
        return [e for n, start in enumerate(starts) for e in launched(ALL_REDUCE, start - 5, start, 10, n, stream=20)]

    found = over(collective_instances, plain(100, 200), plain(104, 209))
    assert found.values("start_skew_us") == [4.0, 9.0]
    assert found.values("busbw_gb_s") == [None, None]
    assert "matched across ranks by order and time. Their ends differ by 4.5 µs on average" in found.notes[0]
    assert "have no sizes" in found.notes[1]


def test_several_kernels_with_one_number_are_one_collective() -> None:
    arguments = nccl("allreduce_coalesced", 100, [0, 1], 7)
    events = [
        *launched(ALL_REDUCE, 90, 100, 10, 1, stream=20, **arguments),
        *launched(ALL_REDUCE, 93, 115, 10, 2, stream=20, **arguments),
    ]
    assert over(collective_instances, events).values("duration_us") == [25.0]


def test_a_send_and_its_recv_are_one_transfer() -> None:
    kernel = "ncclDevKernel_SendRecv(x)"
    sends = list(launched(kernel, 90, 100, 30, 1, **nccl("send", 100, [0, 1], 4)))
    receives = list(launched(kernel, 90, 120, 10, 1, **nccl("recv", 100, [0, 1], 4)))
    reduces = all_reduce(200, 10, 4)
    found = over(collective_instances, [*sends, *reduces], [*receives, *reduces])
    assert found.values("ranks_seen") == [2, 2]
    assert found.values("last_rank")[0] == 1


def test_the_operator_around_the_launch_describes_kernels_without_arguments() -> None:
    op = event("cpu_op", "record_param_comms", 80, 40, **{"External id": 5}, **nccl("allreduce", 50, [0, 1], 9))
    found = over(collective_instances, [op, *launched(ALL_REDUCE, 90, 100, 10, 1)])
    assert (found.values("sequence"), found.values("bytes")) == ([9], [200])


def test_the_summary_adds_up_what_is_alike() -> None:
    rank0 = [*all_reduce(100, 50, 1), *all_reduce(200, 40, 2), *all_reduce(300, 10, 3, elements=9)]
    rank1 = [*all_reduce(130, 20, 1), *all_reduce(190, 50, 2), *all_reduce(300, 10, 3, elements=9)]
    found = over(collective_summary, rank0, rank1).rows()
    keys = ("bytes", "calls", "total_us", "mean_us", "wait_us", "mean_start_skew_us", "last_rank", "last_rank_pct")
    assert [tuple(row[key] for key in keys) for row in found] == [
        (4000, 2, 60.0, 30.0, 40.0, 20.0, None, None),  # each rank was last once
        (36, 1, 10.0, 10.0, 0.0, 0.0, None, None),
    ]
    assert found[0]["algbw_gb_s"] == pytest.approx(8000 / 60e3)


def test_the_summary_puts_sizes_and_groups_together_that_are_alike() -> None:
    def some(group: list[int], name: str, *sizes: int) -> list[Event]:
        events: list[Event] = []
        for number, size in enumerate(sizes):
            arguments = {**nccl("allreduce", size, group, number, name=name), "Process Group Description": "mesh_tp"}
            events += launched(ALL_REDUCE, 90 + 100 * number, 100 + 100 * number, 50, number, stream=20, **arguments)
        return events

    ranks = (some([0, 1], "3", 256, 300, 1000), some([2, 3], "4", 256, 257, 1000))

    def rows(**options: Any) -> list[tuple[Any, ...]]:
        found = over(collective_summary, *ranks, **options).rows()
        return sorted((row["bytes"], row["process_group"], row["calls"]) for row in found)

    assert rows() == [(1024, "3, 4", 2), (1028, "4", 1), (1200, "3", 1), (4000, "3, 4", 2)]
    assert rows(sizes="log2") == [(1069, "3, 4", 4), (4000, "3, 4", 2)]
    assert rows(sizes="all", groups="each") == [(2017, "4", 3), (2075, "3", 3)]
    with pytest.raises(ViewError, match="sizes='log10' is not valid; use one of exact, log2, all"):
        rows(sizes="log10")
    with pytest.raises(ViewError, match="groups='x' is not valid; use one of alike, each"):
        rows(groups="x")


def test_of_a_gather_the_size_is_that_of_the_root() -> None:
    def gather(elements_in: int, elements_out: int) -> list[Event]:
        arguments = {**nccl("gather", 10, [0, 1], 1), "In msg nelems": elements_in, "Out msg nelems": elements_out}
        return list(launched("ncclDevKernel_SendRecv(x)", 90, 100, 20, 1, stream=20, **arguments))

    found = over(collective_instances, gather(100, 200), gather(100, 0)).rows()
    assert (found[0]["bytes"], found[0]["busbw_gb_s"]) == (800, 0.02)


def test_traces_without_communication_give_no_rows() -> None:
    events = list(launched("gemm", 0, 10, 10, 1))
    assert len(over(collective_instances, events, events)) == 0
    assert len(over(collective_summary, events, events)) == 0


def late_by(us: float, count: int, ranks: tuple[str, str] = ("a", "a")) -> Result:
    """All_reduces of 50 us in which rank 1 begins so much later than rank 0."""
    first, second = ([e for n in range(count) for e in all_reduce(100 * n + late, 50 - late, n)] for late in (0.0, us))
    return over(collective_summary, first, second, hosts=ranks)


@pytest.mark.parametrize(
    ("us", "count", "expected"),
    [
        (1.5, 40, (None, None)),  # less than what two timestamps of one clock may be wrong
        (10.0, 40, (1, 100.0)),
        (10.0, 4, (None, None)),  # four of four is still chance
    ],
)
def test_the_last_rank_is_named_only_beyond_the_clocks_doubt_and_chance(
    us: float, count: int, expected: tuple[int | None, float | None]
) -> None:
    row = late_by(us, count).rows()[0]
    assert (row["last_rank"], row["last_rank_pct"]) == expected


def test_a_last_rank_needs_a_lead_of_more_than_the_ends_differ_where_no_clock_is_known() -> None:
    first = [e for n in range(20) for e in all_reduce(100 * n, 40 + (n % 2) * 15, n)]
    second = [e for n in range(20) for e in all_reduce(100 * n + 12, 30 + (n % 3) * 10, n)]
    found = over(collective_instances, first, second, hosts=("a", "b"))
    for row in found.rows():
        if row["last_rank"] is not None and row["skew_uncertainty_us"] is None:
            assert row["start_skew_us"] > row["end_skew_us"]


def test_collectives_of_one_rank_alone_are_no_measure_of_a_transfer() -> None:
    # the first one of rank 0 waited for 15 ms, and the window of rank 1 begins after it
    first = [*all_reduce(100, 15_000, 1), *all_reduce(20_000, 50, 2)]
    found = over(collective_summary, first, all_reduce(20_020, 30, 2))
    assert [(row["calls"], row["max_us"]) for row in found.rows()] == [(1, 30.0)]
    assert "collectives recorded on only one rank are left out: 1" in found.notes
