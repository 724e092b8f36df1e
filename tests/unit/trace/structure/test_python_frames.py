"""Times in these traces are microseconds."""

from typing import Any

import numpy as np
import pytest
from kineto_trace.model.context import Context
from kineto_trace.structure.library_calls import CallKind, FrameKind
from kineto_trace.structure.python_frames import MAX_SAMPLES, callee_kind, callee_samples, frames_in, python_frames
from support.trace_files.sampled_stacks import MAIN, sampled_trace
from support.trace_files.traces import START_NS, trace

US = 1000
_NAMES = ["", *(kind.name.lower() for kind in list(FrameKind)[1:])]


def frame(name: str, start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "start": start * US, "duration": (end - start) * US, "thread": 1, **more}


def kinds(rows: list[dict[str, Any]], *moments: int) -> list[tuple[str, str]]:
    """The innermost function of the user's and the kind at each moment."""
    context = Context(trace({"python_function": rows}))
    frames, strings = context.get(python_frames), context.trace.strings
    places = frames.innermost(np.ones(len(moments), np.uint32), np.array(moments) * US + START_NS).tolist()
    users = [int(frames.user[place]) for place in places]
    names = [strings[int(frames.name[user])] if user >= 0 else "" for user in users]
    return [(name, _NAMES[int(frames.kind[place])]) for name, place in zip(names, places, strict=True)]


def test_what_a_library_does_counts_for_the_function_that_called_it() -> None:
    rows = [
        frame("threading.py(1): Thread.run", 0, 100),
        frame("train.py(1): main", 0, 100),
        frame("train.py(9): pause", 10, 50),
        frame("<built-in function sleep>", 20, 40),
        frame("logging/__init__.py(1): info", 60, 90),
        frame("<built-in method acquire of _thread.lock object>", 70, 80),
    ]
    assert kinds(rows, 5, 15, 30, 75, 95) == [
        ("train.py(1): main", ""),
        ("train.py(9): pause", ""),
        ("train.py(9): pause", "sleep"),
        ("train.py(1): main", "logging"),
        ("train.py(1): main", ""),
    ]


def test_what_loads_data_loads_it_with_functions_of_the_user_too() -> None:
    rows = [
        frame("train.py(1): main", 0, 100),
        frame("torch/utils/data/dataloader.py(1): __next__", 0, 90),
        frame("train.py(30): collate", 10, 80),
        frame("train.py(40): normalise", 20, 70),
    ]
    assert kinds(rows, 5, 15, 30, 95) == [
        ("train.py(1): main", "data"),
        ("train.py(30): collate", "data"),
        ("train.py(40): normalise", "data"),
        ("train.py(1): main", ""),
    ]


def test_the_system_calls_of_samples_tell_what_a_function_was_blocked_by() -> None:
    own = {"samples": 2, "self_samples": 2, "idle": 2}
    rows = [
        frame("train.py(1): main", 0, 100, samples=10, self_samples=2, idle=2, idle_sleep=2),
        frame("train.py(9): pause", 10, 30, **own, idle_sleep=2),
        frame("train.py(12): enter", 30, 50, **own, idle_lock=2),
        frame("train.py(15): fetch", 50, 70, **own, idle_poll=1, idle_io=1),
        frame("torch/distributed/distributed_c10d.py(2810): all_reduce", 70, 90, **own, idle_lock=2),
        frame("torch/distributed/distributed_c10d.py(3): new_group", 92, 94, samples=1, self_samples=1, running=1),
    ]
    assert [kind for _, kind in kinds(rows, 5, 20, 40, 60, 80, 93)] == [
        "sleep",
        "sleep",
        "lock",
        "input_output",
        "collective",
        "",
    ]


def test_a_sampled_function_that_was_off_the_cpu_was_blocked_but_not_what_it_called() -> None:
    rows = [
        frame("train.py(1): main", 0, 100, samples=10, self_samples=5, idle=4, running=1),
        frame("train.py(9): work", 50, 70, samples=2, self_samples=2, running=2),
        frame("train.py(12): locked", 70, 90, samples=2, self_samples=2, waiting=2),
    ]
    assert [kind for _, kind in kinds(rows, 10, 60, 80)] == ["blocked", "", "gil"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pickle.dumps", CallKind.PICKLE),
        ("marshal.loads", CallKind.PICKLE),
        ("orjson.dumps", CallKind.JSON),
        ("self.scan_once", CallKind.JSON),
        ("loss.item", CallKind.ITEM),
        (".tolist", CallKind.ITEM),
        ("zlib.compress", CallKind.ARCHIVE),
        ("zlib.crc32", CallKind.HASH),
        ("hashlib.sha256", CallKind.HASH),
        (".hexdigest", CallKind.HASH),
        ("gc.collect", CallKind.GARBAGE),
        ("time.sleep", CallKind.SLEEP),
        ("print", CallKind.LOGGING),
        ("sys.stdout.flush", CallKind.LOGGING),
        ("os.fork", CallKind.SUBPROCESS),
        ("os.fsync", CallKind.FILE),
        ("open", CallKind.FILE),
        ("cursor.executemany", CallKind.DATABASE),
        ("np.array", CallKind.CONVERT),
        ("torch.tensor", CallKind.CONVERT),
    ],
)
def test_well_known_names_tell_what_they_are_for(name: str, kind: CallKind) -> None:
    assert callee_kind(name) == kind


@pytest.mark.parametrize(
    "name",
    ["dumps", "digest.update", "len", "file.write", "self.print", "items", "tolist", "my.zlib.compress", "reopen"],
)
def test_a_name_that_may_be_anything_tells_nothing(name: str) -> None:
    assert callee_kind(name) == CallKind.NONE


def test_samples_are_told_by_slice_line_and_callee() -> None:
    found = callee_samples(sampled_trace([(MAIN, "running in len"), MAIN, (MAIN, "idle in time.sleep")]))
    assert [(found.names[name], int(line)) for name, line in zip(found.name, found.line, strict=True)] == [
        ("len", 42),
        ("time.sleep", 42),
    ]
    assert found.counts.tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]


MS = 1_000_000


def sampled_frame(name: str, start: float, end: float, samples: int = 0) -> dict[str, Any]:
    times = {"start": int(start * MS), "duration": int((end - start) * MS), "thread": 1}
    return {"name": name, **times, "samples": samples, "self_samples": samples, "running": samples}


def divided(
    rows: list[dict[str, Any]], intervals: list[tuple[float, float]], key: list[int] | None = None
) -> list[tuple[int, str | None, float]]:
    """Interval, function and length (ms) of each piece."""
    context = Context(trace({"python_function": rows}, length_ns=1000 * MS, sample_period_ns=10 * MS))
    frames = context.get(python_frames)
    start, end = (np.array([int(each[side] * MS) + START_NS for each in intervals]) for side in (0, 1))
    pieces, places = frames_in(frames, 1, start, end, np.array(key or [0] * len(intervals)))
    names = [context.trace.strings[int(frames.name[place])] if place >= 0 else None for place in places.tolist()]
    length = ((pieces.end - pieces.start) / MS).tolist()
    return list(zip(pieces.owner.tolist(), names, length, strict=True))


def test_recorded_calls_cut_where_frames_change() -> None:
    rows = [sampled_frame("a.py(1): a", 0, 50), sampled_frame("a.py(2): b", 10, 20)]
    assert divided(rows, [(5, 30), (60, 70)]) == [
        (0, "a.py(1): a", 5.0),
        (0, "a.py(2): b", 10.0),
        (0, "a.py(1): a", 10.0),
        (1, None, 10.0),
    ]


def test_samples_share_the_interval_that_they_are_in() -> None:
    rows = [sampled_frame("a.py(1): a", 0, 20, samples=2), sampled_frame("a.py(2): b", 20, 30, samples=1)]
    assert divided(rows, [(-1, 29)]) == [(0, "a.py(1): a", 10.0), (0, "a.py(1): a", 10.0), (0, "a.py(2): b", 10.0)]


def test_intervals_without_a_sample_are_like_those_of_the_same_key() -> None:
    rows = [sampled_frame("a.py(1): a", 100, 110, samples=1), sampled_frame("a.py(2): b", 200, 210, samples=1)]
    sampled, others = [(99, 101), (199, 201)], [(300, 302), (400, 402), (500, 502)]
    found = divided(rows, [*sampled, *others], key=[7, 7, 7, 7, 9])
    assert [name for _, name, _ in found] == ["a.py(1): a", "a.py(2): b", "a.py(1): a", "a.py(2): b", None]


def test_an_estimated_moment_close_to_an_edge_counts_on_neither_side() -> None:
    rows = [sampled_frame("a.py(1): a", 0, 20, samples=2)]
    assert divided(rows, [(9.5, 12)]) == [(0, None, 2.5)]
    assert divided(rows, [(8, 12)]) == [(0, "a.py(1): a", 4.0)]


@pytest.mark.slow
def test_a_file_with_a_tiny_period_has_no_more_samples_than_fit_into_memory() -> None:
    rows = [sampled_frame("a.py(1): a", 0, 900, samples=2)]
    context = Context(trace({"python_function": rows}, length_ns=1000 * MS, sample_period_ns=1))
    inside = np.array([START_NS + 10 * MS]), np.array([START_NS + 910 * MS])
    pieces, _ = frames_in(context.get(python_frames), 1, *inside, np.zeros(1, np.int64))
    assert len(pieces.owner) <= 2 * MAX_SAMPLES
    assert int((pieces.end - pieces.start).sum()) == 900 * MS
