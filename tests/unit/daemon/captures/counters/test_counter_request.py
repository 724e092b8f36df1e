"""What is asked of kinetod-counters before a capture."""

import asyncio
import socket

import pytest
from kinetod.captures.counters import counter_request
from kinetod.captures.counters.counter_request import SamplingRequest, with_plan
from kinetod.counters.counter_client import CounterClient
from kinetod.counters.interface import WantedCounters
from kinetod.counters.sampler_server import SamplerService
from support.counters.in_process import InProcess
from support.counters.memory_backend import MemoryBackend

ASKED = SamplingRequest(WantedCounters(set_name="overview"), 0)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_sampler_that_does_not_answer_before_the_capture_is_known(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    unread: list[socket.socket] = []

    async def ask() -> SamplingRequest:
        service = SamplerService(MemoryBackend(), may_ask=lambda _: True)
        if hangs:
            monkeypatch.setattr(counter_request, "PLAN_S", 0.05)
            monkeypatch.setattr(service.connections, "accepted", unread.append)
        try:
            return await with_plan(CounterClient(InProcess(service)), ASKED)
        finally:
            await service.stop()

    assert asyncio.run(ask()).silent is hangs
    for each in unread:
        each.close()
