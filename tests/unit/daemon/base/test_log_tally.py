import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from kinetod.base import log_tally as tally_module
from kinetod.base.log_tally import Tally

FIRST = {"call": "GetHost", "decision": "refused"}


def test_the_first_line_of_a_kind_is_written_and_the_others_are_counted() -> None:
    async def run() -> list[Mapping[str, Any]]:
        written: list[Mapping[str, Any]] = []
        done = asyncio.Event()

        def write(line: Mapping[str, Any]) -> None:
            written.append(line)
            if "count" in line:
                done.set()

        tally = Tally(write, period_s=0.05)
        for _ in range(1000):
            tally.note("ada", FIRST)
        tally.note("bob", {"call": "other"})
        await done.wait()
        return written

    assert asyncio.run(run()) == [FIRST, {"call": "other"}, {**FIRST, "count": 999}]


def test_what_is_counted_at_the_end_is_written() -> None:
    async def run() -> list[Mapping[str, Any]]:
        written: list[Mapping[str, Any]] = []
        tally = Tally(written.append)
        for _ in range(3):
            tally.note("ada", FIRST)
        tally.flush()
        return written

    assert asyncio.run(run()) == [FIRST, {**FIRST, "count": 2}]


def test_however_many_kinds_there_are_the_lines_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_module, "MAX_KINDS", 5)

    async def run() -> list[Mapping[str, Any]]:
        written: list[Mapping[str, Any]] = []
        tally = Tally(written.append)
        for number in range(100):
            tally.note(number, {"number": number})
        return written

    assert len(asyncio.run(run())) == 6
