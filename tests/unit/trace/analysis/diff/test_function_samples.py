from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.diff.diff_views import compare, diff_python_functions
from kineto_trace.analysis.diff.function_samples import function_name
from kineto_trace.model.context import Context
from support.trace_files.traces import trace

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("/home/me/before/train.py(40): augment", "train.py: augment"),
        ("/home/me/models/__init__.py(2): build", "models/__init__.py: build"),
        ("/home/me/run (1)/train.py(40): augment", "train.py: augment"),
        (r"C:\job\train.py(40): augment", "train.py: augment"),
        ("train.py(7): <lambda>", "train.py: <lambda>"),
        ("/opt/v/lib/python3.11/site-packages/torch/optim/adam.py(9): step", "torch/optim/adam.py: step"),
        ("/usr/lib/python3.11/json/decoder.py(3): decode", "json/decoder.py: decode"),
        ("<built-in method mm of type object at 0x7f12ab>", "<built-in method mm of type object>"),
        ("nn.Module: Linear_0", "nn.Module: Linear_0"),
    ],
)
def test_a_function_is_matched_whatever_its_line_and_folder(text: str, name: str) -> None:
    assert function_name(text) == name


def sampled(folder: str, line: int, augment: float, seed: int) -> Context:
    """Six steps of a second in samples of 1 ms: `augment` in a part of them, else `train`."""
    random, rows, marks = np.random.default_rng(seed), [], []
    for step in range(6):
        start, part = step * SECOND, round(1000 * augment * (1 + 0.02 * random.standard_normal()))
        marks.append({"name": f"ProfilerStep#{step}", "start": start, "duration": SECOND, "thread": 1, "finished": 1})
        for name, first, count in (("augment", 0, part), ("train", part, 1000 - part)):
            where = f"/home/{folder}/train.py({line}): {name}"
            row: dict[str, Any] = {"name": where, "start": start + first * SECOND // 1000, "thread": 1}
            rows.append({**row, "duration": count * SECOND // 1000, "samples": count, "self_samples": count})
    return Context(trace({"python_function": rows, "user_annotation": marks}, sample_period_ns=SECOND // 1000))


def test_a_function_that_became_slower_is_named_from_samples() -> None:
    found = compare(diff_python_functions, sampled("a", 10, 0.2, 1), sampled("b", 12, 0.4, 2)).rows()
    assert [(row["name"], row["verdict"]) for row in found] == [
        ("train.py: augment", "slower"),
        ("train.py: train", "faster"),
    ]
    assert found[0]["baseline_us"] == pytest.approx(200_000, rel=0.05)


def test_the_time_of_recorded_calls_is_that_without_the_calls_inside() -> None:
    def calls(inner: int) -> Context:
        rows, marks = [], []
        for step in range(4):
            at = 10_000 * step
            marks.append({"name": f"ProfilerStep#{step}", "start": at, "duration": 9000, "thread": 1, "finished": 1})
            for name, start, duration in (("f", at + 100, 2000 + inner), ("g", at + 200, inner)):
                rows.append({"name": f"t.py(1): {name}", "start": start, "duration": duration, "thread": 1})
        return Context(trace({"python_function": rows, "user_annotation": marks}))

    found = {row["name"]: row for row in compare(diff_python_functions, calls(1000), calls(3000)).rows()}
    assert (found["t.py: g"]["verdict"], found["t.py: g"]["delta_us"]) == ("slower", 2.0)
    assert (found["t.py: f"]["verdict"], found["t.py: f"]["baseline_us"]) == ("within noise", 2.0)


def test_a_trace_without_python_says_so() -> None:
    found = compare(diff_python_functions, Context(trace({})), Context(trace({})))
    assert len(found) == 0
    assert any("no Python functions" in note for note in found.notes)
