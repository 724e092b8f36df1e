"""What an agent is told of its program's device code before it records."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kineto_agent.protocol import wire
from kineto_agent.sources.interface import DEVICE_GRAPHS
from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.captures.target.services import DeviceGraphs
from kinetod.processes.identity import ProcessKey

GPU = {"cupti": ["kernel", "cuda_runtime"], "python_stacks": ["python_function"]}


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
