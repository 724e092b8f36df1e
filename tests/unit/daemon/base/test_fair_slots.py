import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kinetod
from kinetod.base.fair_slots import FairSlots, fair_share_key


async def works(slots: FairSlots, who: str, done: list[str], go_on: asyncio.Event) -> None:
    fair_share_key.set(who)
    async with slots.turn():
        await go_on.wait()
        done.append(who)


def order(slots: FairSlots, callers: Iterable[str]) -> list[str]:
    """In which order they are served who come while the first is at work."""

    async def run() -> list[str]:
        done: list[str] = []
        go_on = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for who in callers:
                tasks.create_task(works(slots, who, done, go_on))
            await asyncio.sleep(0)
            go_on.set()
        return done

    return asyncio.run(run())


def test_turns_go_round_the_callers() -> None:
    assert order(FairSlots(1), "aaaabbc") == ["a", "a", "b", "c", "a", "b", "a"]


def test_one_caller_alone_has_all_turns_but_the_spare_one() -> None:
    async def run() -> int:
        slots, go_on, done = FairSlots(3, spare=1), asyncio.Event(), list[str]()
        tasks = [asyncio.create_task(works(slots, "ada", done, go_on)) for _ in range(10)]
        await asyncio.sleep(0)
        used = slots.used
        go_on.set()
        await asyncio.gather(*tasks)
        assert slots.used == 0
        return used

    assert asyncio.run(run()) == 3


def test_who_has_nothing_does_not_wait_for_who_has_everything() -> None:
    async def run() -> None:
        slots, never = FairSlots(2, spare=1), asyncio.Event()
        hogs = [asyncio.create_task(works(slots, "hog", [], never)) for _ in range(5)]
        await asyncio.sleep(0)
        go_on, done = asyncio.Event(), list[str]()
        go_on.set()
        for _ in range(3):
            await asyncio.create_task(works(slots, "ada", done, go_on))
        assert done == ["ada"] * 3
        for hog in hogs:
            hog.cancel()
        await asyncio.gather(*hogs, return_exceptions=True)
        assert slots.used == 0

    asyncio.run(run())


def test_who_gives_up_waiting_takes_no_turn() -> None:
    async def run() -> None:
        slots, go_on, done = FairSlots(1), asyncio.Event(), list[str]()
        first, second, third = (asyncio.create_task(works(slots, who, done, go_on)) for who in "abc")
        await asyncio.sleep(0)
        second.cancel()
        go_on.set()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert done == ["a", "c"]
        assert (slots.used, slots._waiting) == (0, {})

    asyncio.run(run())


def test_a_turn_that_is_granted_to_somebody_who_gives_up_goes_to_the_next() -> None:
    async def run() -> None:
        slots, go_on, done = FairSlots(1), asyncio.Event(), list[str]()
        go_on.set()
        async with slots.turn():
            second, third = (asyncio.create_task(works(slots, who, done, go_on)) for who in "bc")
            await asyncio.sleep(0)
        second.cancel()  # its turn has come already
        await asyncio.gather(second, third, return_exceptions=True)
        assert done == ["c"]
        assert (slots.used, slots._waiting) == (0, {})

    asyncio.run(run())


def test_who_has_all_threads_busy_keeps_no_other_user_waiting() -> None:
    async def run() -> None:
        go_on = threading.Event()
        with ThreadPoolExecutor(3) as threads:
            slots = FairSlots(2, spare=1, threads=threads)
            fair_share_key.set("hog")
            hogs = [asyncio.create_task(slots.in_thread(go_on.wait)) for _ in range(10)]
            await asyncio.sleep(0)
            fair_share_key.set("ada")
            assert await slots.in_thread(fair_share_key.get) == "ada"
            assert not any(hog.done() for hog in hogs)
            go_on.set()
            await asyncio.gather(*hogs)

    asyncio.run(run())


def test_users_wait_for_nothing_in_one_line_but_each_in_their_own() -> None:
    """A semaphore serves who came first: one user's hundred questions before another's one."""
    folder = Path(kinetod.__path__[0])
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.py") if "Semaphore(" in path.read_text()}
    assert found == {"attach_helper/kept_folders.py"}  # one for each user
