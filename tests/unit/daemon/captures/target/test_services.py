"""What an agent is told of its program's device code before it records."""

import asyncio
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kineto_agent.protocol import wire
from kineto_agent.sources.interface import DEVICE_GRAPHS
from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.captures.result.verdict import DONE, Ending, EndState
from kinetod.captures.target.services import Conflicts, DeviceGraphs, listed
from kinetod.gpus.gpu_types import GpuProcess, GpuState, Snapshot
from kinetod.host_checks.check_runner import HostLooker
from kinetod.processes.identity import ProcessKey
from kinetod.profilers import ProfilingTool, Scan

GPU = {"cupti": ["kernel", "cuda_runtime"], "python_stacks": ["python_function"]}
BUSY = Ending(EndState.FAILED, "CUPTI_BUSY", "another tool uses CUPTI")
SAY = """import sys
sys.stdin.read()
print('{"next":"profilers"}')
print('{"scan":{"profilers":[{"product":"nvprof","pid":%d},{"product":"Nsight Systems","pid":1}],"hidden":[]}}')
"""


def explained(ending: Ending, code: str, uid: int) -> Ending:
    async def ask() -> Ending:
        looker = HostLooker(command=(sys.executable, "-S", "-c", code))
        return await Conflicts(Path("/"), looker=looker).explained(ending, uid)

    return asyncio.run(ask())


def test_a_target_whose_cupti_is_taken_is_told_who_else_profiles_here() -> None:
    found = explained(BUSY, SAY % os.getpid(), os.geteuid())
    reason = (
        f"another tool uses CUPTI; other profilers on this host: nvprof (pid {os.getpid()}), Nsight Systems (pid 1)"
    )
    if os.geteuid() != 0:
        reason = reason.replace("pid 1)", "1 process of other users)")
    assert found == Ending(EndState.FAILED, "CUPTI_BUSY", reason)


def test_another_user_is_not_told_their_pids() -> None:
    assert "(1 process of other users)" in explained(BUSY, SAY % os.getpid(), 61001).reason


def test_a_cupti_that_could_not_initialise_is_told_with_the_free_memory_of_its_gpus() -> None:
    mib = 1 << 20
    gpus = tuple(
        GpuState(
            vendor="nvidia", index=index, uuid=f"GPU-{index}", name="H100", memory_total_bytes=81_920 * mib,
            memory_used_bytes=used, processes=(GpuProcess(pid=7 + index),),
        )
        for index, used in ((0, 81_916 * mib), (1, 0))
    )  # fmt: skip
    conflicts = Conflicts(Path("/"), gpus=lambda: Snapshot(gpus=gpus))
    ending = Ending(EndState.PARTIAL, "CUPTI_NOT_INITIALIZED", "it needs some 16 MiB")
    found = asyncio.run(conflicts.explained(ending, 0, 7))
    assert found.reason == "it needs some 16 MiB; GPU 0 has 4 MiB free"
    assert asyncio.run(conflicts.explained(ending, 0, 99)) == ending
    found = asyncio.run(conflicts.explained(ending, 0, 8))
    assert "GPU 1 has 80 GiB free, so memory is not the cause" in found.reason


def test_other_ends_are_not_looked_at() -> None:
    for ending in (DONE, Ending(EndState.FAILED, "CUPTI_FAILED", "no")):
        assert explained(ending, "raise SystemExit('asked')", 0) is ending


def test_a_look_that_fails_changes_nothing() -> None:
    assert explained(BUSY, "raise SystemExit(3)", 0) == BUSY


@pytest.mark.parametrize(
    ("products", "text"), [((), ""), (("DCGM",), ""), (("nvprof",), "; other profilers on this host: nvprof (pid 7)")]
)
def test_who_holds_hardware_counters_only_is_not_in_the_way(products: tuple[str, ...], text: str) -> None:
    found = Scan(profilers=tuple(ProfilingTool(product=product, pid=7) for product in products))
    assert listed(found, lambda _: True) == text


def start(*types: str) -> wire.Start:
    return wire.Start("c1", list(types), 10**9, None, None, 0, 0, 0, 0, 1 << 20, None, {"with_stack": True})


def told(request: wire.Start, answer: str | OSError, sources: dict[str, list[str]] | None = None) -> dict[str, Any]:
    """The options that the agent is sent."""

    async def look(key: ProcessKey) -> str:
        assert key == ProcessKey(7, 70)
        if isinstance(answer, OSError):
            raise answer
        return answer

    agent = SimpleNamespace(
        hello=SimpleNamespace(sources=GPU if sources is None else sources),
        identity=SimpleNamespace(key=ProcessKey(7, 70)),
    )
    return asyncio.run(DeviceGraphs(look).noted(request, cast("ConnectedAgent", agent))).options


def test_the_file_is_added_to_the_options() -> None:
    request = start()
    assert told(request, "/opt/server") == {"with_stack": True, DEVICE_GRAPHS: "/opt/server"}
    assert request.options == {"with_stack": True}


def test_without_such_a_file_the_request_stays_as_it_is() -> None:
    assert told(start("kernel"), "") == {"with_stack": True}


def test_nobody_looks_where_nothing_of_the_gpu_is_wanted() -> None:
    assert told(start("python_function"), "/opt/server") == {"with_stack": True}
    assert told(start(), "/opt/server", {"python_stacks": ["python_function"]}) == {"with_stack": True}


def test_a_look_that_fails_is_in_the_log_and_the_capture_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert told(start(), OSError("it took too long")) == {"with_stack": True}
    assert caplog.messages == ["cannot tell whether process 7 launches CUDA graphs from device code: it took too long"]
