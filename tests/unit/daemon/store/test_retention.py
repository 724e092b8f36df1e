"""Which captures go, and what is left of them."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.config.settings import Config, Settings
from kinetod.store.capture_store import Holding, Store
from kinetod.store.retention import HOLD_AFTER_JUMP_S, Retention, RetentionPolicy, beyond_shares, plan, share_bytes
from support.service.kept import put_capture

SECOND_NS = 10**9
DAY_NS = 86_400 * SECOND_NS
NOW_NS = 1000 * DAY_NS


def holding(number: int, *, age_days: float = 0, size: int | None = 100, uid: int = 1) -> Holding:
    ended_ns = NOW_NS - int(age_days * DAY_NS)
    return Holding(
        id=f"c{number}",
        created_ns=ended_ns,
        ended_ns=ended_ns,
        pinned=False,
        owner_uid=uid,
        local_bytes=size,
        uploaded=False,
    )


def gone(
    holdings: list[Holding], held: str = "", *, by_age: bool = True, keep_local: bool = True, **limits: Any
) -> list[tuple[str, str]]:
    policy = replace(RetentionPolicy(keep_local=keep_local), **limits)
    removals = plan(holdings, policy, NOW_NS, is_held=lambda each: each.id == held, by_age=by_age)
    return [(each.holding.id, each.rule) for each in removals]


def test_without_limits_everything_stays() -> None:
    assert gone([holding(1, age_days=900)]) == []


def test_who_takes_most_makes_room_and_nobody_within_their_share_pays() -> None:
    ada, bob = [holding(number, uid=1) for number in (1, 2)], [holding(number, uid=2) for number in range(3, 9)]
    assert gone([*ada, *bob], max_bytes=500, share_bytes=250) == [("c3", "bytes"), ("c4", "bytes"), ("c5", "bytes")]
    (removal, *_) = plan([*ada, *bob], RetentionPolicy(max_bytes=700, share_bytes=250), NOW_NS)
    assert removal.reason == (
        "all captures take 800 bytes (limit: 700 bytes), and those of uid 2 take the most: 600 bytes"
    )


def test_the_newest_capture_of_one_evicts_nothing_of_others_within_their_share() -> None:
    held = [holding(number, uid=number) for number in range(1, 6)]
    assert gone(held, max_bytes=400, share_bytes=100) == []


def test_pinned_captures_count_for_their_user_and_the_others_of_that_user_go() -> None:
    pinned = [replace(holding(number, uid=2), pinned=True) for number in (1, 2, 3)]
    holdings = [holding(0, uid=1), *pinned, holding(4, uid=2), holding(5, uid=1)]
    assert gone(holdings, max_bytes=500, share_bytes=250) == [("c4", "bytes")]
    assert gone(holdings, max_bytes=100, share_bytes=250) == [("c4", "bytes")]


def test_a_user_has_so_many_captures() -> None:
    holdings = [holding(number, uid=number % 2, size=0) for number in range(6)]
    assert gone(holdings, max_captures_per_user=2) == [("c0", "user-count"), ("c1", "user-count")]


def test_room_is_made_only_of_what_lies_beyond_shares() -> None:
    holdings = [holding(1, uid=1), *(holding(number, uid=2) for number in range(2, 6))]
    found = beyond_shares(holdings, 250, 10_000, is_held=lambda each: each.id == "c2")
    assert [each.holding.id for each in found] == ["c3", "c4"]
    found = beyond_shares(holdings, 250, 1, is_held=lambda _: False)
    assert [each.holding.id for each in found] == ["c2"]


def test_old_captures_go() -> None:
    holdings = [holding(1, age_days=9), holding(2, age_days=7.5), holding(3, age_days=6)]
    assert gone(holdings, max_age_ns=7 * DAY_NS) == [("c1", "age"), ("c2", "age")]
    assert gone(holdings, max_age_ns=7 * DAY_NS, by_age=False) == []
    (removal, _) = plan(holdings, RetentionPolicy(max_age_ns=7 * DAY_NS), NOW_NS)
    assert removal.reason == "it ended 9 days ago (limit: 7 days)"


def test_captures_without_files_go_by_age_too() -> None:
    assert gone([holding(1, age_days=9, size=0)], max_age_ns=7 * DAY_NS) == [("c1", "age")]


def test_the_oldest_go_until_the_rest_fits() -> None:
    holdings = [holding(number) for number in range(1, 6)]
    assert gone(holdings, max_bytes=300) == [("c1", "bytes"), ("c2", "bytes")]
    assert gone(holdings, max_bytes=500) == []


def test_a_user_pays_with_their_own_captures() -> None:
    holdings = [holding(1, uid=1), holding(2, uid=2), holding(3, uid=2), holding(4, uid=2)]
    assert gone(holdings, max_bytes_per_user=200) == [("c2", "user-bytes")]
    (removal,) = plan(holdings, RetentionPolicy(max_bytes_per_user=200), NOW_NS)
    assert removal.reason == "the captures of uid 2 take 300 bytes (limit: 200 bytes)"
    assert gone(holdings, max_bytes_per_user=200, max_bytes=200) == [("c2", "user-bytes"), ("c3", "bytes")]


@pytest.mark.parametrize(
    "kept", [replace(holding(1, age_days=9), pinned=True), replace(holding(1), ended_ns=0)], ids=["pinned", "running"]
)
def test_pinned_and_running_captures_stay_but_count(kept: Holding) -> None:
    holdings = [kept, holding(2), holding(3)]
    assert gone(holdings, max_age_ns=DAY_NS, max_bytes=200) == [("c2", "bytes")]


def test_what_is_yet_to_be_uploaded_stays() -> None:
    assert gone([holding(1, age_days=9), holding(2)], "c1", max_age_ns=DAY_NS, max_bytes=50) == [("c2", "bytes")]


def test_local_copies_of_uploaded_captures_go_where_they_are_not_to_be_kept() -> None:
    both = replace(holding(1), uploaded=True)
    only_there = replace(holding(2, size=0), uploaded=True)
    pinned = replace(holding(3), uploaded=True, pinned=True)
    assert gone([both, only_there, pinned, holding(4)], keep_local=False) == [("c1", "uploaded")]
    assert gone([both], keep_local=True) == []


def test_entries_of_uploaded_captures_have_an_age_of_their_own() -> None:
    there = replace(holding(1, age_days=9, size=0), uploaded=True)
    assert gone([there], max_age_ns=DAY_NS) == []
    assert gone([there], max_age_ns=DAY_NS, max_entry_age_ns=8 * DAY_NS) == [("c1", "entry-age")]
    both = replace(holding(1, age_days=9), uploaded=True)
    assert gone([both], max_age_ns=DAY_NS, max_entry_age_ns=DAY_NS) == [("c1", "age")]


# with a store


class Clock:
    """A wall clock, and one that runs on."""

    def __init__(self) -> None:
        self.wall_ns = NOW_NS
        self.steady_ns = 0

    def advance(self, ns: int) -> None:
        self.wall_ns += ns
        self.steady_ns += ns


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "state")
    yield opened
    opened.close()


def retention(store: Store, clock: Clock, **changes: object) -> Retention:
    config = Config(listen=(), agent_socket=Path("/s"), state_dir=store.state_dir, **changes)  # type: ignore[arg-type]
    return Retention(Settings(config), store, clock_ns=lambda: clock.wall_ns, steady_ns=lambda: clock.steady_ns)


def left(store: Store) -> list[str]:
    return [each.id for each in store.holdings()]


def test_what_goes_is_gone_from_disk_and_logged_with_its_reason(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    old = put_capture(store, NOW_NS - 40 * DAY_NS, uid=7)
    new = put_capture(store, NOW_NS)
    with caplog.at_level(logging.INFO):
        asyncio.run(retention(store, Clock()).apply())
    assert left(store) == [new.id]
    assert [folder.name for folder in store.captures_dir.iterdir()] == [new.id]
    (line,) = [record.message for record in caplog.records if "was removed" in record.message]
    assert line == f"capture {old.id} of uid 7 (4 KiB) was removed: it ended 40 days ago (limit: 30 days)"


def test_the_first_start_with_shares_removes_nothing_of_a_store_that_one_user_has_filled(store: Store) -> None:
    for number in range(1, 9):
        store.set_pinned(put_capture(store, NOW_NS + number, uid=7).id, number % 2 == 0)
    used = sum(each.local_bytes or 0 for each in store.holdings())
    assert asyncio.run(retention(store, Clock(), max_store_bytes=used).apply()) == []
    assert len(left(store)) == 8


def test_a_share_is_of_the_store_or_of_the_disk_where_that_is_less(store: Store) -> None:
    config = Config(listen=(), agent_socket=Path("/s"), state_dir=store.state_dir, max_store_bytes=1000)
    assert share_bytes(config, 10 << 40) == 250
    assert share_bytes(config, config.min_free_bytes + 100) == 25
    assert share_bytes(replace(config, max_store_bytes=0), config.min_free_bytes + 400) == 100
    assert share_bytes(replace(config, user_share_percent=0), 10 << 40) == 0
    assert share_bytes(config, 0) == 0


def test_of_an_uploaded_capture_the_entry_stays(store: Store) -> None:
    old = put_capture(store, NOW_NS - 40 * DAY_NS)
    store.set_upload(old.id, pb.Upload(state=pb.UPLOAD_STATE_UPLOADED))
    asyncio.run(retention(store, Clock(), upload_url="s3://b").apply())
    assert left(store) == [old.id]
    assert not store.capture_dir(old.id).exists()
    asyncio.run(retention(store, Clock(), max_entry_age_ns=DAY_NS).apply())
    assert left(store) == []


def test_with_uploads_on_nothing_goes_before_it_is_uploaded(store: Store) -> None:
    old = put_capture(store, NOW_NS - 40 * DAY_NS)
    asyncio.run(retention(store, Clock(), upload_url="s3://b", max_store_bytes=1).apply())
    assert left(store) == [old.id]
    store.set_pinned(old.id, True)
    asyncio.run(retention(store, Clock(), max_store_bytes=1).apply())
    assert left(store) == [old.id]


def test_sizes_that_nobody_measured_are_measured(store: Store) -> None:
    for number in (1, 2):
        store.set_local_bytes(put_capture(store, number, b"x" * 8192).id, -1)
    with store._db:
        store._db.execute("UPDATE captures SET local_bytes = NULL")
    asyncio.run(retention(store, Clock(), max_store_bytes=10_000, max_age_ns=0).apply())
    assert [(each.id, each.local_bytes) for each in store.holdings()] == [("c2", 8192)]


def test_a_clock_that_jumps_forward_does_not_empty_the_store(store: Store) -> None:
    put_capture(store, NOW_NS)
    clock = Clock()
    keeper = retention(store, clock)
    clock.wall_ns += 60 * DAY_NS
    asyncio.run(keeper.apply())
    assert len(left(store)) == 1
    clock.advance(int(HOLD_AFTER_JUMP_S * SECOND_NS) - 1)
    asyncio.run(keeper.apply())
    assert len(left(store)) == 1
    clock.advance(1)
    asyncio.run(keeper.apply())
    assert left(store) == []  # it was no mistake


def test_a_clock_that_is_set_right_again_is_believed_at_once(store: Store) -> None:
    put_capture(store, NOW_NS - 40 * DAY_NS)
    put_capture(store, NOW_NS)
    clock = Clock()
    keeper = retention(store, clock)
    clock.wall_ns += 60 * DAY_NS
    asyncio.run(keeper.apply())
    assert len(left(store)) == 2
    clock.wall_ns -= 60 * DAY_NS
    asyncio.run(keeper.apply())
    assert left(store) == [f"c{NOW_NS}"]
