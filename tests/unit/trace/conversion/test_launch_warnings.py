"""Kernels whose launches are missing are spoken of."""

import pytest
from kineto_trace.conversion.launch_warnings import launch_warnings
from support.trace_files.traces import trace


def kernels(count: int) -> list[dict[str, int]]:
    return [{"start": 1000 + i, "correlation": i} for i in range(count)]


def calls(count: int) -> list[dict[str, int]]:
    return [{"start": 500 + i, "correlation": i} for i in range(count)]


def test_kernels_with_their_launches_are_no_news() -> None:
    assert launch_warnings(trace({"kernel": kernels(100), "cuda_runtime": calls(60), "cuda_driver": calls(100)})) == ()


def test_a_few_from_before_the_recording_are_no_news() -> None:
    assert launch_warnings(trace({"kernel": kernels(100), "cuda_runtime": calls(98)})) == ()


def test_many_kernels_without_a_launch_are_spoken_of() -> None:
    assert launch_warnings(trace({"kernel": kernels(2000), "cuda_runtime": calls(500)})) == (
        "1,500 of 2,000 kernels have no launch in the trace: the calls that launched them were not recorded (name both "
        "cuda_runtime and cuda_driver among the activities)",
    )


@pytest.mark.parametrize(
    ("categories", "advice"),
    [
        (
            {"cuda_runtime": "xpu_runtime", "cuda_driver": "xpu_driver"},
            " (name both xpu_runtime and xpu_driver among the activities)",
        ),
        ({"cuda_runtime": "pebble_runtime"}, ""),
    ],
)
def test_the_calls_of_another_vendor_have_its_names(categories: dict[str, str], advice: str) -> None:
    (warning,) = launch_warnings(trace({"kernel": kernels(100), "cuda_runtime": calls(50)}, categories=categories))
    assert warning.endswith(f"the calls that launched them were not recorded{advice}")


def test_where_no_calls_were_recorded_there_is_nothing_to_say() -> None:
    assert launch_warnings(trace({"kernel": kernels(100)})) == ()
