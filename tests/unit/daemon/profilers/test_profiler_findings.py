"""What other profilers are in the way of, and what to do."""

import pytest
from kinetod.attach.finding import Finding, Status
from kinetod.processes.profiler_signs import BY_PRODUCT
from kinetod.profilers.dcgm import Profiling
from kinetod.profilers.profiler_findings import findings, of_libraries
from kinetod.profilers.profiler_scan import ProfilingTool, Scan


def one(*profilers: ProfilingTool, seen: bool = True, dcgm: Profiling | None = None) -> Finding:
    (found,) = findings(Scan(profilers=profilers), lambda _: seen, (dcgm, "why") if dcgm else None)
    assert found.name == "profilers"
    return found


def test_none_is_in_order_and_says_what_was_not_seen() -> None:
    (found,) = findings(Scan(hidden=tuple(range(1, 8))), lambda _: True, None)
    assert (found.status, found.detail) == (
        Status.OK,
        "none found; of 7 processes of other users only the names were seen",
    )


def test_dcgm_without_its_profiling_module_is_in_nobodys_way() -> None:
    assert one(ProfilingTool(product="DCGM", pid=5), dcgm=Profiling.NOT_LOADED).status is Status.OK


@pytest.mark.parametrize(
    ("dcgm", "says"),
    [
        (Profiling.LOADED, "has its profiling module loaded"),
        (Profiling.UNKNOWN, "(why)"),
        (None, "it was not asked"),
    ],
)
def test_dcgm_that_may_hold_counters_comes_with_the_command_that_frees_them(dcgm: Profiling | None, says: str) -> None:
    found = one(ProfilingTool(product="DCGM", pid=5, gpus=(0, 1)), dcgm=dcgm)
    assert found.status is Status.NOTE
    assert says in found.detail and "pid 5, with GPU 0, 1 open" in found.detail
    assert "`dcgmi profile --pause`" in found.advice


def test_processes_of_others_are_counted_but_not_named() -> None:
    found = one(
        ProfilingTool(product="Nsight Systems", pid=5), ProfilingTool(product="Nsight Systems", pid=6), seen=False
    )
    assert "2 processes of other users" in found.detail and "5" not in found.detail


def test_many_processes_are_not_all_named() -> None:
    found = one(*(ProfilingTool(product="Nsight Systems", pid=pid) for pid in range(1, 9)))
    assert "(pid 1, pid 2, pid 3, pid 4, pid 5, 3 more)" in found.detail


@pytest.mark.parametrize("product", BY_PRODUCT)
def test_every_tool_has_a_finding_and_none_is_a_problem_by_itself(product: str) -> None:
    assert one(ProfilingTool(product=product, pid=5)).status is Status.NOTE
    assert of_libraries([product]).status in (Status.OK, Status.NOTE)


def test_in_a_process_only_a_tool_that_takes_cupti_is_worth_a_note() -> None:
    assert of_libraries([]).detail == "none in it"
    assert of_libraries(["a program with CUPTI of its own"]).detail == "none in it"
    assert of_libraries(["CUPTI's hardware counters"]).status is Status.OK
    assert of_libraries(["Nsight Systems"]).status is Status.NOTE
