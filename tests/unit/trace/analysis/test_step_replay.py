"""What the steps would take without something: host and GPU run again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_trace.analysis import step_replay as replaying
from kineto_trace.analysis.distributed.rank_simulation import LAUNCH_NS
from kineto_trace.analysis.host_time.moment_classes import framework_calls
from kineto_trace.analysis.step_replay import (
    MAX_ERROR,
    FunctionSlots,
    ReplayChange,
    StepReplay,
    allocating_calls,
    function_slots,
    step_replay,
)
from kineto_trace.arrays.intervals import Union
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu
from support.trace_files.sampled_stacks import MAIN, PERIOD_NS, Sample, sampled, sampled_trace
from support.trace_files.simulated.host_and_gpu import LAUNCH, US, Program, absolute
from support.trace_files.traces import START_NS, trace

lengths = st.integers(0, 300).map(lambda us: us * US)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("host"), lengths),
        st.tuples(st.just("launch"), lengths),
        st.tuples(st.just("graph"), lengths),
        st.tuples(st.just("allocate"), lengths),
        st.tuples(st.just("wait"), st.just(0)),
    ),
    min_size=1,
    max_size=40,
)
spans = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted), max_size=4)
CROP, BLUR = (*MAIN, "/job/a.py(1): crop"), (*MAIN, "/job/b.py(2): blur")


def replay_of(context: Context) -> StepReplay:
    found = context.get(step_replay)
    assert found is not None
    return found


def saved(context: Context, change: ReplayChange) -> int:
    """What a change saves, in ns."""
    found = replay_of(context)
    return round(found.share(change) * found.base_ns)


def named(context: Context, name: str) -> Any:
    found = context.get(calls)
    return np.array([context.trace.strings[number] == name for number in found.name])


def waiting(count: int = 10, host: int = 50 * US, kernel: int = 100 * US) -> Program:
    """Each time, the host works, launches a kernel and waits for it."""
    program = Program()
    for _ in range(count):
        program.host(host)
        program.launch(kernel)
        program.wait()
    return program


def ahead(count: int = 10, host: int = 20 * US, kernel: int = 100 * US) -> Program:
    """The host launches kernels, and waits once at the end."""
    program = Program()
    for _ in range(count):
        program.host(host)
        program.launch(kernel)
    program.wait()
    return program


def test_the_steps_take_as_long_as_they_took() -> None:
    for program in (waiting(), ahead(), ahead(host=200 * US)):
        found = replay_of(program.context())
        assert (found.base_ns, found.recorded_ns, found.error) == (program.now, program.now, 0)
        assert (found.slowdown, found.event_cost_ns) == (1, 0)


def test_without_its_waits_the_host_runs_ahead() -> None:
    program = waiting(count=10, host=50 * US, kernel=100 * US)
    context = program.context()
    first = 50 * US + LAUNCH_NS  # then the GPU is never idle again
    assert (
        program.now - saved(context, ReplayChange(unwaited=named(context, "cudaStreamSynchronize")))
        == first + 1000 * US
    )


def test_without_its_waits_a_slow_host_saves_only_the_wait() -> None:
    program = waiting(count=10, host=200 * US, kernel=50 * US)
    context = program.context()
    left = program.now - saved(context, ReplayChange(unwaited=named(context, "cudaStreamSynchronize")))
    call = 2 * replaying.WAIT_NS  # itself, and after the GPU was done
    assert left == 9 * (200 * US + LAUNCH + call) + 200 * US + LAUNCH_NS + 50 * US


def test_a_function_of_the_host_costs_nothing_while_the_gpu_is_behind() -> None:
    program = Program()
    program.launch(2000 * US)
    gone = program.host(300 * US)
    program.launch(100 * US)
    program.wait()
    assert saved(program.context(), ReplayChange(left_out=absolute(gone))) == 0


def test_a_function_of_the_host_costs_its_time_where_the_gpu_waits_for_it() -> None:
    program = Program()
    program.launch(US)
    gone = program.host(300 * US)
    program.launch(100 * US)
    program.wait()
    assert saved(program.context(), ReplayChange(left_out=absolute(gone))) == 300 * US


def test_a_function_that_is_left_out_takes_its_calls_and_their_work_with_it() -> None:
    program = waiting(count=3)
    begin = program.now
    program.host(50 * US)
    program.launch(100 * US)
    program.wait()
    gone = begin, program.now
    program.host(50 * US)
    program.launch(100 * US)
    program.wait()
    context = program.context()
    assert saved(context, ReplayChange(left_out=absolute(gone))) == gone[1] - gone[0]
    host = 50 * US + LAUNCH + LAUNCH_NS  # the work stays, and the wait for it
    assert 0 < saved(context, ReplayChange(faster=absolute(gone))) <= host


def test_time_of_one_thread_that_is_left_out_takes_no_work_of_another_with_it() -> None:
    program = waiting(count=10, host=50 * US, kernel=100 * US)
    context = program.context()
    whole = absolute((0, program.now))
    assert saved(context, ReplayChange(left_out=whole, thread=2)) == 0
    assert saved(context, ReplayChange(left_out=whole, thread=1)) == program.now


def test_a_host_of_half_the_pace_takes_half_its_time_and_the_gpu_all_of_it() -> None:
    program = waiting(count=10, host=50 * US, kernel=100 * US)
    context = program.context()
    pace = np.full(len(context.get(calls)), 0.5)
    assert saved(context, ReplayChange(pace=pace)) == pytest.approx(10 * 25 * US, rel=0.1)
    assert saved(context, ReplayChange(pace=np.ones(len(pace)))) == 0


def test_time_that_is_both_left_out_and_faster_goes_once() -> None:
    program = Program()
    gone = program.host(100 * US)
    program.host(100 * US)
    program.launch(100 * US)
    program.wait()
    context = program.context()
    both = ReplayChange(left_out=absolute(gone), faster=absolute(gone))
    assert saved(context, both) == saved(context, ReplayChange(left_out=absolute(gone))) == 100 * US


def test_the_time_after_the_last_call_goes_too() -> None:
    program = ahead()
    gone = program.host(200 * US)
    program.host(100 * US)
    context = program.context()
    assert saved(context, ReplayChange(left_out=absolute(gone))) == 200 * US
    assert saved(context, ReplayChange(left_out=absolute(gone), faster=absolute(gone))) == 200 * US


def test_work_goes_with_the_calls_that_launch_nothing_else() -> None:
    program = Program()
    program.host(10 * US)
    program.launch(50 * US, 50 * US)  # as a CUDA graph does
    program.wait()
    context = program.context()
    first, second = np.array([True, False]), np.array([True, True])
    assert saved(context, ReplayChange(work=first)) == 50 * US
    # without all of its work, the call and the host's time before it go; what waits has nothing to wait for
    assert program.now - saved(context, ReplayChange(work=second)) == 2 * replaying.WAIT_NS


def test_faster_operators_never_save_more_than_the_idle_time() -> None:
    program = waiting()
    context = program.context()
    everything = absolute((0, program.now))
    found = replay_of(context)
    assert saved(context, ReplayChange(faster=everything)) <= found.base_ns - found.busy_ns
    assert found.busy_ns == 10 * 100 * US


def test_calls_that_allocate_go_by_themselves() -> None:
    program = Program()
    program.launch(10 * US)
    program.call("cudaMalloc", 500 * US)
    program.call("cudaMallocAsync", 100 * US)
    program.launch(100 * US)
    program.wait()
    context = program.context()
    assert context.get(allocating_calls).tolist() == [False, True, False, False, False]
    assert saved(context, ReplayChange(calls=context.get(allocating_calls))) == 500 * US


def recorded(program: Program, ratio: float) -> StepReplay:
    return replay_of(program.context(step_ratio=ratio))


def recorded_program(kernel: int, recording: int = 10) -> Program:
    """Each launch is after so many operators, of 4 us each."""
    program = Program()
    for _ in range(50):
        for _ in range(recording):
            program.operator(length=3 * US)
            program.host(4 * US)
        program.launch(kernel)
    program.wait()
    return program


def test_without_what_recording_took_the_steps_take_as_long_as_before() -> None:
    program = recorded_program(kernel=10 * US)
    found = recorded(program, 1.25)
    assert found.base_ns == pytest.approx(program.now / 1.25, rel=0.005)
    assert found.slowdown == pytest.approx(1.25, rel=0.005)
    assert found.event_cost_ns > 0


def test_recording_never_took_time_of_the_gpu() -> None:
    program = recorded_program(kernel=100 * US)
    found = recorded(program, 2.0)
    assert found.busy_ns <= found.base_ns <= program.now
    assert found.slowdown < 1.05


def test_recording_that_does_not_explain_the_ratio_took_no_more_than_what_it_explains() -> None:
    program = recorded_program(kernel=100 * US)  # the GPU is what limits
    assert recorded(program, 2.0).event_cost_ns < 0.2 * replaying.MOST_COST_NS


def test_recording_never_took_all_of_the_hosts_time() -> None:
    program = recorded_program(kernel=US)
    found = recorded(program, 1000.0)
    assert found.base_ns >= replaying.LEAST_LEFT * program.now
    assert 0 <= found.share(ReplayChange(faster=absolute((0, program.now)))) <= 1


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_recording_that_took_no_time_changes_nothing(ratio: float) -> None:
    found = recorded(recorded_program(kernel=US), ratio)
    assert (found.base_ns, found.event_cost_ns) == (found.recorded_ns, 0)


def test_several_gpus_are_not_run_again() -> None:
    program = waiting()
    for number, row in enumerate(program.rows["kernel"]):
        row["device"] = number % 2
    assert program.context().get(step_replay) is None


def test_traces_without_calls_or_work_or_anything_are_not_run_again() -> None:
    program = waiting()
    del program.rows["cuda_runtime"]
    for context in (program.context(), Program(now=1000).context(), Context(trace({}, length_ns=0))):
        assert context.get(step_replay) is None


def test_work_without_a_launch_takes_its_time_again() -> None:
    program = waiting()
    program.rows["kernel"][3]["correlation"] = 0
    context = program.context()
    assert replay_of(context).base_ns == program.now
    assert int(np.count_nonzero(context.get(gpu).call < 0)) == 1


def test_calls_without_work_of_theirs_have_nothing_to_wait_for() -> None:
    program = waiting(count=3)
    program.call("cudaStreamSynchronize", 10 * US)
    found = replay_of(program.context())
    assert found.base_ns == program.now


def test_streams_that_overlap_take_as_long_as_they_took() -> None:
    program = waiting()
    for row in list(program.rows["kernel"]):
        more = {"start": row["start"] + 10 * US, "duration": 20 * US, "stream": 8}  # while the other one runs
        program.rows["kernel"].append({**row, **more})
    assert replay_of(program.context()).base_ns == program.now


def test_a_wait_for_a_stream_that_is_done_earlier_than_another_is_none_for_both() -> None:
    program = Program()
    program.launch(1000 * US)
    began = program.now
    number = program.call("cudaLaunchKernel")
    short = {"name": "s", "start": began + 6 * US, "duration": 20 * US, "correlation": number, "stream": 8}
    program.rows["kernel"].append(short)
    program.call("cudaStreamSynchronize", began + 28 * US - program.now)  # for the short one
    program.host(3000 * US)
    program.launch(100 * US)
    program.wait()
    found = replay_of(program.context())
    assert found.base_ns == program.now


def test_a_call_that_lasts_beside_those_of_another_thread_does_not_hold_them_up() -> None:
    program = Program()
    program.host(10 * US)
    program.call("cudaHostAlloc", 900 * US, thread=2)
    program.now -= 890 * US  # the training thread goes on
    for _ in range(5):
        program.host(100 * US)
        program.launch(50 * US)
    program.wait()
    found = replay_of(program.context())
    assert found.base_ns == program.now


def test_a_call_in_another_one_takes_its_time_once() -> None:
    program = waiting(count=3)
    begin = program.now
    program.call("cudaMalloc", 500 * US)
    inner = {"name": "cuMemCreate", "start": begin + 10 * US, "duration": 480 * US, "thread": 1, "correlation": 99}
    program.rows["cuda_driver"] = [inner]
    program.host(10 * US)
    program.launch(100 * US)
    program.wait()
    context = program.context()
    assert replay_of(context).base_ns == program.now
    assert saved(context, ReplayChange(calls=context.get(allocating_calls))) == pytest.approx(500 * US, abs=10 * US)


def test_a_thread_that_waits_for_what_another_launches_meanwhile_is_no_circle() -> None:
    program = Program()
    program.host(10 * US)
    program.launch(100 * US)
    waits = program.now
    program.now += 50 * US
    program.call("cudaLaunchKernel", LAUNCH, thread=2)
    number = len(program.rows["cuda_runtime"])
    program.rows["kernel"].append({"name": "k", "start": waits + 110 * US, "duration": 50 * US, "correlation": number})
    program.now = waits
    program.call("cudaStreamSynchronize", 170 * US)
    program.host(100 * US)
    program.launch(100 * US)
    program.wait()
    assert replay_of(program.context()).base_ns == program.now


def test_work_that_seems_to_begin_before_its_launch_is_no_circle() -> None:
    program = waiting(count=4)
    program.rows["kernel"][3]["start"] = 1  # files may claim anything
    found = program.context().get(step_replay)
    assert found is None or found.error <= MAX_ERROR


def test_work_that_outlasts_the_steps_counts_up_to_their_end() -> None:
    program = ahead(count=5, host=100 * US, kernel=10 * US)
    begin = program.now
    for _ in range(3):
        start = program.now
        program.host(300 * US)
        program.launch(50 * US)
        program.host(20 * US)
        program.step(start)
    end = program.now
    program.rows["kernel"][-1]["duration"] = 5000 * US
    program.host(9000 * US)
    found = replay_of(program.context())
    assert (found.low - START_NS, found.high - START_NS) == (begin, end)
    assert found.base_ns == end - begin


def stepped(steps: int, kernels: int) -> Program:
    """Steps after a beginning that belongs to none."""
    program = Program()
    program.host(100 * US)
    for _ in range(steps):
        begin = program.now
        for _ in range(kernels):
            program.host(10 * US)
            program.launch(5 * US)
        program.wait()
        program.step(begin)
    program.host(100 * US)
    return program


def test_only_the_steps_are_run_again() -> None:
    program = stepped(4, 3)
    found = replay_of(program.context())
    first, last = program.rows["user_annotation"][0], program.rows["user_annotation"][-1]
    assert (found.low, found.high) == (START_NS + first["start"], START_NS + last["start"] + last["duration"])
    assert found.base_ns == found.recorded_ns


def test_as_many_whole_steps_are_run_again_as_have_not_too_much_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "MAX_ACTIVITIES", 7)
    program = stepped(4, 3)
    found = replay_of(program.context())
    second = program.rows["user_annotation"][1]
    assert found.high == START_NS + second["start"] + second["duration"]


def test_a_single_step_with_too_much_work_is_run_again_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "MAX_ACTIVITIES", 7)
    program = stepped(1, 50)
    found = replay_of(program.context())
    assert found.high == START_NS + program.rows["kernel"][7]["start"]
    assert found.base_ns == found.recorded_ns


def test_a_model_that_is_too_far_off_predicts_nothing() -> None:
    program = waiting(count=3)
    program.rows["kernel"][0]["start"] = program.now  # long after the wait for it
    program.rows["kernel"][1]["start"] = 0  # long before its launch
    found = program.context().get(step_replay)
    assert found is None or found.error <= MAX_ERROR


def ran(done: list[tuple[str, int]]) -> Program:
    program = Program()
    program.launch(10 * US)
    for what, length in done:
        if what == "host":
            program.operator(length=length // 2)
            program.host(length)
        elif what == "launch":
            program.launch(length)
        elif what == "graph":
            program.launch(length, length // 2, length // 3)
        elif what == "allocate":
            program.call("cudaMalloc", length)
        else:
            program.wait()
    program.wait()
    return program


@settings(max_examples=150, deadline=None)
@given(actions)
def test_any_program_takes_as_long_as_it_took(done: list[tuple[str, int]]) -> None:
    program = ran(done)
    assert replay_of(program.context()).base_ns == program.now


@settings(max_examples=150, deadline=None)
@given(actions, spans, spans, st.sampled_from([0.0, 1.2, 3.0]), st.integers(0, 2**32 - 1))
def test_more_change_never_saves_less_and_never_more_than_all(
    done: list[tuple[str, int]], left_out: list[list[float]], faster: list[list[float]], ratio: float, seed: int
) -> None:
    program = ran(done)
    context = program.context(step_ratio=ratio)
    found, random = replay_of(context), np.random.default_rng(seed)
    gone, quick = (
        absolute(*((int(low * program.now), int(high * program.now)) for low, high in part))
        for part in (left_out, faster)
    )
    some = random.random(len(context.get(calls))) < 0.5
    work = random.random(len(context.get(gpu))) < 0.5
    changes = [
        ReplayChange(),
        ReplayChange(left_out=gone),
        ReplayChange(left_out=gone, faster=quick),
        ReplayChange(left_out=gone, faster=quick, unwaited=some),
        ReplayChange(left_out=gone, faster=quick, unwaited=some, work=work),
        ReplayChange(left_out=gone, faster=quick, unwaited=some, work=work, calls=some),
        ReplayChange(absolute((0, program.now)), calls=some | True, work=work | True),
    ]
    shares = [found.share(change) for change in changes]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] <= 1
    assert found.busy_ns <= found.base_ns <= found.recorded_ns


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 500), st.integers(0, 300), st.integers(1, 3), st.integers(-100, 500), st.integers(0, 300),
            st.sampled_from(["cudaLaunchKernel", "cudaStreamSynchronize", "cudaMalloc", "cudaMemcpy"]),
        ),
        min_size=1,
        max_size=20,
    )
)  # fmt: skip
def test_whatever_a_file_claims_the_model_is_right_or_there_is_none(
    claims: list[tuple[int, int, int, int, int, str]],
) -> None:
    launches, kernels = [], []
    for number, (start, length, thread, delay, work, name) in enumerate(claims, 1):
        launches.append({"name": name, "start": start, "duration": length, "thread": thread, "correlation": number})
        kernels.append(
            {"name": "k", "start": max(start + delay, 0), "duration": work, "correlation": number, "stream": number % 2}
        )
    context = Context(trace({"cuda_runtime": launches, "kernel": kernels}, length_ns=1000))
    found = context.get(step_replay)
    if found is not None:
        assert found.error <= MAX_ERROR
        assert 0 <= found.share(ReplayChange(unwaited=np.ones(len(claims), np.bool_))) <= 1


def operator(name: str, start: float, end: float, thread: int = 1) -> dict[str, Any]:
    """An operator from one sample to another."""
    span = {"start": int(start * PERIOD_NS), "duration": int((end - start) * PERIOD_NS)}
    return {"name": name, **span, "thread": thread}


def of_function(context: Context, name: str) -> list[tuple[float, float]]:
    """The time of a function, from which sample to which."""
    tree = context.get(framework_calls)
    names = np.array([context.trace.strings[number] == name for number in tree.name.tolist()], np.bool_)
    return spans_of(context.get(function_slots).of(names))


def spans_of(found: Union) -> list[tuple[float, float]]:
    edges = zip(found.start.tolist(), found.end.tolist(), strict=True)
    return [((low - START_NS) / PERIOD_NS, (high - START_NS) / PERIOD_NS) for low, high in edges]


def test_a_sample_in_one_step_tells_the_function_in_every_step() -> None:
    ops = [operator(name, 4 * step + at, 4 * step + at + 1) for step in range(3) for at, name in enumerate("abcd")]
    samples: list[Sample] = [MAIN, CROP, MAIN, MAIN, MAIN, CROP, MAIN, MAIN, *[MAIN] * 4]  # none in the last step
    assert of_function(sampled(samples, steps=3, ops=ops), CROP[-1]) == [(1, 2), (5, 6), (9, 10)]


def test_operators_that_repeat_within_a_step_are_told_apart_by_their_order() -> None:
    ops = [operator("a", 4 * step + at, 4 * step + at + 1) for step in range(3) for at in range(4)]
    context = sampled([MAIN, MAIN, CROP, MAIN] * 3, steps=3, ops=ops)
    assert of_function(context, CROP[-1]) == [(2, 3), (6, 7), (10, 11)]


def test_steps_may_have_different_numbers_of_operators() -> None:
    ops = [operator("a", 0, 1), operator("b", 1, 2), operator("c", 2, 3)]  # the second step has no b
    ops += [operator("a", 4, 5), operator("c", 6, 7)]
    ops += [operator("a", 8, 9), operator("b", 9, 10), operator("c", 10, 11)]
    context = sampled([MAIN, CROP, BLUR, MAIN] * 3, steps=3, ops=ops)
    assert of_function(context, BLUR[-1])[0] == (2, 3)
    assert all(high > low for low, high in of_function(context, CROP[-1]))


def test_operators_of_other_threads_are_no_slots() -> None:
    ops = [operator("a", 0, 4), operator("x", 1, 2, thread=2)]
    found = sampled([MAIN] * 4, ops=ops).get(function_slots)
    assert len(found.start) == 2  # the operator, and the time before it


def test_inner_operators_are_no_slots() -> None:
    found = sampled([MAIN] * 4, ops=[operator("a", 0, 4), operator("b", 1, 2)]).get(function_slots)
    assert len(found.start) == 2


def test_without_operators_a_function_has_no_slots() -> None:
    context = sampled([MAIN, CROP, MAIN, MAIN])
    assert of_function(context, CROP[-1]) == []


def test_without_samples_there_are_slots_but_nobody_has_them() -> None:
    trace = sampled_trace([MAIN] * 4, ops=[operator("a", 0, 4)])
    tables = {kind: table for kind, table in trace.tables.items() if kind != "python_function"}
    found = Context(replace(trace, tables=tables)).get(function_slots)
    assert (len(found.start), len(found.sampled)) == (2, 0)
    assert spans_of(found.of(np.ones(0, np.bool_))) == []


def test_exact_calls_have_their_own_times_not_those_of_the_operators_around() -> None:
    calls = [(MAIN[0], 0.0, 4.0, 0, -1), (MAIN[1], 0.0, 4.0, 1, 0), (CROP[-1], 1.0, 2.5, 2, 1)]
    calls += [(BLUR[-1], 2.5 + at / 32, 2.5 + (at + 1) / 32, 2, 1) for at in range(16)]
    unsampled = dict.fromkeys(("samples", "self_samples", "running", "line"), 0) | {
        "lines": -1,
        "callees": "",
        "module": -1,
    }
    rows = {
        "cpu_op": [{"sequence": -1, "finished": 1, "scope": 0, "inputs": -1, "id": number, **op}
                   for number, op in enumerate((operator("a", 0, 1), operator("b", 3, 4)), 1)],
        "python_function": [{**unsampled, **operator(name, start, end), "depth": depth, "parent": parent}
                            for name, start, end, depth, parent in calls],
    }  # fmt: skip
    context = Context(trace(rows, length_ns=4 * PERIOD_NS))
    assert of_function(context, CROP[-1]) == [(1, 2.5)]
    assert of_function(context, BLUR[-1]) == [(2.5, 3)]


def slots(sampled_places: Sequence[int], nodes: Sequence[int], count: int = 8) -> FunctionSlots:
    """Slots of one unit each, with these samples."""
    start = np.arange(count, dtype=np.int64)
    places, node = (np.array(values, np.int64) for values in (sampled_places, nodes))
    return FunctionSlots(start, start + 1, start, places, node, start.astype(float))


def chosen(found: FunctionSlots, node: int) -> list[tuple[int, int]]:
    part = found.of(np.arange(4) == node)
    return list(zip(part.start.tolist(), part.end.tolist(), strict=True))


@pytest.mark.parametrize(
    ("places", "nodes", "of_nodes"),
    [
        ([1, 5], [0, 1], [[(0, 3)], [(3, 8)]]),  # of two that are as near the later one
        ([3, 3, 3, 6], [0, 0, 1, 2], [[(0, 5)], [], [(5, 8)]]),
        ([3, 3], [0, 1], [[], []]),
        ([], [], [[]]),
    ],
    ids=["the nearest that has samples", "the majority", "half is no majority", "without samples nobody"],
)
def test_a_slot_belongs_to_most_of_its_samples_or_of_those_of_the_nearest_one(
    places: list[int], nodes: list[int], of_nodes: list[list[tuple[int, int]]]
) -> None:
    found = slots(places, nodes)
    assert [chosen(found, node) for node in range(len(of_nodes))] == of_nodes


def test_operators_of_one_name_in_a_row_go_together() -> None:
    """A sample in the middle of a loop over `mm` tells about its ends, too, though other samples are nearer to them."""
    loop = [operator("mm", begin, begin + 0.1) for begin in (0.6, 0.75, 0.95, 1.2, 1.4)]
    context = sampled([MAIN, CROP, MAIN], ops=[operator("index", 0, 0.2), *loop, operator("norm", 1.9, 2.1)])
    assert of_function(context, CROP[-1]) == [pytest.approx((0.6, 1.5))]


def test_a_function_does_not_reach_into_an_optimizers_step() -> None:
    step = operator("Optimizer.step#SGD.step", 0.85, 2)
    ops = [operator("a", 0, 0.2), operator("b", 0.6, 0.7), operator("c", 0.9, 1.1)]
    context = sampled([CROP, MAIN, MAIN], ops=ops, annotations=[step])
    assert of_function(context, CROP[-1]) == [pytest.approx((0, 0.7))]


def test_there_may_be_no_slots() -> None:
    assert chosen(slots([], [], count=0), 0) == []
