from typing import Any

import pytest
from kineto_trace.catalog.view_catalog import find_view
from kineto_trace.model.context import Context
from kinetoctl.commands.trace import command
from support.trace_files.hta_events import context, event, gpu, launch, op, rows, step
from support.trace_files.traces import trace


def test_steps_have_their_gpu_work() -> None:
    events = [step(3, 0, 10), step(4, 10, 10), launch(1, 2), gpu("a", 15, 4, 1), launch(2, 12), gpu("b", 30, 2, 2)]
    columns = ("step", "duration_us", "gpu_activities", "gpu_us")
    assert rows(events, "profiler_steps", *columns, hta=False) == [(3, 10, 1, 4), (4, 10, 1, 2)]
    assert rows(events, "profiler_steps", "step") == [(3,)]  # HTA drops the last one
    assert rows([launch(1, 0)], "profiler_steps", "step", hta=False) == []


def test_validation_tells_what_is_missing_and_whom_that_concerns() -> None:
    events = [launch(1, 0), gpu("a", 5, 1, 1), gpu("b", 7, 1, 2), op("aten::x", 0, 3)]
    found = {row["part"]: row for row in find_view("validate")(context(events)).rows()}
    assert (found["operators"]["ok"], found["operators"]["rows"], found["operators"]["advice"]) == (True, 1, None)
    launches = found["launches of GPU activities"]
    assert (launches["ok"], launches["rows"], launches["complete_pct"]) == (False, 2, 50)
    assert "host_wait" in launches["needed_for"]
    assert found["operators around launches"]["complete_pct"] == 100
    assert found["training steps"]["ok"] is False
    assert "step()" in found["training steps"]["advice"]
    assert found["arguments of collectives"]["ok"] is None  # there are none


def test_advice_on_traces_of_kinetod_names_options_of_kinetoctl() -> None:
    found = {row["part"]: row["advice"] for row in find_view("validate")(Context(trace({}))).rows()}
    assert found["allocations"] == "kinetoctl trace --memory"
    assert found["input shapes"] == "kinetoctl trace --record-shapes"
    assert not [part for part, advice in found.items() if advice and "torch.profiler.profile" in advice]


@pytest.mark.parametrize("option", ["--memory", "--record-shapes", "--with-stack", "--activities"])
def test_kinetoctl_has_the_options_that_are_advised(option: str) -> None:
    assert option in {name for parameter in command.params for name in parameter.opts}


def test_collectives_without_arguments_are_missing_them() -> None:
    arguments: dict[str, Any] = {"Collective name": "allreduce"}
    named = gpu("ncclDevKernel_AllReduce", 0, 1, 1, **arguments)
    found = rows([named, gpu("ncclDevKernel_AllReduce", 5, 1, 2)], "validate", "part", "complete_pct", hta=False)
    assert ("arguments of collectives", 50) in found


@pytest.mark.parametrize(
    ("tables", "counts"),
    [
        ({"counter": [{"name": "SM active [%]", "duration": 9, "value": 50.0}]}, (2, 1, 1)),  # a sample has two ends
        ({"kernel": [{"name": "gemm", "duration": 9}]}, (0, 0, 1)),
        ({"other": [{"name": "process_name", "phase": ord("M")}]}, (0, 0, 0)),
        ({"other": [{"name": "mark", "phase": ord("i")}]}, (0, 0, 1)),
    ],
)
def test_counters_and_events_are_counted_and_the_names_of_processes_are_none(
    tables: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    found = {row["part"]: row for row in find_view("validate")(Context(trace(tables))).rows()}
    assert tuple(found[part]["rows"] for part in ("counters", "hardware counters", "events")) == counts
    assert (found["counters"]["advice"], found["events"]["ok"]) == (None, counts[2] > 0)


def test_arguments_of_a_wrong_type_have_a_row() -> None:
    strange = event("kernel", "a", 0, 1, 0, 7, **{"stream": "seven", "Group size": "8"})
    found = find_view("validate")(context([strange, gpu("b", 3, 1, 2)])).rows()[-2:]
    assert [(row["part"], row["rows"], row["complete_pct"], row["advice"]) for row in found] == [
        ("kernel: argument stream", 2, 50, "'seven' is not a whole number, so it counts as missing"),
        ("kernel: argument Group size", 2, 50, "'8' is not a whole number, so it counts as missing"),
    ]


def test_a_step_that_had_not_ended_is_shown_as_incomplete() -> None:
    cut = step(4, 10, 5)
    cut["args"]["finished"] = False
    assert rows([step(3, 0, 10), cut], "profiler_steps", "step", "complete", hta=False) == [(3, True), (4, False)]
    found = {row["part"]: row for row in find_view("validate")(context([step(3, 0, 10), cut])).rows()}
    assert (found["training steps"]["ok"], found["training steps"]["rows"]) == (True, 1)
    found = {row["part"]: row for row in find_view("validate")(context([cut])).rows()}
    assert (found["training steps"]["ok"], found["training steps"]["rows"]) == (False, 1)
    assert "from beginning to end" in found["training steps"]["advice"]
