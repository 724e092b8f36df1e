"""What other profilers are known by."""

import pytest
from kinetod.processes.profiler_signs import SIGNS, of_libraries, of_program


def products(*names: str) -> list[str]:
    return [sign.product for sign, _library in of_libraries(names)]


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("nv-hostengine", "DCGM"),
        ("dcgm-exporter", "dcgm-exporter"),
        ("nsys", "Nsight Systems"),
        ("ncu", "Nsight Compute"),
        ("compute-sanitiz", "Compute Sanitizer"),  # as the kernel cuts it
        ("nvprof", "nvprof"),
        ("ncurses", None),
        ("", None),
    ],
)
def test_tools_are_known_by_the_names_of_their_programs(name: str, product: str | None) -> None:
    sign = of_program({name, "python3"})
    assert (sign.product if sign else None) == product


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["libc.so.6", "libToolsInjection64.so"], ["Nsight Systems"]),
        (["libToolsInjectionProxy64.so", "libcupti.so.12"], ["Nsight Systems"]),
        (["libcuda-injection.so"], ["Nsight Compute"]),
        (["libTreeLauncherTargetInjection.so"], ["Nsight Compute"]),
        (["libdcgmmoduleprofiling.so.4"], ["DCGM"]),
        (["libnvperf_host.so", "libcupti.so.12"], ["CUPTI's hardware counters"]),
        (["libcupti.so.13"], ["a program with its own CUPTI"]),
        (["libcupti.so.12", "libtorch_cpu.so"], []),
        (["libcupti.so.12", "libkineto_collector.so"], []),
        (["libcuda.so.1", "libcudart.so.12"], []),
    ],
)
def test_tools_are_known_by_the_libraries_in_the_processes_that_they_trace(
    names: list[str], expected: list[str]
) -> None:
    assert products(*names) == expected


def test_no_tool_is_listed_twice() -> None:
    assert len({sign.product for sign in SIGNS}) == len(SIGNS)
