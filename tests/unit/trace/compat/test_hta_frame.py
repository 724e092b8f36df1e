import numpy as np
import pytest
from kineto_trace.compat.hta_frame import KINDS, hta_frame
from support.trace_files.hta_events import Event, context, event, gpu, launch, op, step


def frame_rows(events: list[Event]) -> list[tuple[str, float, float, int, int]]:
    """(name, ts, dur, stream, iteration) of each row of the frame; ts in us from the first event on."""
    found = context(events)
    frame, names = found.get(hta_frame), found.trace.strings
    return [
        (names[name], (start - frame.origin_ns) / 1000, duration / 1000, stream, iteration)
        for name, start, duration, stream, iteration in zip(
            frame.name.tolist(),
            frame.start.tolist(),
            frame.duration.tolist(),
            frame.stream.tolist(),
            frame.iteration.tolist(),
            strict=True,
        )
    ]


def test_events_begin_at_the_next_microsecond_and_end_at_the_last_one_before() -> None:
    # [0.2, 3.9] -> 1 to 3; [4.1, 4.9] -> 5 to 4; [6, 7] stays
    found = frame_rows([op("a", 0.2, 3.7), op("b", 4.1, 0.8), op("c", 6.0, 1.0)])
    assert [(name, dur) for name, _, dur, _, _ in found] == [("a", 2), ("b", -1), ("c", 1)]
    assert [ts for _, ts, _, _, _ in found] == [0, 4, 5]


def test_times_of_a_file_of_integers_stay() -> None:
    assert [row[1:3] for row in frame_rows([op("a", 1, 2), op("b", 4, 7)])] == [(0, 2), (3, 7)]


def test_one_event_without_a_time_makes_all_times_floats() -> None:
    events = [op("a", 1, 2), {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "x"}}, op("b", 4, 1.5)]
    assert [row[2] for row in frame_rows(events)] == [2, 1]


def test_fractions_of_durations_stay_if_all_times_are_integers() -> None:
    assert [row[2] for row in frame_rows([op("a", 1, 2.5)])] == [2.5]


def test_rows_without_a_duration_or_category_and_the_profilers_own_are_no_events() -> None:
    whole = event("Trace", "PyTorch Profiler (0)", 0, 9)
    instant = {"ph": "i", "name": "mark", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 3}
    nameless = {"ph": "X", "name": "no category", "pid": 1, "tid": 1, "ts": 3, "dur": 1}
    assert [row[0] for row in frame_rows([op("a", 1, 2), whole, instant, nameless])] == ["a"]


def test_synchronisations_have_streams_and_annotations_on_the_gpu_have_none() -> None:
    sync = event("cuda_sync", "Stream Sync", 1, 2, 0, 7, stream=7, correlation=3)
    annotation = event("gpu_user_annotation", "fwd", 1, 2, 0, 7)
    assert [row[3] for row in frame_rows([sync, annotation, gpu("k", 1, 1, 3, stream=20)])] == [7, -1, 20]


def test_rows_stand_in_the_order_of_the_file() -> None:
    events = [gpu("k", 5, 1, 1), op("a", 1, 2), launch(1, 1), op("b", 4, 1)]
    found = context(events).get(hta_frame)
    assert [KINDS[kind] for kind in found.kind.tolist()] == ["kernel", "cpu_op", "cuda_runtime", "cpu_op"]


def test_an_event_is_of_the_step_in_which_it_begins_and_a_kernel_of_its_launchs() -> None:
    found = frame_rows([step(4, 0, 10), op("a", 9, 5), launch(1, 9), gpu("k", 30, 1, 1), op("b", 10, 1)])
    assert [(name, iteration) for name, *_, iteration in found] == [
        ("ProfilerStep#4", 4),
        ("a", 4),
        ("cudaLaunchKernel", 4),
        ("k", 4),
        ("b", -1),
    ]


@pytest.fixture
def two_steps() -> list[Event]:
    return [
        step(1, 0, 10),
        launch(1, 2),
        gpu("first", 4, 1, 1),
        step(2, 10, 10),
        launch(2, 12),
        gpu("second", 14, 1, 2),
    ]


def test_the_last_of_two_steps_is_dropped_with_what_it_launched(two_steps: list[Event]) -> None:
    assert [row[0] for row in frame_rows(two_steps)] == ["first", "ProfilerStep#1", "cudaLaunchKernel"]


def test_older_files_number_of_no_stream_is_a_stream() -> None:
    # Context Sync on "stream" 4294967295 was written until 2023; -1 since then
    syncs = [
        event("cuda_sync", "Context Sync", ts, 2, 0, -1, stream=s, correlation=3) for ts, s in ((1, 2**32 - 1), (5, -1))
    ]
    assert [row[3] for row in frame_rows(syncs)] == [2**32 - 1, -1]


def test_a_kernel_whose_launch_stands_first_in_the_file_has_no_step() -> None:
    found = frame_rows([launch(1, 1), gpu("k", 3, 1, 1), step(4, 0, 10), launch(2, 5), gpu("k", 8, 1, 2)])
    assert [row[4] for row in found] == [4, -1, 4, 4, 4]


def test_of_one_step_nothing_is_dropped(two_steps: list[Event]) -> None:
    one = [row for row in two_steps if row["name"] != "ProfilerStep#2"]
    assert len(frame_rows(one)) == 5


def test_the_last_step_begins_where_its_annotation_on_the_gpu_does(two_steps: list[Event]) -> None:
    annotation = event("gpu_user_annotation", "ProfilerStep#2", 13, 5, 0, 7)
    found = [row[0] for row in frame_rows([*two_steps, annotation])]
    assert found == ["first", "second", "ProfilerStep#1", "cudaLaunchKernel", "ProfilerStep#2", "cudaLaunchKernel"]


def test_a_kernel_is_linked_to_the_last_call_with_its_correlation() -> None:
    frame = context([launch(5, 0), launch(5, 3), gpu("k", 9, 1, 5)]).get(hta_frame)
    assert frame.link.tolist() == [2, 2, 1]
    assert frame.order(np.array([5, 1, 3]) * 1000 + frame.origin_ns).tolist() == [1, 2, 0]
