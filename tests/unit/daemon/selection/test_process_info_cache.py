import asyncio
import os
from collections.abc import Sequence

import pytest
from kinetod.processes.identity import ProcessKey
from kinetod.processes.process_info import ProcessFacts, read_facts
from kinetod.selection import process_info_cache
from kinetod.selection.process_info_cache import RecentFacts

OURS = [os.getpid(), os.getppid()]


class Reader:
    """Reads the facts of real processes and notes which."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.steady = True
        self.done = asyncio.Event()

    async def __call__(self, pids: Sequence[int]) -> list[ProcessFacts]:
        self.read += pids
        self.done.set()
        return [facts for facts in map(read_facts, pids) if facts is not None]

    def is_steady(self, _key: ProcessKey) -> bool:
        return self.steady


async def shown(facts: RecentFacts, pids: Sequence[int]) -> list[int]:
    return [each.key.pid for each in await facts.get(pids)]


def test_processes_with_an_agent_are_not_read_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FRESH_S", "SHOWN_S"):
        monkeypatch.setattr(process_info_cache, name, 1000)

    async def scenario() -> None:
        reader = Reader()
        facts = RecentFacts(reader, reader.is_steady)
        assert await shown(facts, OURS) == await shown(facts, OURS) == OURS
        assert reader.read == OURS
        assert await shown(facts, OURS[:1]) == OURS[:1]

    asyncio.run(scenario())


def test_what_is_a_second_old_is_shown_and_read_anew_behind_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_info_cache, "FRESH_S", -1)
    monkeypatch.setattr(process_info_cache, "SHOWN_S", 1000)
    monkeypatch.setattr(process_info_cache, "BATCH", 1)

    async def scenario() -> None:
        reader = Reader()
        facts = RecentFacts(reader, reader.is_steady)
        await facts.get(OURS)
        reader.done.clear()
        assert await shown(facts, OURS) == OURS
        assert reader.read == OURS  # not waited for
        async with asyncio.timeout(30):
            while len(reader.read) < 2 * len(OURS):
                await reader.done.wait()
                reader.done.clear()
        assert reader.read == OURS * 2

    asyncio.run(scenario())


def test_what_nobody_has_asked_for_lately_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_info_cache, "SHOWN_S", -1)

    async def scenario() -> None:
        reader = Reader()
        facts = RecentFacts(reader, reader.is_steady)
        await facts.get(OURS)
        assert await shown(facts, OURS) == OURS
        assert reader.read == OURS * 2

    asyncio.run(scenario())


def test_a_process_without_an_agent_is_always_read() -> None:
    async def scenario() -> None:
        reader = Reader()
        reader.steady = False
        facts = RecentFacts(reader, reader.is_steady)
        await facts.get(OURS)
        assert await shown(facts, OURS) == OURS
        assert reader.read == OURS * 2

    asyncio.run(scenario())


def test_a_process_that_has_ended_is_left_out() -> None:
    async def scenario() -> None:
        reader = Reader()
        assert await shown(RecentFacts(reader, reader.is_steady), [2**22, *OURS]) == OURS

    asyncio.run(scenario())
