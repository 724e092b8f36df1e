"""The names of Python functions, in every form that a trace has them in."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.model.context import Context
from kineto_trace.structure.python.code_places import CodePlace, code_place, functions_named
from support.trace_files.traces import trace


@pytest.mark.parametrize(
    ("text", "file", "line", "function"),
    [
        ("/job/train.py(10): main", "/job/train.py", 10, "main"),
        ("train.py(0): <module>", "train.py", 0, "<module>"),
        ("/home/me/run (1)/train.py(12): f", "/home/me/run (1)/train.py", 12, "f"),
        ("/home/me/runs (2): new/train.py(12): f", "/home/me/runs (2): new/train.py", 12, "f"),
        ("/home/me/a(3).py(12): f", "/home/me/a(3).py", 12, "f"),
        ("<string>(5): f", "<string>", 5, "f"),
        ("<frozen importlib._bootstrap>(1): x", "<frozen importlib._bootstrap>", 1, "x"),
        ("<eval_with_key>.12(5): forward", "<eval_with_key>.12", 5, "forward"),
        ("/usr/bin/torchrun(8): main", "/usr/bin/torchrun", 8, "main"),
        ("a.py(3): f.<locals>.<genexpr>", "a.py", 3, "f.<locals>.<genexpr>"),
        ("a.py(3): <lambda>", "a.py", 3, "<lambda>"),
        ("a.py(3): operator()(int): g", "a.py", 3, "operator()(int): g"),
        ("a.py(3): f(7): b.py(8): g", "a.py", 3, "f(7): b.py(8): g"),
        (r"C:\Users\me (1)\train.py(12): f", r"C:\Users\me (1)\train.py", 12, "f"),
        ("/home/é/模型.py(2): forwärts", "/home/é/模型.py", 2, "forwärts"),
        ("<built-in method sleep of PyCapsule object at 0x7f>", "", 0, None),
        ("<built-in method run of a.py(3): b object at 0x7f>", "", 0, None),
        ("<method 'item' of 'torch._C.TensorBase' objects>", "", 0, None),
        ("nn.Module: Linear_0", "", 0, None),
        ("nn.Module: a.py(3): b_0", "", 0, None),
        ("train.py", "", 0, None),
        ("main", "", 0, None),
        ("train.py(10)", "", 0, None),
        ("train.py(10): ", "", 0, None),
        ("(10): main", "", 0, None),
        (f"train.py({'9' * 5000}): main", "", 0, None),
        ("", "", 0, None),
    ],
)
def test_a_name_has_file_line_and_function(text: str, file: str, line: int, function: str | None) -> None:
    assert code_place(text) == CodePlace(file, text if function is None else function, line)


ANY_TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
LIKE_A_NAME = st.text(st.sampled_from("a(1): .py/\\<>é"), min_size=1, max_size=30)
FILES = (ANY_TEXT | LIKE_A_NAME).map(lambda text: f"{text}.py")


@given(FILES, st.integers(0, 999_999_999), ANY_TEXT | LIKE_A_NAME)
def test_a_python_file_is_found_whatever_the_names(file: str, line: int, function: str) -> None:
    if not re.search(r"\.py\([0-9]+\): ", file):
        assert code_place(f"/{file}({line}): {function}") == CodePlace(f"/{file}", function, line)


@given(ANY_TEXT | LIKE_A_NAME)
def test_every_text_has_a_place_that_can_be_shown(text: str) -> None:
    place = code_place(text)
    assert place.line == 0 or f"({place.line}): " in re.sub(r"\(0+(?=[0-9])", "(", text)
    assert str(place)
    assert place.short


def test_a_place_is_shown_with_the_line_that_ran() -> None:
    place = code_place("/job/train.py(10): fit.<locals>.step", 14)
    assert place == CodePlace("/job/train.py", "fit.<locals>.step", 14)
    assert (str(place), place.short) == ("fit.step (/job/train.py:14)", "fit.step (train.py:14)")


@pytest.mark.parametrize(
    ("text", "shown", "short"),
    [
        ("train.py(10): main", "main (train.py:10)", "main (train.py:10)"),
        ("train.py(0): main", "main (train.py)", "main (train.py)"),
        (r"C:\job\train.py(10): main", r"main (C:\job\train.py:10)", "main (train.py:10)"),
        (r"job\train.py(10): main", r"main (job\train.py:10)", "main (train.py:10)"),
        (r"/job/a\b.py(10): main", r"main (/job/a\b.py:10)", r"main (a\b.py:10)"),
        ("<built-in function sleep>", "<built-in function sleep>", "<built-in function sleep>"),
    ],
)
def test_a_place_is_shown_as_function_file_and_line(text: str, shown: str, short: str) -> None:
    assert (str(code_place(text)), code_place(text).short) == (shown, short)


def test_functions_are_found_by_path_and_function_on_any_system() -> None:
    names = ["/v (1)/torch/optim/adam.py(9): step", r"C:\v\torch\optim\adam.py(9): step", "torch/optim/sgd.py(9): f"]
    context = Context(trace({"python_function": [{"name": name, "start": 0, "duration": 1} for name in names]}))
    flags = functions_named(context, re.compile(r"(?:^|/)torch/optim/adam\.py: step$"))
    rows = np.flatnonzero(flags[context.trace.table("python_function")["name"]])
    assert rows.tolist() == [0, 1]
