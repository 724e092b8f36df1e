"""All ranks of a job beside each other: which one is slow, late or waits, and by whom the others are held up."""

from pathlib import Path
from typing import Any

import pytest
from kineto_trace.analysis.distributed.distributed_views import stragglers
from kineto_trace.analysis.distributed.rank_views import rank_step_table, rank_table, rank_waits, step_spread
from kineto_trace.catalog.view_runner import run_views
from kineto_trace.collectives.rank_matching import NO_COLLECTIVES
from kineto_trace.open.trace_discovery import find_traces
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import View
from support.trace_files.ranks import Event, context, event, launched, nccl, step
from support.trace_files.simulated.training_job import many_operators, simulate
from support.trace_files.training_ranks import Job, events_of

DDP = Path(__file__).parents[4] / "data/h200/ddp4"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
BROADCAST = "ncclDevKernel_Broadcast_RING_LL(x)"


def over(view: View, *ranks: list[Event], per_host: int = 8, **options: Any) -> Result:
    partials = [
        (rank, view.partial(context(events, rank=rank, size=len(ranks), host=f"gpu-{rank // per_host}"), **options))
        for rank, events in enumerate(ranks)
    ]
    return view.combine(partials, **options)


@pytest.fixture(scope="module")
def ranks() -> list[list[Event]]:
    """Rank 5 computes 10 % longer, rank 9 begins its steps 300 us late; the clock of its host is 1.5 ms behind."""
    return events_of(Job(ranks=16, steps=3, slow={5: 1.1}, late={9: 300.0}, clock_us={2: -1500.0}))


def test_slow_and_late_ranks_are_told_apart_and_whoever_waited_is_neither(ranks: list[list[Event]]) -> None:
    found = over(rank_table, *ranks, per_host=4).rows()
    assert [row["rank"] for row in found[:2]] == [9, 5]
    late, slow = found[:2]
    assert late["about"].startswith("late: others wait for it, although it computes no longer than they do")
    assert slow["about"] == "slow: it computes 10 % longer than the median rank, and others wait for it"
    assert {row["about"] for row in found[2:]} == {None}
    assert (late["host"], late["gpu"], late["steps"]) == ("gpu-2", "NVIDIA H200", 3)
    assert late["waited_for_us"] == pytest.approx(300, abs=60)
    assert late["waiting_us"] < 20 < slow["waiting_us"]


def test_a_late_rank_is_told_how_much_longer_the_same_operators_take_on_its_host() -> None:
    runs = [simulate(job) for job in (many_operators(pace={1: 1.3}), many_operators(late={1: 3_000.0}))]
    slow_rows, sleeping_rows = (over(rank_table, [*run.events(0)], [*run.events(1)]).rows() for run in runs)
    assert slow_rows[0]["about"] == (
        "late: others wait for it, although it computes no longer than they do; the same operators take 1.30 times as "
        "long on its host as on the other ranks (median over 10 operators): probably a slower or shared core; pin each "
        "rank to cores of its GPU's NUMA node, look for other programs there, and compare clock speeds"
    )
    assert sleeping_rows[0]["about"].endswith("longer than they do; check its host (view idle_causes)")


def test_who_waits_for_whom_needs_no_clocks(ranks: list[list[Event]]) -> None:
    found = over(rank_waits, *ranks, per_host=4)
    pairs = {(row["rank"], row["waits_for"]): row for row in found.rows()}
    for rank in (8, 10, 11):
        row = pairs[rank, 9]
        assert row["wait_us"] == pytest.approx(3 * 300, rel=0.05)
        assert row["where"] == "all_reduce mesh_tp"
        assert row["wait_pct"] > 90
    assert pairs[4, 5]["wait_us"] > 400
    assert all(row["rank"] != row["waits_for"] for row in found.rows())
    assert found.values("wait_us") == sorted(found.values("wait_us"), reverse=True)
    assert found.notes == ()


def reduces(kernel: str, collective: str, *times: tuple[float, float]) -> list[Event]:
    events: list[Event] = [step(1, 0, 900)]
    for number, (start, end) in enumerate(times):
        arguments = nccl(collective, 100, [0, 1, 2], number)
        events += launched(kernel, start - 5, start, end - start, number, stream=20, **arguments)
    return events


def test_the_rank_with_the_shortest_time_in_a_collective_came_last() -> None:
    ranks = [
        reduces(ALL_REDUCE, "allreduce", (100, 160), (300, 330)),
        reduces(ALL_REDUCE, "allreduce", (140, 160), (290, 330)),
        reduces(ALL_REDUCE, "allreduce", (120, 160), (300, 330)),
    ]
    found = over(rank_waits, *ranks).rows()
    assert [tuple(row.values()) for row in found] == [
        (0, 1, 40.0, 100.0, 1, 40.0, "all_reduce default_pg"),
        (2, 1, 20.0, 100.0, 1, 20.0, "all_reduce default_pg"),
        (1, 0, 10.0, 100.0, 1, 10.0, "all_reduce default_pg"),
    ]


def test_what_ranks_may_leave_before_others_come_does_not_count() -> None:
    ranks = [reduces(BROADCAST, "broadcast", (100, 110)), reduces(BROADCAST, "broadcast", (100, 160))]
    found = over(rank_waits, *ranks)
    assert (len(found), found.notes) == (
        0,
        (
            "1 collectives appear on several ranks, but none of them synchronises all ranks (broadcast), so it "
            "is unknown which rank waits for which",
        ),
    )
    table = over(rank_table, *ranks)
    assert table.values("waiting_us") == [None, None]
    assert found.notes[0] in table.notes


def beside_work(late: float) -> list[Event]:
    """Steps of 1 ms: an all_reduce, which begins so late and ends at 800 us, beside 700 us of computation."""
    events: list[Event] = []
    for number in range(4):
        start = 1_000.0 * number
        events.append(step(number + 1, start, 990))
        events += launched("gemm", start + 1, start + 60, 700, 10 * number)
        arguments = nccl("allreduce", 1_000, [0, 1], number)
        kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
        events += launched(kernel, start + 5, start + 50 + late, 750 - late, 10 * number + 1, stream=20, **arguments)
    return events


def test_waiting_beside_computation_is_not_told_as_waiting() -> None:
    late, waits = over(rank_table, beside_work(0), beside_work(600)).rows()
    assert (late["rank"], late["waited_for_us"], waits["waiting_us"]) == (1, 600.0, 600.0)
    assert waits["communication_us"] == 50.0
    assert waits["about"] is None
    assert late["about"].startswith("late")


def by_turns(place: int) -> list[Event]:
    """Eight steps of 1 ms on the host; the ranks begin the all_reduce late by turns, the first one a little more."""
    events: list[Event] = []
    for number in range(8):
        start, late = 1_000.0 * number, (220.0 - 20 * place) * (number % 2 == place)
        events.append(step(number + 1, start, 950))
        events.append(event("user_annotation", "gloo:all_reduce", start + 300 + late, 600 - late, tid=2))
    return events


def test_ranks_that_are_late_by_turns_are_not_called_late() -> None:
    found = over(rank_table, by_turns(0), by_turns(1)).rows()
    assert [row["waited_for_us"] for row in found] == [110.0, 100.0]
    assert not any("late" in (row["about"] or "") for row in found)


def gloo(late: float) -> list[Event]:
    """Five steps of 1 ms on the host; this rank begins each all_reduce so late, and it ends on both at 900 us."""
    events: list[Event] = []
    for number in range(5):
        start = 1_000.0 * number
        events.append(step(number, start, 999))
        events.append(event("user_annotation", "gloo:all_reduce", start + 300 + late, 600 - late, tid=2 + number % 2))
    return events


def test_collectives_of_gloo_have_waits_and_what_is_not_known_is_no_zero() -> None:
    found = over(rank_table, gloo(0), gloo(400))
    assert [(row["rank"], row["waiting_us"], row["waited_for_us"], row["computation_us"]) for row in found.rows()] == [
        (1, 0.0, 400.0, None),
        (0, 400.0, 0.0, None),
    ]
    assert found.values("about") == [
        "late: others wait for it; how long it computes is unknown",
        "waits for 40 % of its step time, mostly for rank 1",
    ]
    note = "the traces have no GPU kernels: collectives are measured on the host, and computation is unknown"
    assert note in found.notes
    assert over(rank_waits, gloo(0), gloo(400)).rows()[0]["where"] == "all_reduce"
    without = over(rank_table, [step(1, 0, 100)], [step(1, 0, 100)])
    assert without.values("waiting_us") == [None, None]
    assert without.notes[-1] == f"{NO_COLLECTIVES}, so it is unknown which rank waits for which"


def test_the_steps_over_ranks_have_their_spread_and_their_slowest_rank() -> None:
    ranks = [[step(9, 0, 100), step(10, 100, 80)], [step(9, 0, 110), step(10, 110, 80)], [step(9, 0, 140)]]
    assert [tuple(row.values()) for row in over(step_spread, *ranks).rows()] == [
        ("9", 3, 100.0, 110.0, pytest.approx(137), 140.0, pytest.approx(100 * 40 / 110), 2),
        ("10", 2, 80.0, 80.0, 80.0, 80.0, 0.0, 0),
    ]
    table = {row["rank"]: row for row in over(rank_table, *ranks).rows()}
    assert [table[rank]["slowest_steps"] for rank in range(3)] == [1, 0, 1]
    assert (table[1]["step_us"], table[1]["step_p50_us"], table[1]["step_max_us"]) == (95.0, 95.0, 110.0)


def test_ranks_that_count_their_steps_differently_are_matched_by_the_time() -> None:
    ranks = [
        [step(41, 0, 100), step(42, 100, 110)],
        [step(7, 2, 100), step(8, 102, 120)],
        [step(42, 101, 115), step(43, 220, 100)],
    ]
    found = over(step_spread, *ranks)
    assert [(row["step"], row["ranks"], row["slowest_rank"]) for row in found.rows()] == [
        ("41", 2, 0),
        ("42", 3, 1),
        ("43", 1, None),
    ]
    note = (
        "ranks number their steps differently; steps are matched by time and have the numbers of rank 0 "
        "(original offsets: -34 on rank 1)"
    )
    assert found.notes == (note,)
    assert note in over(rank_table, *ranks).notes


def test_four_real_ranks_have_their_steps_and_waits_beside_each_other() -> None:
    """Of tests/data/h200: DDP on one host, rank 2 late on purpose, processes that count their steps differently."""
    steps, waits, table = run_views(["step_spread", "rank_waits", "ranks"], find_traces(DDP))
    assert [(row["step"], row["ranks"]) for row in steps.rows()] == [(str(number), 4) for number in range(261, 265)]
    assert all(19_000 < row["median_us"] < 21_000 for row in steps.rows())
    assert waits.values("waits_for")[:2] == [2, 2]
    assert (table.values("rank")[0], table.values("about")) == (2, [None] * 4)  # of 20 ms they wait 0.1


def test_traces_without_anything_give_no_rows_that_say_something() -> None:
    assert over(step_spread, [], []).notes == ("the traces have no events to form a step from",)
    assert len(over(rank_waits, [], [])) == 0
    found = over(rank_table, [], [])
    assert found.values("about") == [None, None]
    assert "it is unknown which rank waits for which" in found.notes[-1]


def test_a_straggler_whose_lateness_is_within_the_clocks_doubt_is_marked(ranks: list[list[Event]]) -> None:
    found = over(stragglers, *ranks, per_host=4)
    assert found.values("rank")[:2] == [9, 5]
    assert any("refined by collectives" in note for note in found.notes)
    assert all(row["uncertainty_us"] > 0 for row in found.rows())


def halves(late: float, *, cut: tuple[int, ...]) -> list[Event]:
    """Four steps of 1 ms, of which these are cut; this rank begins each all_reduce so late, 10 times as late in those.

    Each all_reduce ends on both ranks at 900 us of the step.
    """
    events: list[Event] = []
    for number in range(4):
        start, behind = 1_000.0 * number, late * (10 if number in cut else 1)
        ends = {"complete": False} if number in cut else {}
        events.append(event("user_annotation", f"ProfilerStep#{number}", start, 999, **ends))
        events.append(event("user_annotation", "gloo:all_reduce", start + 300 + behind, 600 - behind, tid=2))
    return events


def waiting(found: Result) -> list[tuple[int, int, float | None, float | None]]:
    return [tuple(row[name] for name in ("rank", "steps", "waiting_us", "waited_for_us")) for row in found.rows()]


def test_collectives_of_steps_that_the_recording_cut_off_do_not_count() -> None:
    found = over(rank_table, halves(0, cut=(0, 3)), halves(40, cut=(0, 3)))
    assert waiting(found) == [(1, 2, 0.0, 40.0), (0, 2, 40.0, 0.0)]
    assert found.values("about")[1] is None


def test_a_rank_counts_its_own_complete_steps() -> None:
    found = over(rank_table, halves(0, cut=()), halves(40, cut=(0, 3)))
    assert waiting(found) == [(1, 2, 0.0, 40.0), (0, 4, 220.0, 0.0)]


def test_a_rank_whose_complete_steps_have_no_collective_has_no_waits() -> None:
    quiet = [step(number, 1_000.0 * number, 999) for number in range(4)]
    late = [event("user_annotation", "gloo:all_reduce", 5_300, 300, tid=2)]
    found = over(rank_table, [*quiet, *late], [*quiet, event("user_annotation", "gloo:all_reduce", 5_200, 400, tid=2)])
    assert waiting(found) == [(0, 4, None, None), (1, 4, None, None)]
    note = "rank 0 shares no collective with other ranks in its complete steps, so its waiting is unknown"
    assert note in found.notes


@pytest.fixture(scope="module")
def four_ranks() -> list[list[Event]]:
    return events_of(Job(ranks=4, steps=3, late={1: 300.0}))


def test_each_step_of_each_rank_has_its_time_and_its_waiting(four_ranks: list[list[Event]]) -> None:
    rows = over(rank_step_table, *four_ranks).rows()
    assert [(row["rank"], row["step"]) for row in rows] == [
        (rank, str(step)) for rank in range(4) for step in sorted({int(row["step"]) for row in rows})
    ]
    assert len(rows) == 12
    assert {row["rank"] for row in rows if row["waiting_us"] > 200} == {0, 2, 3}


def test_the_steps_of_a_rank_add_up_to_what_the_view_of_ranks_says(four_ranks: list[list[Event]]) -> None:
    rows = over(rank_step_table, *four_ranks).rows()
    for rank in over(rank_table, *four_ranks).rows():
        own = [row for row in rows if row["rank"] == rank["rank"]]
        assert sum(row["step_us"] for row in own) / len(own) == pytest.approx(rank["step_us"])
        assert sum(row["waiting_us"] for row in own) / len(own) == pytest.approx(rank["waiting_us"])
