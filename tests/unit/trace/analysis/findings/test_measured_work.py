"""Savings by running the steps again, and without what recording cost."""

from dataclasses import replace

import numpy as np
import pytest
from kineto_trace.analysis.cause_views import CAUSES
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings import finding_views
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.analysis.findings.measured_work import (
    operators_and_launches,
    recording_note,
    with_replay,
    without_recording,
)
from kineto_trace.analysis.step_replay import ReplayChange, step_replay
from kineto_trace.model.context import Context
from support.trace_files.sampled_stacks import MAIN, stack_rows
from support.trace_files.simulated.host_and_gpu import US, Program, absolute
from support.trace_files.traces import START_NS, target, trace

FINDING = Finding(name="x", title="X", saving_ns=100 * US, advice="", evidence="")


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
    assert note.startswith("iterations took 1.25 times as long while they were recorded")
    note = recording_note(program().context(least_step_ratio=1.25))
    assert note is not None
    assert note.startswith("iterations took at least 1.25 times as long while they were recorded")
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

    assert "beside other findings" not in evidence(1.0)
    assert evidence(1.6).endswith(" of that beside other findings")


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
    assert found[0].evidence.endswith(" of it is in another finding")
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
