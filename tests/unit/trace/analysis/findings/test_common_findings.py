"""The findings of a job: what it would gain, not what its ranks lose.

Savings by running the steps again, and without what recording cost."""

import cProfile
from dataclasses import replace
from statistics import median_low
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from kineto_trace.analysis.cause_views import CAUSES
from kineto_trace.analysis.distributed.what_if_views import rank_what_if
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings import finding_views
from kineto_trace.analysis.findings.common_findings import SMALL_COLLECTIVES as SMALL
from kineto_trace.analysis.findings.common_findings import (
    _Gains,
    _Middle,
    _of_the_job,
    common_findings,
    operators_and_launches,
    recording_note,
    small_collectives,
    with_replay,
    without_recording,
)
from kineto_trace.analysis.findings.finding_views import findings, findings_view
from kineto_trace.analysis.step_replay import ReplayChange, step_replay
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import View
from support.trace_files.ranks import Event, context, event, launched, nccl, step
from support.trace_files.sampled_stacks import MAIN, stack_rows
from support.trace_files.simulated.host_and_gpu import US, Program, absolute
from support.trace_files.simulated.training_job import SimulatedJob, ddp, fsdp, many_operators, simulate
from support.trace_files.traces import START_NS, target, trace

Row = dict[str, Any]
SLOW_CORE = (
    "Pin each rank to cores of its GPU's NUMA node, look for other programs there, and compare clock speeds: rank 1 "
    "probably runs on a slower or shared core (the same operators take 1.30 times as long on its host)."
)
STEPS = 5
FINDING = Finding(name="x", title="X", saving_ns=100 * US, advice="", evidence="")


def of_job(job: SimulatedJob) -> list[Row]:
    """The findings of all ranks of a simulated job."""
    contexts = [simulate(job).context(rank) for rank in range(job.ranks)]
    found, what_if = (
        view.combine([(rank, view.partial(context)) for rank, context in enumerate(contexts)])
        for view in (findings_view, rank_what_if)
    )
    return common_findings(found, job.ranks, what_if).rows()


def gain(job: SimulatedJob, rank: int) -> float:
    """What the job would gain if the rank were as fast as the others (%)."""
    total = simulate(job).total_us
    return 100 * (1 - simulate(job.as_fast_as_the_others(rank)).total_us / total)


@pytest.mark.parametrize("job", [fsdp(late={1: 15_000.0}), fsdp(ranks=4, late={1: 6_000.0}, steps=6)])
def test_what_makes_one_rank_late_says_so_and_saves_what_the_job_gains_without_it(job: SimulatedJob) -> None:
    (found,) = (row for row in of_job(job) if row["title"].endswith("the others wait for rank 1"))
    assert (found["rank"], found["finding"]) == (1, "synchronisation")
    assert found["saving_pct"] == pytest.approx(gain(job, 1), abs=5.0)


def test_work_that_all_hosts_have_and_a_slower_one_for_longer_has_the_advice_to_get_a_faster_one() -> None:
    first = of_job(many_operators(pace={1: 1.3}))[0]
    assert (first["rank"], first["finding"]) == (1, "host_bound")
    assert first["title"] == "The GPU waits for the host to launch work (on 2 of 2 ranks)"
    assert first["advice"].startswith(f"{SLOW_CORE} Give the GPU more work per launch")


def slower_host(**found: Any) -> list[Row]:
    """The findings of a job whose rank 1 has this finding and a slower host, for which rank 0 waits."""
    late = {"rank": 1, "saving_us": 18.0, "saving_pct": 18.0, "more_work_us": 18.0, "change": "", "about": ""}
    slow = {**late, "cause": "the same operators take 1.30 times as long on its host", "host_pace": 1.3}
    even = {**late, "rank": 0, "saving_us": 0.0, "saving_pct": 0.0, "more_work_us": 0.0}
    rows = [{"rank": 1, "saving_pct": 18.0, "saving_us": 18.0, **found}] if found else []
    return common_findings(result(findings_view, *rows), 2, result(rank_what_if, slow, even)).rows()


def test_the_work_of_a_slower_host_that_others_do_not_have_says_so_and_how_to_get_a_faster_one() -> None:
    (found,) = slower_host(finding="host_bound", title="The GPU waits", advice="Launch less.")
    assert found["title"] == (
        "The GPU waits; the others wait for rank 1, since the same operators take 1.30 times as long on its host"
    )
    assert found["advice"] == f"{SLOW_CORE} Launch less."


def test_a_slower_host_is_no_reason_of_findings_about_other_things_than_its_work() -> None:
    (found,) = slower_host(finding="host_sleep", title="publish sleeps", advice="Sleep less.")
    assert found["title"] == "publish sleeps; the others wait for rank 1"
    assert found["advice"].startswith("Sleep less. The other ranks wait for this")


def test_a_slower_host_without_other_findings_is_a_slow_rank_with_the_same_advice() -> None:
    (found,) = slower_host()
    assert found["title"] == ("The other ranks wait for rank 1: the same operators take 1.30 times as long on its host")
    assert found["advice"] == SLOW_CORE


@pytest.mark.parametrize(("job", "rank"), [(fsdp(ranks=4, slow={2: 1.2}), 2), (ddp(slow={1: 1.2}), 1)])
def test_a_rank_whose_kernels_take_longer_is_a_finding_by_itself(job: SimulatedJob, rank: int) -> None:
    (found,) = (row for row in of_job(job) if row["finding"] == "slow_rank")
    assert (found["rank"], found["title"]) == (
        rank,
        f"The other ranks wait for rank {rank}: its kernels take 1.20 times as long",
    )
    assert found["saving_pct"] == pytest.approx(gain(job, rank), abs=1.0)
    assert "its kernels take longer" in found["evidence"]


@pytest.mark.parametrize("job", [fsdp(late={1: 15_000.0}), ddp(slow={1: 1.15}), fsdp(ranks=2)])
def test_waiting_for_another_rank_is_no_finding_of_the_rank_that_waits(job: SimulatedJob) -> None:
    assert "waiting_in_collectives" not in {row["finding"] for row in of_job(job)}


def test_equal_ranks_have_no_slow_rank() -> None:
    assert "slow_rank" not in {row["finding"] for row in of_job(fsdp(ranks=4))}


def test_ranks_that_are_late_by_turns_are_no_slow_ranks() -> None:
    steps = [fsdp(late={number % 2: 15_000.0}, steps=1, seed=number).program for number in range(6)]
    job = replace(fsdp(), program=tuple(op for step in steps for op in step))
    assert min(gain(job, 0), gain(job, 1)) > 5
    assert not any("wait for rank" in row["title"] for row in of_job(job))


def result(view: View, *rows: Row) -> Result:
    """A result of this view; columns that are not given are empty."""
    table = pa.Table.from_pylist(list(rows), schema=view.combine([]).table.schema)
    made: Result = replace(view.combine([]), table=table)
    return made


def test_what_the_others_wait_for_is_told_so_with_what_to_do_about_it() -> None:
    finding = {"finding": "user_code", "title": "publish sleeps", "advice": "Sleep less."}
    losses = result(
        findings_view, {**finding, "rank": 0, "saving_pct": 0.0, "saving_us": 0.0},
        {**finding, "rank": 1, "saving_pct": 20.0, "saving_us": 20.0},
    )  # fmt: skip
    late = {"rank": 1, "saving_us": 18.0, "saving_pct": 18.0, "more_work_us": 18.0, "change": "", "about": ""}
    even = {**late, "rank": 0, "saving_us": 0.0, "saving_pct": 0.0, "more_work_us": 0.0}
    first = common_findings(losses, 2, result(rank_what_if, late, even)).rows()[0]
    assert (first["title"], first["saving_pct"]) == ("publish sleeps; the others wait for rank 1", 20.0)
    assert first["advice"].startswith("Sleep less. The other ranks wait for this: give all ranks equal shares")


def test_what_a_rank_does_not_work_more_than_the_others_counts_as_theirs_too() -> None:
    kind = {"finding": "host_bound", "title": "x"}
    own = (5.0, 25.0)
    losses = result(
        findings_view, *({**kind, "rank": rank, "saving_pct": pct, "saving_us": pct} for rank, pct in enumerate(own))
    )
    late = {"rank": 1, "saving_us": 6.0, "saving_pct": 6.0, "more_work_us": 4.0, "change": "", "about": ""}
    even = {**late, "rank": 0, "saving_us": 0.0, "saving_pct": 0.0, "more_work_us": 0.0}
    first = common_findings(losses, 2, result(rank_what_if, late, even)).rows()[0]
    assert (first["rank"], first["saving_pct"]) == (1, 25.0)


def test_transfers_save_no_more_than_the_job_gains_without_them() -> None:
    job = ddp(transfer_us=2_500.0, slow={1: 1.1})
    saved = [row["saving_pct"] for row in of_job(job) if row["finding"] == "exposed_communication"]
    contexts = [(rank, simulate(job).context(rank)) for rank in range(job.ranks)]
    free = rank_what_if.combine([(rank, rank_what_if.partial(context)) for rank, context in contexts]).rows()
    assert all(each <= sum(row["saving_pct"] for row in free if row["collective"]) + 1e-6 for each in saved)
    assert saved


@pytest.mark.parametrize(
    "values", [[3.0], [3.0, 1.0], [2.0, 2.0, 5.0], [0.0, 0.0, 4.0, 1.0], [9.0, 7.0, 1.0, 3.0, 3.0]]
)
def test_the_middle_of_the_other_ranks_is_the_lower_of_two(values: list[float]) -> None:
    middle = _Middle(values)
    for place, own in enumerate(values):
        others = [*values[:place], *values[place + 1 :]]
        assert middle.without(own) == (median_low(others) if others else 0.0)


def calls_for(ranks: int) -> int:
    """How many functions are called to put together the findings of so many ranks, all of which have three kinds."""
    gains = _Gains(
        {rank: {"saving_pct": 1.0, "saving_us": 5.0, "more_work_us": 3.0, "cause": "", "change": "", "about": ""}
         for rank in range(ranks)}, 0.0
    )  # fmt: skip
    figures = {"saving_us": 5.0, "saving_pct": 1.0, "saving_per_step_us": 1.0, "uncertainty_pct": None}
    rows = [
        {"rank": rank, "finding": kind, "title": kind, "guess": False, **figures}
        for rank in range(ranks)
        for kind in ("one", "two", "three")
    ]
    profile = cProfile.Profile()
    profile.runcall(_of_the_job, rows, gains, range(ranks))
    return sum(entry.callcount for entry in profile.getstats())


def test_the_work_for_twice_as_many_ranks_is_twice_as_much() -> None:
    assert calls_for(200) < 2.5 * calls_for(100)


@pytest.mark.parametrize(
    ("ranks", "where"), [((0, 0, 0), "in 3 of 4 captures"), ((0, 0, 1), "in 3 of 4 captures, on 2 of 2 ranks")]
)
def test_captures_of_one_process_are_no_ranks(ranks: tuple[int, ...], where: str) -> None:
    finding = {"finding": "host_sleep", "title": "publish sleeps", "saving_us": 9.0, "saving_pct": 90.0}
    losses = result(findings_view, *({**finding, "rank": rank} for rank in ranks))
    slow = {"rank": 0, "saving_us": 18.0, "saving_pct": 18.0, "more_work_us": 18.0, "change": "", "about": ""}
    (found,) = common_findings(losses, len(set(ranks)), result(rank_what_if, slow), traces=4).rows()
    assert (found["title"], found["saving_pct"]) == (f"publish sleeps ({where})", 90.0)


def found(**options: float) -> list[Finding]:
    """The findings of this kind."""
    return list(small_collectives(small_steps(**options)))


def small_steps(*, collectives: float, elements: float, busy_us: float = 0.0) -> Context:
    """Steps of 2 ms, in which the host spends 50 us in each all_reduce of float32. busy_us: of a kernel beside them."""
    events: list[Event] = []
    for number in range(STEPS):
        at = 2_000.0 * number
        events.append(step(number, at, 2_000))
        events += launched("gemm", at + 1, at + 10, max(busy_us, 1), 1_000 * number + 900)
        for place in range(int(collectives)):
            begin, key = at + 20 + 60 * place, 1_000 * number + place
            events.append(event("cpu_op", "c10d::allreduce_", begin, 50))
            arguments = nccl("allreduce", int(elements), [0, 1], key)
            kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
            events += launched(kernel, begin + 40, begin + 50, 5, key, stream=20, **arguments)
    return context(events)


def test_small_collectives_save_the_hosts_time_in_all_but_those_that_their_bytes_need() -> None:
    (finding,) = found(collectives=30, elements=1_000)
    assert finding.title == "The GPU is idle while the host calls many small collectives, mostly all_reduce"
    assert finding.saving_ns == pytest.approx(STEPS * 29 * 50_000, rel=0.02)
    assert finding.evidence.startswith("each step has 30 collectives smaller than 4 MiB (3.906 KiB on average)")


@pytest.mark.parametrize(
    ("collectives", "elements", "busy_us"),
    [(10, 1_000, 0.0), (30, 10_000_000, 0.0), (30, 1_000, 1_985.0)],
    ids=["few", "large", "while the GPU computes"],
)
def test_few_or_large_ones_or_those_beside_work_of_the_gpu_are_no_finding(
    collectives: int, elements: int, busy_us: float
) -> None:
    assert sum(each.saving_ns for each in found(collectives=collectives, elements=elements, busy_us=busy_us)) < 200_000


def test_what_is_in_small_collectives_is_not_launch_time_too() -> None:
    every = findings(small_steps(collectives=30, elements=1_000)).findings
    small, launches = (sum(each.saving_ns for each in every if each.name == name) for name in (SMALL, "host_bound"))
    assert small > 7_000_000
    assert launches < 1_500_000


def program(gap: int = 100 * US, kernel: int = 50 * US) -> Program:
    """The GPU waits for operators before each launch."""
    made = Program()
    for _ in range(20):
        made.operator(length=gap)
        made.host(gap)
        made.launch(kernel)
    made.wait()
    return made


def several_gpus() -> Context:
    """A trace that cannot be run again."""
    made = program()
    made.rows["kernel"][0]["device"] = 1
    return made.context(step_ratio=1.5)


def test_a_finding_takes_the_saving_of_the_steps_run_again() -> None:
    context = program().context()
    found = with_replay(context, FINDING, ReplayChange(left_out=absolute((0, 60 * US))))
    assert (found.saving_ns, found.replayed, found.causes) == (60 * US, True, CAUSES)


def test_a_finding_stays_as_it_is_where_the_steps_cannot_be_run_again() -> None:
    assert with_replay(several_gpus(), FINDING, ReplayChange(left_out=absolute((0, 60 * US)))) is FINDING


def test_operators_and_launches_are_those_of_threads_that_launch() -> None:
    made = Program()
    made.operator(length=10 * US)
    made.host(20 * US)
    made.launch(50 * US)
    made.operator(length=5 * US)
    made.rows["cpu_op"][-1]["thread"] = 2
    made.host(20 * US)
    made.wait()
    found = operators_and_launches(made.context())
    assert [(found.start - START_NS).tolist(), (found.end - START_NS).tolist()] == [
        [0, 20 * US],
        [10 * US, 24 * US],
    ]


def test_time_of_the_gpu_is_a_larger_part_of_steps_without_recording() -> None:
    context = program().context(step_ratio=1.25)
    replay = context.get(step_replay)
    assert replay is not None
    found = without_recording(context, replace(FINDING, causes=("matrix_products",)))
    assert found.saving_ns == int(100 * US * replay.slowdown) > 100 * US


def test_idle_time_was_partly_due_to_recording() -> None:
    context = program().context(step_ratio=1.25)
    assert without_recording(context, replace(FINDING, causes=("operators",))).saving_ns < 100 * US


def test_savings_of_steps_run_again_are_without_recording_already() -> None:
    context, finding = program().context(step_ratio=1.25), replace(FINDING, replayed=True)
    assert without_recording(context, finding) is finding


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_recording_that_cost_nothing_changes_nothing(ratio: float) -> None:
    context = program().context(step_ratio=ratio)
    assert without_recording(context, FINDING) is FINDING
    assert recording_note(context) is None


def test_no_finding_saves_more_than_the_steps_take() -> None:
    made = program()
    context = made.context(least_step_ratio=1.25)
    assert without_recording(context, replace(FINDING, saving_ns=made.now)).saving_ns == made.now


def test_what_recording_cost_is_said() -> None:
    note = recording_note(program().context(step_ratio=1.25))
    assert note is not None
    assert note.startswith("iterations took 1.25 times as long while recorded")
    note = recording_note(program().context(least_step_ratio=1.25))
    assert note is not None
    assert note.startswith("iterations took at least 1.25 times as long while recorded")
    assert recording_note(several_gpus()) is None


def test_waits_that_the_host_needs_not_are_found_with_what_they_save() -> None:
    made = Program()
    for _ in range(20):
        made.operator(length=40 * US)
        made.host(40 * US)
        made.launch(100 * US)
        made.wait()
    context = made.context()
    (finding,) = (each for each in findings(context).findings if each.name == "synchronisation")
    replay = context.get(step_replay)
    assert replay is not None
    assert finding.replayed
    assert finding.saving_ns == pytest.approx(made.now - 20 * 100 * US, abs=50 * US)  # all but the GPU's work


def test_a_host_that_is_late_is_found_with_what_faster_operators_save() -> None:
    made = program()
    (finding,) = (each for each in findings(made.context()).findings if each.name == "host_bound")
    assert finding.replayed
    assert finding.saving_ns == pytest.approx(made.now - 20 * 50 * US, abs=20 * US)


def test_a_host_that_is_late_after_each_wait_alone_is_told_by_the_waits() -> None:
    """Without waiting it would be far ahead: faster operators would gain nothing then."""
    made = Program()
    for _ in range(20):
        for kernel in (10 * US, 10 * US, 10 * US, 170 * US):
            made.operator(length=20 * US)
            made.host(20 * US)
            made.launch(kernel)
        made.wait()
    saved = {each.name: each.saving_ns for each in findings(made.context()).findings}
    assert saved["synchronisation"] == pytest.approx(made.now - 20 * 200 * US, abs=100 * US)
    assert saved.get("host_bound", 0) < 0.05 * saved["synchronisation"]


def test_a_host_that_recording_made_late_is_told_with_what_it_would_gain() -> None:
    def evidence(ratio: float) -> str:
        context = program(gap=20 * US, kernel=10 * US).context(step_ratio=ratio)
        return next(each.evidence for each in findings(context).findings if each.name == "host_bound")

    assert "in addition to the other findings" not in evidence(1.0)
    assert evidence(1.6).endswith(" of that in addition to the other findings")


def test_a_host_that_is_ahead_is_no_finding() -> None:
    names = {each.name for each in findings(program(gap=10 * US, kernel=100 * US).context()).findings}
    assert not names & {"host_bound", "synchronisation"}


def test_allocations_are_found_with_what_they_save() -> None:
    made = program(gap=10 * US, kernel=20 * US)
    made.host(100 * US)
    made.call("cudaMalloc", 2000 * US)
    made.launch(100 * US)
    made.wait()
    (finding,) = (each for each in findings(made.context()).findings if each.name == "allocation")
    assert (finding.replayed, finding.saving_ns) == (True, 2000 * US)


def broken(saving: int, context: Context) -> Finding:
    """The finding of graph breaks, which alone would save so much."""
    alone = replace(FINDING, name="graph_breaks", saving_ns=saving, causes=("operators",))
    return finding_views._launches_between_pieces(context, alone)


def test_graph_breaks_keep_their_saving_where_launches_ahead_would_save_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding_views, "compiled_pieces", lambda context: 2.0)
    made = program()
    context = made.context()
    idle = made.now - 20 * 50 * US
    more = broken(saving=idle * 3 // 4, context=context)
    assert (more.saving_ns, more.replayed) == (idle * 3 // 4, False)
    less = broken(saving=idle // 4, context=context)
    assert less.replayed
    assert less.saving_ns == pytest.approx(idle / 2, abs=20 * US)


def named(name: str, saving: int, *, where: str = "", evidence: str = "") -> Finding:
    return replace(FINDING, name=name, saving_ns=saving, where=where, evidence=evidence)


def test_the_hosts_launches_lose_what_other_findings_name() -> None:
    host = named("host_bound", 100, evidence="e")
    parts = [named("small_collectives", 30), named("graph_breaks", 50)]
    found = finding_views._without_parts([host, *parts])
    assert [each.saving_ns for each in found] == [20, 30, 50]
    assert found[0].evidence.startswith("e; ")
    assert found[0].evidence.endswith(" of it is counted in another finding")
    assert [each.saving_ns for each in finding_views._without_parts([named("host_bound", 60), *parts])] == [0, 30, 50]
    assert finding_views._without_parts([host]) == [host]


def test_findings_without_functions_stay_beside_one_of_compiling() -> None:
    compiling = named("recompilation", 100, where="f (/job/a.py:1)")
    other = named("host_python", 50)
    assert list(finding_views._without_compiling(program().context(), [compiling, other])) == [compiling, other]


@pytest.mark.parametrize(("saving", "stays"), [(50, False), (100, False), (200, True)])
def test_idle_time_in_a_function_that_is_compiled_meanwhile_is_told_by_the_compiling(saving: int, stays: bool) -> None:
    context = Context(trace({"python_function": stack_rows([MAIN])}, target=target()))
    frame = len(context.trace.table("python_function")) - 1
    compiling = named("recompilation", 100, where="main (/job/train.py:10)")
    idle = replace(named("host_python", saving), frame=frame)
    assert list(finding_views._without_compiling(context, [compiling, idle])) == [compiling, idle][: 1 + stays]


def test_savings_are_shares_of_the_steps_whatever_is_replayed() -> None:
    for ratio in (0.0, 1.1, 5.0):
        told = findings(program().context(step_ratio=ratio))
        savings = np.array([each.saving_ns for each in told.findings])
        assert len(savings)
        assert (savings > 0).all()
        assert (savings <= told.window_ns).all()
