"""Tells an agent that device code of its program launches CUDA graphs, before it records any GPU activity."""

import logging
from collections.abc import Awaitable, Callable

from kineto_agent.protocol import wire
from kineto_agent.sources.interface import DEVICE_GRAPHS

from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.base.safe_text import clean
from kinetod.captures.target.buffer_memory import wanted_sources
from kinetod.processes.identity import ProcessKey

log = logging.getLogger(__name__)

_SOURCE = "cupti"
_MAX_PATH_CHARS = 400


class DeviceGraphs:
    """Finds out which agents to tell. look: a file with such code in a process, or ""; it may raise OSError."""

    def __init__(self, look: Callable[[ProcessKey], Awaitable[str]] | None = None) -> None:
        self._look = look

    async def noted(self, request: wire.Start, agent: ConnectedAgent) -> wire.Start:
        """The request to send to the agent; unchanged, with a log line, if the process cannot be inspected."""
        if self._look is None or _SOURCE not in wanted_sources(request, agent.hello.sources):
            return request
        key = agent.identity.key
        try:
            file = await self._look(key)
        except OSError as exc:
            log.warning("cannot tell whether process %d launches CUDA graphs from device code: %s", key.pid, exc)
            return request
        if not file:
            return request
        return request._replace(options={**request.options, DEVICE_GRAPHS: clean(file, _MAX_PATH_CHARS)})
