"""What a report says was not recorded is what this trace lacks, with the option that records it."""

import re
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.analysis.overview.not_recorded_views import PARTS, not_recorded
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, OP_TABLES, Losses
from kineto_trace.open.trace_opener import open_trace
from kinetoctl.commands.trace import command
from support.agent.stack_records import PERIOD_NS, RUNNING, Sample, code, linetable, node, recording, write_recording
from support.trace_files.hta_events import context, gpu, launch, op, step
from support.trace_files.traces import START_NS, target, trace

MS = 1_000_000
OPS = {"cpu_op": [{"name": "aten::mm", "duration": 5, "thread": 1}]}
NO_GPU = "this process used no GPU while it was recorded"


def whys(found: Context) -> dict[str, str]:
    return {row["what"]: row["why"] for row in not_recorded(found).rows()}


def covered(kinds: tuple[str, ...], *missing: tuple[int, int], dropped: int = 0) -> SourceCoverage:
    """A source that lacks these parts (ms)."""
    parts = tuple((START_NS + start * MS, START_NS + end * MS) for start, end in missing)
    return SourceCoverage(source="a", kinds=kinds, missing=parts, dropped=dropped)


def test_what_was_not_requested_has_its_option() -> None:
    rows = {row["what"]: row for row in not_recorded(Context(trace(OPS))).rows()}
    assert rows["allocations"]["why"] == rows["input shapes"]["why"] == "not requested"
    assert rows["allocations"]["option"] == "kinetoctl trace --memory"
    assert rows["input shapes"]["option"] == "kinetoctl trace --record-shapes"
    assert {row["torch_profiler"] for row in rows.values()} == {None}
    assert "operators" not in rows


def test_what_was_requested_is_not_said_to_be_missing_for_want_of_an_option() -> None:
    asked = {"with_stack": True, "profile_memory": True}
    stacks = covered(("python_function",))
    found = whys(Context(trace(OPS, target=target(options=asked), coverage=(stacks,))))
    assert found["Python stacks"] == "its source recorded, but delivered no data"
    assert found["allocations"] == "requested, but no data was delivered"


def test_a_truncated_file_lacks_its_end_and_nothing_that_may_have_been_there() -> None:
    asked = target(activity_types=["cpu_op", "kernel"])
    cut = "the file is truncated in its list of events, after 1 event of an unknown number"
    found = whys(Context(trace(OPS, target=asked, notes=(cut,))))
    assert found.pop("the end of the file") == "the file is truncated, and what it lacks may have been there"
    assert sorted(found) == ["Python stacks", "allocations", "input shapes"]
    assert all(why.startswith("not requested") for why in found.values())


def test_what_could_not_be_recorded_has_the_reason_and_no_option() -> None:
    told = {"kernel": "CUPTI is taken", "cpu_instant_event": "torch is not there"}
    asked = target(activity_types=["cpu_op", "kernel", "cpu_instant_event"], not_recorded=told)
    rows = {row["what"]: row for row in not_recorded(Context(trace(OPS, target=asked))).rows()}
    assert rows["allocations"]["why"] == "could not be recorded: torch is not there"
    assert rows["GPU activities"]["why"] == "could not be recorded: CUPTI is taken"
    assert rows["allocations"]["option"] is rows["GPU activities"]["option"] is None


def test_what_activities_left_out_was_not_requested_whatever_else_its_source_recorded() -> None:
    asked = target(activity_types=["cpu_op", "kernel"])
    gpus = covered((*GPU_TABLES, *API_TABLES))
    rows = {**OPS, "kernel": [{"name": "k", "duration": 5, "correlation": 1}]}
    found = whys(Context(trace(rows, target=asked, coverage=(gpus,))))
    assert found["calls of the runtime and driver"] == "not requested: --activities named only cpu_op, kernel"
    assert found["Python stacks"] == "not requested: --activities named only cpu_op, kernel"
    assert found["allocations"] == found["input shapes"] == "not requested"


def test_what_was_named_in_activities_was_requested() -> None:
    asked = target(activity_types=["cpu_op", "cpu_instant_event"])
    found = whys(Context(trace(OPS, target=asked)))
    assert found["allocations"] == "requested, but no data was delivered"


def test_without_activities_the_defaults_were_requested() -> None:
    found = whys(Context(trace(OPS, target=target(activity_types=[]), coverage=(covered(OP_TABLES),))))
    assert (found["GPU activities"], found["Python stacks"]) == (NO_GPU, "no source recorded it")
    assert found["allocations"] == "not requested"


@pytest.mark.parametrize("form", ["columns", "trace.json.gz", "trace.pftrace"])
def test_a_trace_keeps_what_was_requested_and_why_it_lacks_it_in_every_form(tmp_path: Path, form: str) -> None:
    told: dict[str, Any] = {
        "activity_types": ["python_function", "cpu_instant_event"],
        "not_recorded": {"cpu_instant_event": "torch is not there"},
    }
    end = START_NS + PERIOD_NS
    target(window_start_ns=START_NS, window_end_ns=end, complete=True, **told).write(tmp_path)
    codes = {1: code(10, "t.py", "train", kind=10, table=linetable(11, first_line=10))}
    write_recording(tmp_path, recording([Sample(START_NS, 7, 1, RUNNING)], codes=codes, nodes={1: node(0, 1, 0)}))
    convert_target(tmp_path, formats=["chrome", "perfetto"])
    found = whys(Context(open_trace(tmp_path / form)))
    assert found["allocations"] == "could not be recorded: torch is not there"
    assert found["operators"] == "not requested: --activities named only python_function, cpu_instant_event"


def test_stacks_are_recorded_by_default_so_that_their_absence_does_not_say_that_they_were_not_requested() -> None:
    assert whys(Context(trace(OPS)))["Python stacks"] == "unknown: the trace does not state why it is missing"
    assert whys(Context(trace(OPS, coverage=(covered(OP_TABLES),))))["Python stacks"] == "no source recorded it"


def test_a_trace_without_a_gpu_says_so_and_asks_for_nothing() -> None:
    context = Context(trace(OPS, coverage=(covered(OP_TABLES),)))
    found = whys(context)
    assert found["GPU activities"] == NO_GPU
    assert [row["option"] for row in not_recorded(context).rows() if row["what"] == "GPU activities"] == [None]
    assert "calls of the runtime and driver" not in found  # they matter beside GPU activities
    assert whys(Context(trace(OPS)))["GPU activities"] == "unknown: the trace does not state why it is missing"
    gpus = covered((*GPU_TABLES, *API_TABLES))
    assert whys(Context(trace(OPS, coverage=(gpus,))))["GPU activities"] == "its source recorded, but delivered no data"


def test_of_another_tool_s_trace_it_is_unknown_what_was_requested() -> None:
    events = [step(3, 0, 10), launch(1, 2), gpu("a", 5, 1, 1), op("aten::x", 0, 3)]
    (stacks,) = (row for row in not_recorded(context(events)).rows() if row["what"] == "Python stacks")
    assert stacks["why"] == "unknown: the trace does not state whether it was requested"
    assert stacks["option"] == "kinetoctl trace --with-stack"
    assert stacks["torch_profiler"] == "use torch.profiler.profile(with_stack=True)"


def test_calls_that_were_requested_by_their_vendors_name_are_no_calls_that_were_not_requested() -> None:
    work = {"kernel": [{"start": 0, "duration": 10, "name": "a"}]}
    calls = "calls of the runtime and driver"
    asked = target(activity_types=["kernel", "pebble_runtime"])
    assert whys(Context(trace(work, target=asked)))[calls] == "requested, but no data was delivered"
    asked = target(activity_types=["pebble_runtime", "kernel"], not_recorded={"pebble_runtime": "no sign of it"})
    assert whys(Context(trace(work, target=asked)))[calls] == "could not be recorded: no sign of it"


@pytest.mark.parametrize(
    ("arguments", "there"),
    [
        ({"Collective name": "allreduce"}, set()),
        ({"Input Dims": [[2, 3]]}, {"input shapes"}),
        ({"Call stack": "a.py(1): f"}, {"Python stacks"}),
    ],
)
def test_shapes_and_stacks_are_told_from_other_arguments(arguments: dict[str, Any], there: set[str]) -> None:
    event = op("aten::x", 0, 3)
    event["args"].update(arguments)
    found = whys(context([event]))
    assert {"input shapes", "Python stacks"} - set(found) == there


def test_steps_that_were_cut_are_no_missing_marks() -> None:
    cut = step(4, 10, 5)
    cut["args"]["finished"] = False
    (steps,) = (row for row in not_recorded(context([cut])).rows() if row["what"] == "training steps")
    assert steps["why"] == "no step was recorded from beginning to end"
    assert steps["option"] == "kinetoctl trace with a longer --duration"
    (steps,) = (row for row in not_recorded(Context(trace(OPS))).rows() if row["what"] == "training steps")
    assert steps["why"].startswith("the trace has no step marks; without torch's optimizers, call ")
    assert steps["option"] is None
    assert "training steps" not in whys(context([step(3, 0, 10), cut]))


def test_losses_come_first_and_name_the_option_that_avoids_them() -> None:
    found = not_recorded(
        Context(
            trace(
                OPS,
                length_ns=1000 * MS,
                coverage=(
                    covered((*GPU_TABLES, *API_TABLES), (0, 120)),
                    covered(OP_TABLES, (700, 1000)),
                    covered(("python_function",), (400, 500), dropped=7000),
                ),
                losses=Losses(dropped=7010, undecoded=2, torn=1),
            )
        )
    ).rows()[:6]
    assert [(row["what"], row["why"]) for row in found] == [
        ("GPU activities and calls", "not recorded in the first 120 ms"),
        ("operators", "not recorded in the last 300 ms; kinetoctl captures show has the reason"),
        ("Python stacks", "7,000 records were dropped: buffers were full"),
        ("records", "10 were dropped: buffers were full"),
        ("records", "2 could not be decoded"),
        ("the last records", "the daemon ended while they were being recorded"),
    ]
    larger = "kinetoctl trace with a larger --buffer-limit"
    assert [row["option"] for row in found] == [
        "kinetoctl trace --warmup or --warmup-iterations",
        None,
        larger,
        larger,
        None,
        None,
    ]


def test_a_negligible_gap_is_no_loss() -> None:
    late = covered(OP_TABLES, (0, 9))
    assert "operators" not in whys(Context(trace(OPS, length_ns=1000 * MS, coverage=(late,))))


def test_of_several_ranks_each_thing_is_told_once() -> None:
    late = [covered(OP_TABLES, (0, length)) for length in (100, 300, 0)]
    partials = [
        (rank, not_recorded.partial(Context(trace(OPS, length_ns=1000 * MS, coverage=(each,)))))
        for rank, each in enumerate(late)
    ]
    rows = not_recorded.combine(partials).rows()
    assert [(row["what"], row["why"], row["ranks"]) for row in rows[:2]] == [
        ("operators", "not recorded in the first 300 ms", "0-1"),
        ("GPU activities", NO_GPU, "0-2"),
    ]


def test_a_trace_that_lacks_nothing_says_so() -> None:
    rows: dict[str, list[dict[str, Any]]] = {
        "overhead": [{"name": "Buffer Flush"}],
        "cpu_op": [{**OPS["cpu_op"][0], "inputs": '"Input Dims": [[2, 3]]'}],
        "kernel": [{"name": "k", "duration": 5, "correlation": 1}],
        "cuda_runtime": [{"name": "cudaLaunchKernel", "duration": 5, "correlation": 1, "thread": 1}],
        "user_annotation": [{"name": "ProfilerStep#1", "duration": 900_000, "thread": 1, "finished": 1}],
        "python_function": [{"name": "f", "duration": 5}],
        "cpu_instant_event": [{"name": "[memory]"}],
    }
    found = not_recorded(Context(trace(rows)))
    assert (found.rows(), found.notes) == ([], ("the trace has everything that the report uses",))


def test_kinetoctl_trace_has_every_option_that_is_named() -> None:
    known = {name for parameter in command.params for name in parameter.opts}
    texts = [text for part in PARTS for text in (part.with_kinetod, part.option)]
    named = {option for text in texts for option in re.findall(r"(?<= )--[a-z-]+", text)}
    assert named <= known
    assert {"--memory", "--record-shapes", "--with-stack", "--activities", "--duration"} <= named
    assert {"--warmup", "--warmup-iterations", "--buffer-limit"} <= known
