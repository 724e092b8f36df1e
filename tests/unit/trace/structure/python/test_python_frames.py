"""Times in these traces are microseconds."""

from typing import Any

import numpy as np
import pytest
from kineto_trace.model.context import Context
from kineto_trace.structure.python.python_frames import KINDS, described, library_kind, python_frames
from support.trace_files.traces import START_NS, trace

US = 1000


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train.py(10): main", None),
        ("/home/me/torch/train.py(10): main", None),
        ("mypackage/model.py(3): forward", None),
        ("/srv/job/logging.py(3): write", None),
        ("torch/nn/modules/module.py(1501): _call_impl", ""),
        ("/venv/lib/python3.12/site-packages/torch/optim/adam.py(214): Adam.step", ""),
        ("nn.Module: Linear_0", ""),
        ("<built-in function len>", ""),
        ("typing.py(359): inner", ""),
        ("<built-in function sleep>", "sleep"),
        ("threading.py(320): Condition.wait", "lock"),
        ("/usr/lib/python3.11/queue.py(154): Queue.get", "lock"),
        ("<built-in method acquire of _thread.lock object at 0x7f>", "lock"),
        ("<built-in method recv of socket object>", "input_output"),
        ("torch/serialization.py(600): save", "input_output"),
        ("logging/__init__.py(1092): flush", "logging"),
        ("<built-in function print>", "logging"),
        ("torch/_tensor_str.py(600): _str", "logging"),
        ("<built-in function collect>", "garbage_collection"),
        ("torch/utils/data/dataloader.py(701): __next__", "data"),
        ("torch/utils/data/_utils/collate.py(120): collate", "data"),
        ("torch/utils/data/distributed.py(100): set_epoch", ""),
        ("torch/autograd/graph.py(860): _engine_run_backward", "backward"),
    ],
)
def test_a_frame_is_told_by_its_name(name: str, kind: str | None) -> None:
    found = library_kind(name)
    assert (None if found is None else KINDS[found]) == kind


def frame(name: str, start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "start": start * US, "duration": (end - start) * US, "thread": 1, **more}


def kinds(rows: list[dict[str, Any]], *moments: int) -> list[tuple[str, str]]:
    """The innermost function of the user's and the kind at each moment."""
    context = Context(trace({"python_function": rows}))
    frames, strings = context.get(python_frames), context.trace.strings
    places = frames.innermost(np.ones(len(moments), np.uint32), np.array(moments) * US + START_NS).tolist()
    users = [int(frames.user[place]) for place in places]
    names = [strings[int(frames.name[user])] if user >= 0 else "" for user in users]
    return [(name, KINDS[int(frames.kind[place])]) for name, place in zip(names, places, strict=True)]


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


def test_a_sampled_function_that_was_off_the_cpu_was_blocked_but_not_what_it_called() -> None:
    rows = [
        frame("train.py(1): main", 0, 100, samples=10, self_samples=5, idle=4, running=1),
        frame("train.py(9): work", 50, 70, samples=2, self_samples=2, running=2),
        frame("train.py(12): locked", 70, 90, samples=2, self_samples=2, waiting=2),
    ]
    assert [kind for _, kind in kinds(rows, 10, 60, 80)] == ["blocked", "", "gil"]


def test_a_function_is_described_by_its_file_and_line() -> None:
    assert described("train.py(10): main", 14) == "main (train.py:14)"
    assert described("train.py(10): main") == "main (train.py:10)"
    assert described("<built-in function sleep>", 3) == "<built-in function sleep>"
