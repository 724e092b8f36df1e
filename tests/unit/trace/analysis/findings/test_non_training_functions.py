"""Functions that train nothing, in programs that use a GPU: what the steps run again without them save."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.cause_views import CAUSES
from kineto_trace.analysis.finding import COLLECTIVES_OF_THE_HOST, Finding
from kineto_trace.analysis.findings import non_training_functions as aside
from kineto_trace.analysis.findings.gpu_work_findings import ModelWithoutBackward
from kineto_trace.analysis.findings.non_training_functions import (
    is_part_of_one,
    non_training,
    non_training_findings,
    non_training_time,
)
from kineto_trace.analysis.step_replay import function_slots, step_replay
from kineto_trace.model.context import Context
from support.trace_files.sampled_stacks import BACKWARD, FORWARD, MAIN, PERIOD_NS, SITE, Sample, stack_rows
from support.trace_files.simulated.host_and_gpu import Program
from support.trace_files.traces import target, trace

STEPS = 20
PUBLISH = "/job/board.py(3): publish"
STEP_NS = 3 * PERIOD_NS


def training(
    kernel: int,
    *,
    extra: Sample = (*MAIN, PUBLISH),
    devices: int = 1,
    waits: bool = False,
    annotations: Sequence[dict[str, Any]] = (),
) -> Context:
    """Steps of a sample each in forward, `extra` and backward; forward and backward launch a kernel each.

    annotations: more of them, beside those of the steps.
    """
    program, samples = Program(), list[Sample]()
    for step in range(STEPS):
        begin = program.now
        for stack in (FORWARD, extra, (*MAIN, BACKWARD)):
            samples.append(stack)
            until = program.now + PERIOD_NS
            if stack == extra and waits:
                program.wait()
            if stack != extra:
                program.operator("aten::linear" if stack == FORWARD else "AddmmBackward0", PERIOD_NS * 9 // 10)
                program.host(PERIOD_NS // 10)
                program.launch(kernel)
            program.now = until
        program.step(begin)
        program.rows["kernel"][-1]["device"] = step % devices
    for row in annotations:
        program.rows["user_annotation"].append({"finished": 1, "inputs": -1, "scope": 7, **row})
    rows = {kind: found for kind, found in program.rows.items() if found}
    rows["python_function"] = stack_rows(samples)
    # the GPU may work on after the steps
    length = max(program.now, program.idle_from) + 1
    return Context(trace(rows, length_ns=length, sample_period_ns=PERIOD_NS, target=target()))


def test_a_function_that_the_gpu_waits_for_costs_its_time() -> None:
    context = training(kernel=PERIOD_NS // 10)
    (each,) = context.get(non_training)
    assert each.finding.where == "publish (/job/board.py:42)"
    assert (each.finding.replayed, each.finding.causes) == (True, CAUSES)
    assert each.finding.saving_ns == pytest.approx(STEPS * PERIOD_NS, rel=0.06)
    assert each.finding.evidence.startswith("the steps, run again without it, take ")
    assert {context.trace.strings[name] for name in each.names} == {PUBLISH}


def test_a_function_that_waits_for_the_gpu_is_told_to_read_less_of_it() -> None:
    (silent,), (waiting,) = (training(PERIOD_NS // 10, waits=waits).get(non_training) for waits in (False, True))
    assert aside.READS not in silent.finding.advice
    assert waiting.finding.advice.endswith(f"It also waits for results of the GPU. {aside.READS}")


@pytest.mark.parametrize("library", ["gloo", "nccl"])
def test_collectives_that_run_on_the_host_are_told_to_use_the_gpu(library: str) -> None:
    reducing = (*MAIN, "/job/stats.py(7): reduce", SITE + "torch/distributed/distributed_c10d.py(2900): all_reduce")
    threads = [
        {"name": f"{library}:all_reduce", "start": (3 * step + 1) * PERIOD_NS, "duration": PERIOD_NS // 2, "thread": 2}
        for step in range(STEPS)
    ]
    (each,) = training(PERIOD_NS // 10, extra=reducing, annotations=threads).get(non_training)
    on_the_host = library == "gloo"
    assert each.finding.title == "reduce (stats.py:42) waits in collectives" + on_the_host * " of the host"
    assert each.finding.advice.startswith(COLLECTIVES_OF_THE_HOST) is on_the_host


def test_a_function_while_which_the_gpu_always_works_is_none() -> None:
    assert training(kernel=STEP_NS).get(non_training) == ()


def test_its_time_is_that_of_its_slots_in_every_step() -> None:
    found = training(kernel=PERIOD_NS // 10).get(non_training_time)
    assert len(found.start) == STEPS
    assert found.length() == pytest.approx(STEPS * PERIOD_NS, rel=0.2)


def test_a_program_that_only_trains_has_none() -> None:
    context = training(kernel=PERIOD_NS // 10, extra=FORWARD)
    assert context.get(non_training) == ()
    assert context.get(non_training_time).length() == 0
    assert list(non_training_findings(context)) == []


def test_where_the_steps_cannot_be_run_again_there_are_none() -> None:
    context = training(kernel=PERIOD_NS // 10, devices=2)
    assert context.get(step_replay) is None
    assert context.get(non_training) == ()


def test_idle_time_in_such_a_function_is_no_finding_of_its_own() -> None:
    context = training(kernel=PERIOD_NS // 10)
    (each,) = context.get(non_training)
    names = context.trace.table("python_function")["name"]
    frame = int(np.flatnonzero(names == next(iter(each.names)))[0])
    idle = replace(each.finding, name="host_python", frame=frame, saving_ns=each.finding.saving_ns)
    assert is_part_of_one(context, idle)
    assert not is_part_of_one(context, replace(idle, saving_ns=idle.saving_ns + 1))
    assert not is_part_of_one(context, replace(idle, frame=-1))
    main = int(np.flatnonzero(names != names[frame])[0])
    assert not is_part_of_one(context, replace(idle, frame=main))


def found_model(monkeypatch: pytest.MonkeyPatch, context: Context) -> Finding:
    """Makes a model without a backward of `publish`."""
    finding = Finding(name="evaluation", title="E", saving_ns=7, advice="", evidence="", where="publish")
    model = ModelWithoutBackward(finding, context.trace.strings.index(PUBLISH))
    monkeypatch.setattr(aside, "models_without_backward", lambda context: (model,))
    return finding


def test_a_model_without_backward_that_has_no_slots_is_told_by_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    context = training(kernel=PERIOD_NS // 10)
    finding = found_model(monkeypatch, context)
    slots = context.get(function_slots)
    nothing = replace(slots, sampled=slots.sampled[:0], node=slots.node[:0])
    monkeypatch.setattr(aside, "function_slots", lambda context: nothing)
    assert list(non_training_findings(context)) == [finding]


def test_a_model_without_backward_is_told_once_where_it_has_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    context = training(kernel=PERIOD_NS // 10)
    found_model(monkeypatch, context)
    (finding,) = non_training_findings(context)
    assert (finding.name, finding.replayed) == ("evaluation", True)
    assert finding.evidence.endswith("% of the GPU's work, in operators without a backward")
    assert finding.saving_ns == pytest.approx(STEPS * PERIOD_NS, rel=0.06)
