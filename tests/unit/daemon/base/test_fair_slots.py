import asyncio
from collections.abc import Iterable

from kinetod.base.fair_slots import FairSlots, payer


async def works(slots: FairSlots, who: str, done: list[str], go_on: asyncio.Event) -> None:
    payer.set(who)
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
