"""What a job would gain if a rank were as fast as the others: predicted, and simulated with that rank changed."""

from dataclasses import replace
from pathlib import Path

import pytest
from kineto_trace.analysis.distributed.what_if_views import (
    NO_TIME,
    RankKernels,
    rank_kernels,
    rank_what_if,
    slower_kernels,
)
from kineto_trace.catalog.view_runner import run_view
from kineto_trace.collectives.rank_matching import NO_COLLECTIVES
from kineto_trace.open.trace_discovery import find_traces
from kineto_trace.view_api.result import Result
from support.trace_files.ranks import Event, context, event, launched, nccl, step
from support.trace_files.simulated.training_job import (
    SimulatedJob,
    SimulatedRun,
    ddp,
    fsdp,
    host_bound,
    launched_ahead,
    many_operators,
    simulate,
)
from support.trace_files.training_ranks import Job, events_of

DDP = Path(__file__).parents[4] / "data/h200/ddp4"
TOLERANCE = 0.02  # of the time that the job takes
JOBS = {
    "a sleep": fsdp(late={1: 15_000.0}),
    "a sleep in one of four": fsdp(ranks=4, late={3: 6_000.0}, steps=6),
    "slow kernels": fsdp(ranks=4, slow={2: 1.2}),
    "two slow ranks": fsdp(ranks=4, slow={2: 1.2, 3: 1.1}),
    "equal ranks": fsdp(ranks=4),
    "a sleep beside buckets": ddp(late={2: 3_000.0}),
    "slow kernels beside buckets": ddp(slow={1: 1.15}),
    "slow kernels hidden by transfers": ddp(transfer_us=2_500.0, slow={1: 1.1}),
    "transfers only": ddp(transfer_us=2_500.0),
    "a sleep where all hosts are late": host_bound(late=15_000.0),
    "late hosts": host_bound(late=0.0),
    "late hosts that never wait": host_bound(late=5_000.0, sync=False),
    "clocks of two hosts": ddp(
        late={2: 3_000.0}, hosts=("a", "a", "b", "b"), clock_us={2: 900.0, 3: 900.0}, numbered=True
    ),
}


def predicted(run: SimulatedRun) -> Result:
    return rank_what_if.combine([(rank, rank_what_if.partial(run.context(rank))) for rank in range(run.job.ranks)])


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
@pytest.mark.parametrize("seed", [0, 7])
def test_what_a_rank_costs_the_job_is_what_the_job_gains_without_it(job: SimulatedJob, seed: int) -> None:
    run = simulate(job, seed)
    savings = {row["rank"]: row["saving_us"] for row in predicted(run).rows() if row["rank"] is not None}
    gains = {rank: run.total_us - simulate(job.as_fast_as_the_others(rank), seed).total_us for rank in range(job.ranks)}
    assert savings == pytest.approx(gains, abs=TOLERANCE * run.total_us)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_free_transfers_gain_what_the_job_without_them_gains(job: SimulatedJob) -> None:
    run = simulate(job)
    free = tuple(replace(op, us=(0.0,) * job.ranks) if op.kind == "collective" else op for op in job.program)
    gain = run.total_us - simulate(replace(job, program=free)).total_us
    saving = sum(row["saving_us"] for row in predicted(run).rows() if row["collective"] is not None)
    assert saving == pytest.approx(gain, abs=TOLERANCE * run.total_us)


@pytest.mark.parametrize("slow", [1.0, 1.15])  # kernels of the rank that waits, beside which a collective runs
def test_what_a_sleep_before_the_first_launch_costs_is_what_the_job_gains_without_it(slow: float) -> None:
    run = simulate(launched_ahead(late=15_000.0, slow=slow))
    row = predicted(run).rows()[0]
    assert row["rank"] == 1
    gain = run.total_us - simulate(launched_ahead(slow=slow)).total_us
    assert row["saving_us"] == pytest.approx(gain, abs=TOLERANCE * run.total_us)


def test_the_rank_that_sleeps_comes_first_and_is_said_to_be_late_on_its_host() -> None:
    found = predicted(simulate(JOBS["a sleep"]))
    row = found.rows()[0]
    assert (row["change"], row["rank"]) == ("rank 1 as fast as the others", 1)
    assert row["saving_per_step_us"] == pytest.approx(15_000, rel=0.02)
    assert "most of it before all_gather of default_pg: its host is late" in row["about"]
    slow = predicted(simulate(JOBS["slow kernels"])).rows()
    about = next(row["about"] for row in slow if row["rank"] == 2)
    assert about.endswith("its kernels take longer")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_host_on_which_the_same_operators_take_longer_is_said_to_be_slower(ranks: int) -> None:
    row = predicted(simulate(many_operators(ranks=ranks, pace={1: 1.3}))).rows()[0]
    assert (row["rank"], row["cause"]) == (1, "the same operators take 1.30 times as long on its host")
    assert row["host_pace"] == pytest.approx(1.3, abs=0.01)
    assert row["about"].endswith(
        ": the same operators take 1.30 times as long on its host as on the other ranks (median over 10 operators): "
        "probably a slower or shared core; pin each rank to cores of its GPU's NUMA node, look for other programs "
        "there, and compare clock speeds"
    )


def test_a_slower_host_is_called_by_its_name_if_the_ranks_have_several() -> None:
    run = simulate(replace(many_operators(pace={1: 1.3}), hosts=("node0", "node1"), numbered=True))
    assert predicted(run).rows()[0]["cause"] == "the same operators take 1.30 times as long on its host (node1)"


@pytest.mark.parametrize("pace", [1.0, 1.12])
def test_a_rank_that_sleeps_is_late_although_its_operators_take_a_little_longer(pace: float) -> None:
    row = predicted(simulate(many_operators(pace={1: pace}, late={1: 3_000.0}))).rows()[0]
    assert (row["rank"], row["cause"], row["host_pace"]) == (1, "its host is late", None)
    assert row["about"].endswith("its host is late (see the views idle_causes and findings of this rank)")


def test_ranks_that_are_late_by_turns_are_not_told_to_have_less_than_no_work() -> None:
    steps = [fsdp(late={number % 2: 15_000.0}, steps=1, seed=number).program for number in range(6)]
    job = replace(fsdp(), program=tuple(op for step in steps for op in step))
    about = [row["about"] for row in predicted(simulate(job)).rows() if row["rank"] == 0]
    assert about == ["rank 0 has no more work than the others, but at different times: ranks take turns being late"]


def test_windows_that_begin_at_different_collectives_give_the_same_answer() -> None:
    job = fsdp(late={1: 15_000.0}, begin={1: 0.2}, steps=10)
    row = predicted(simulate(job)).rows()[0]
    assert row["rank"] == 1
    assert row["saving_per_step_us"] == pytest.approx(15_000, rel=0.13)  # one of the eight steps is cut


def test_what_cannot_be_matched_predicts_nothing() -> None:
    found = predicted(simulate(fsdp(end={0: 0.4}, begin={1: 0.5})))
    assert len(found) == 0
    assert "no time offset makes their times consistent" in found.notes[0]
    all_reduce = launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 0, 10, 10, 1)
    alone = rank_what_if(context(all_reduce))
    assert (len(alone), alone.notes[-1]) == (
        0,
        "no collective appears on more than one rank, so the ranks cannot be compared",
    )


def gloo(name: str, *parts: tuple[float, float]) -> list[Event]:
    """A step of 1 ms for each of these collectives, which begin and end so late (us) in it, on threads of their own."""
    events: list[Event] = []
    for number, (start, end) in enumerate(parts):
        at = 1_000.0 * number
        events.append(step(number, at, 999))
        events.append(event("user_annotation", name, at + start, end - start, tid=2 + number % 2))
    return events


def of_host(*ranks: list[Event]) -> Result:
    return rank_what_if.combine(
        [(rank, rank_what_if.partial(context(events, rank=rank, size=len(ranks)))) for rank, events in enumerate(ranks)]
    )


def test_collectives_on_the_host_bound_what_a_job_could_gain() -> None:
    name = "gloo:all_reduce"
    found = of_host(
        gloo(name, (300, 900), (300, 900), (700, 900)),
        gloo(name, (400, 900), (400, 900), (300, 900)),
        gloo(name, (800, 900), (700, 900), (600, 900)),
    )
    assert [(row["change"], row["saving_us"], row["saving_per_step_us"], row["about"]) for row in found.rows()] == [
        (
            "rank 2 never last",
            700.0,
            pytest.approx(700 / 3),
            "upper bound: the others waited for it in 2 collectives, 350 µs on average",
        ),
        (
            "all_reduce hidden or free",
            500.0,
            pytest.approx(500 / 3),
            "upper bound: 3 transfers of 167 µs on average, if the ranks waited for all of them",
        ),
        (
            "rank 0 never last",
            100.0,
            pytest.approx(100 / 3),
            "upper bound: the others waited for it in 1 collective, 100 µs on average",
        ),
        ("rank 1 never last", 0.0, 0.0, None),
    ]
    assert found.rows()[0]["saving_pct"] == pytest.approx(100 * 700 / 2600)
    assert found.notes[-1] == (
        "the collectives run on the host (gloo, MPI): no event shows when the training thread waited for them, so the "
        "job cannot be simulated, and the savings are upper bounds derived from the durations of the collectives"
    )


def test_collectives_on_the_host_in_which_nobody_has_to_meet_bound_their_transfers_alone() -> None:
    found = of_host(gloo("gloo:broadcast", (300, 900)), gloo("gloo:broadcast", (800, 900)))
    assert {row["change"]: row["saving_us"] for row in found.rows()} == {
        "broadcast hidden or free": 100.0,
        "rank 0 never last": 0.0,
        "rank 1 never last": 0.0,
    }


def test_traces_without_collectives_say_so() -> None:
    found = of_host([step(1, 0, 100)], [step(1, 0, 100)])
    assert (len(found), found.notes[-1]) == (0, f"{NO_COLLECTIVES}, so the ranks cannot be compared")


def test_collectives_that_take_no_time_predict_nothing() -> None:
    arguments = nccl("allreduce", 1 << 20, range(2), 1)
    ranks = [
        context(launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 20, 0, 1, stream=20, **arguments), rank=rank)
        for rank in range(2)
    ]
    found = rank_what_if.combine([(rank, rank_what_if.partial(each)) for rank, each in enumerate(ranks)])
    assert (found.rows(), found.notes[-1]) == ([], NO_TIME)
    on_the_host = of_host(gloo("gloo:all_reduce", (10, 10)), gloo("gloo:all_reduce", (10, 10)))
    assert (on_the_host.rows(), on_the_host.notes[-1]) == ([], NO_TIME)


def test_hosts_that_wait_unseen_make_the_answer_unknown() -> None:
    # hosts of these traces launch each kernel when the collective before it ends, without a call that waits for it
    ranks = events_of(Job(ranks=8, steps=3, late={5: 300.0}))
    found = rank_what_if.combine(
        [(rank, rank_what_if.partial(context(events, rank=rank, size=8))) for rank, events in enumerate(ranks)]
    )
    assert len(found) == 0
    assert "the ranks wait in ways that the traces do not show" in found.notes[-1]


def test_four_real_ranks_are_reproduced_and_hide_their_transfers() -> None:
    """Of tests/data/h200: transfers of 358 us run beside the backward pass of 18 ms, and all ranks are as fast."""
    found = run_view("rank_what_if", find_traces(DDP))
    told = "from the first collective to the last, the model of the job takes 80.1 ms (measured: 80.1 ms)"
    assert told in found.notes[-1]
    assert all(abs(row["saving_pct"]) < 0.5 for row in found.rows())


def test_collectives_that_one_rank_alone_has_are_told() -> None:
    partials = []
    for rank, missing in ((0, 0), (1, 6)):
        events: list[Event] = []
        for number in range(1, 12):
            arguments = nccl("allreduce", 1000, [0, 1], number)
            if number != missing:
                events += launched(
                    "ncclDevKernel_AllReduce", 1000 * number, 1000 * number + 20, 80, number, **arguments
                )
        partials.append((rank, rank_what_if.partial(context(events, rank=rank))))
    assert (
        "1 collective without a counterpart on another rank: durations stay as measured in every row, so savings may "
        "be too low"
    ) in rank_what_if.combine(partials).notes


KINDS = {"aten::mm": (100.0, 64), "aten::gelu": (20.0, 1000)}  # us and blocks of each kernel


def rank(*, calls: int = 4, rows: float = 1.0, speed: float = 1.0) -> RankKernels:
    """Three steps. calls: of aten::mm; rows: times as many, which grids of aten::mm do not show; speed: of kernels."""
    events: list[Event] = []
    for number in range(3):
        at = 2_000.0 * number
        events.append(step(number, at, 1_990))
        for place, name in enumerate(["aten::mm"] * calls + ["aten::gelu"] * 4):
            us, blocks = KINDS[name]
            begin = at + 10 + 150 * place
            grid = [round(blocks * rows) if name == "aten::gelu" else blocks, 1, 1]
            events.append(event("cpu_op", name, begin, 8))
            events += launched("k", begin + 2, begin + 10, us * rows / speed, 100 * number + place + 1, grid=grid)
    return context(events, rank=0, size=2).get(rank_kernels)


def test_an_operator_that_is_called_more_often_is_named() -> None:
    assert slower_kernels(rank(calls=6), [rank()]) == "it launches 6 kernels of aten::mm per step, the others 4"


def test_larger_grids_are_more_data_although_not_all_kernels_show_it() -> None:
    assert slower_kernels(rank(rows=1.6), [rank()]) == "its kernels work on 1.60 times as much data"


def test_equal_calls_and_grids_that_take_longer_are_slower_kernels() -> None:
    assert slower_kernels(rank(speed=0.8), [rank()]) == "its kernels take 1.25 times as long with equal grids"


def test_a_rank_whose_kernels_take_no_longer_has_no_reason() -> None:
    assert slower_kernels(rank(), [rank(speed=0.9)]) is None
    assert slower_kernels(rank(), []) is None
