"""Whose code a function is."""

import pytest
from kineto_trace.analysis.host_time.code_places import CodePlace, is_user_code, place_of


@pytest.mark.parametrize(
    "name",
    [
        "/job/train.py(10): main",
        "train.py(10): main",
        "model/layers.py(3): Block.forward",
        "/home/u/lib/data.py(1): <lambda>",
    ],
)
def test_files_of_the_program_are_the_users(name: str) -> None:
    assert is_user_code(name)


@pytest.mark.parametrize(
    "name",
    [
        "/venv/lib/python3.11/site-packages/torch/_tensor.py(566): backward",
        "/usr/lib/python3/dist-packages/yaml/__init__.py(1): load",
        "/usr/lib/python3.11/json/encoder.py(2): encode",
        "<frozen importlib._bootstrap>(1): _load",
        "torch/nn/modules/module.py(1501): _call_impl",
        "threading.py(973): _bootstrap",
        "<built-in method sleep of PyCapsule object>",
        "nn.Module: Linear_0",
    ],
)
def test_packages_the_standard_library_and_built_in_functions_are_not(name: str) -> None:
    assert not is_user_code(name)


def test_a_place_has_function_file_and_line() -> None:
    place = place_of("/job/train.py(10): fit.<locals>.step", 14)
    assert place == CodePlace("/job/train.py", "fit.step", 14)
    assert (str(place), place.short) == ("fit.step (/job/train.py:14)", "fit.step (train.py:14)")
