"""The state of the daemon at the moment of a scrape: agents, captures in progress, delay of its event loop.

This state belongs to the event loop and is read on it. If the loop does not respond within DEADLINE_S, the scrape
reports no agents and a delay of DEADLINE_S.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

DEADLINE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonState:
    """The number of agents by state (READY, BUSY, INCOMPATIBLE) and of captures that have not ended."""

    agents: Mapping[str, int]
    captures_running: int


class DaemonCollector(Collector):
    """Reads the state on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Callable[[], DaemonState]) -> None:
        self._loop = loop
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Every family, without values."""
        return _families(None, None)

    def collect(self) -> Iterable[Metric]:
        """Every family."""
        asked = time.perf_counter()
        answer: Future[DaemonState] = Future()

        def read() -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(self._read())

        try:
            self._loop.call_soon_threadsafe(read)
            state: DaemonState | None = answer.result(DEADLINE_S)
        except (TimeoutError, RuntimeError):  # it is busy, or closed
            answer.cancel()
            state = None
        return _families(state, time.perf_counter() - asked)


def _families(state: DaemonState | None, delay_s: float | None) -> Iterable[Metric]:
    agents = GaugeMetricFamily("kineto_agents", "Agents that are connected.", labels=["state"])
    running = GaugeMetricFamily("kineto_captures_running", "Captures that have not ended.")
    delay = GaugeMetricFamily(
        "kineto_event_loop_delay_seconds", "Delay until the daemon's event loop handled this scrape."
    )
    if state is not None:
        for name, count in state.agents.items():
            agents.add_metric([name], count)
        running.add_metric([], state.captures_running)
    if delay_s is not None:
        delay.add_metric([], delay_s)
    return agents, running, delay
