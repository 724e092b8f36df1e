"""What one user may still store beside the others."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.base.errors import Exhausted
from kinetod.captures.result.verdict import EndState
from kinetod.captures.store_shares import StoreShares, left_of
from kinetod.captures.target.endings import ending_of_disk
from kinetod.captures.target.record_spool import ShareUsed
from kinetod.config.settings import Config, Settings
from kinetod.store.capture_store import Store, Use
from kinetod.store.retention import Retention
from support.service.callers import ROOT, caller
from support.service.kept import put_capture

ADA, BOB = 1000, 1001


def use(uid: int, stored: int, kept: int = 0) -> Use:
    return Use(owner_uid=uid, stored_bytes=stored, pinned_bytes=kept, kept_bytes=kept)


def left(
    *uses: Use, live: dict[int, int] | None = None, share: int = 250, most: int = 1000, admin: bool = False
) -> int:
    known = {each.owner_uid: each for each in uses}
    return left_of(ADA, known, live or {}, share=share, most=most, admin=admin).size


def test_in_an_empty_store_a_running_capture_may_take_the_share() -> None:
    assert left() == 250
    assert left(live={ADA: 100, BOB: 900}) == 0  # the store is full
    assert left(live={ADA: 300}) == -50


def test_what_may_not_be_removed_takes_no_more_than_the_share() -> None:
    assert left(use(ADA, 200, kept=200)) == 50
    assert left(use(ADA, 900, kept=0)) == 250


def test_what_others_have_beyond_their_share_is_room_and_what_they_are_sure_of_is_none() -> None:
    assert left(use(BOB, 1000)) == 250
    assert left(use(BOB, 1000, kept=900)) == 100
    others = [use(uid, 250) for uid in range(1, 5)]
    assert left(*others) == 0
    assert left(*others, use(ADA, 100)) == 0


def test_an_administrator_is_held_to_the_size_of_the_store_alone() -> None:
    assert left(use(ADA, 600, kept=600), admin=True) == 400


def test_without_shares_and_sizes_there_is_no_limit() -> None:
    assert left(use(ADA, 10**12, kept=10**12), share=0, most=0) > 10**15


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "state")
    yield opened
    opened.close()


def shares_of(store: Store, live: dict[int, int] | None = None, **changes: object) -> StoreShares:
    usual: dict[str, object] = {"min_free_bytes": 0, "start_free_bytes": 0, "max_store_bytes": 40960}
    config = Config(listen=(), agent_socket=Path("/s"), state_dir=store.state_dir, **{**usual, **changes})  # type: ignore[arg-type]
    settings = Settings(config)
    return StoreShares(settings, store, Retention(settings, store), lambda: live or {})


def test_who_has_pinned_a_whole_share_begins_no_capture_and_is_told_what_to_do(store: Store) -> None:
    for number in range(1, 4):
        store.set_pinned(put_capture(store, number, uid=ADA).id, True)  # 4 KiB each

    async def run() -> str:
        shares = shares_of(store)
        await shares.check(caller(BOB), BOB)
        await shares.check(ROOT, ADA)
        with pytest.raises(Exhausted) as info:
            await shares.check(caller(ADA), ADA)
        assert info.value.reason == "QUOTA_EXCEEDED"
        return info.value.message

    message = asyncio.run(run())
    assert "one user's share is 10 KiB (store.share_per_user); unpin or delete some" in message


def test_no_more_can_be_pinned_than_the_share(store: Store) -> None:
    for number in range(1, 3):
        store.set_pinned(put_capture(store, number, uid=ADA).id, True)

    async def run() -> None:
        shares = shares_of(store)
        await shares.check_pin(caller(ADA), ADA, 2048)
        await shares.check_pin(ROOT, ADA, 1 << 40)
        with pytest.raises(Exhausted, match=r"would take 12 KiB, and one user's share is 10 KiB"):
            await shares.check_pin(caller(ADA), ADA, 4096)

    asyncio.run(run())


def test_a_running_capture_that_uses_its_share_up_ends_with_what_it_has(store: Store) -> None:
    async def run() -> ShareUsed:
        shares = shares_of(store, live={ADA: 20_000})
        await shares.refresh()
        shares.check_left(BOB, admin=False)
        with pytest.raises(ShareUsed) as info:
            shares.check_left(ADA, admin=False)
        return info.value

    ending = ending_of_disk(asyncio.run(run()))
    assert (ending.outcome, ending.code) == (EndState.PARTIAL, "QUOTA_EXCEEDED")
    assert "store.share_per_user" in ending.reason


def test_on_a_full_disk_what_was_lent_goes_before_anybody_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 6):
        put_capture(store, number, uid=ADA)
    put_capture(store, 6, uid=BOB)
    full = 24 << 10
    monkeypatch.setattr(store, "disk_bytes", lambda: full)
    monkeypatch.setattr(store, "free_bytes", lambda: full - sum(each.local_bytes or 0 for each in store.holdings()))

    async def run() -> None:
        shares = shares_of(store, start_free_bytes=8 << 10)
        await shares.check(caller(BOB), BOB)

    asyncio.run(run())
    assert [each.id for each in store.holdings()] == ["c3", "c4", "c5", "c6"]


@pytest.mark.parametrize(
    ("free", "quota", "reason"),
    [(1000, 0, ""), (999, 0, "LOW_DISK"), (1000, 4097, ""), (1000, 4096, "QUOTA_EXCEEDED")],
)
def test_a_capture_begins_where_disk_and_quota_have_room(
    store: Store, monkeypatch: pytest.MonkeyPatch, free: int, quota: int, reason: str
) -> None:
    put_capture(store, 1, uid=ADA)
    store.set_pinned("c1", True)  # cannot make room
    monkeypatch.setattr(store, "free_bytes", lambda: free)
    shares = shares_of(store, start_free_bytes=1000, quota_per_user_bytes=quota)
    try:
        asyncio.run(shares.check(caller(ADA), ADA))
    except Exhausted as exc:
        assert exc.reason == reason
    else:
        assert not reason


def test_what_is_yet_to_be_uploaded_is_kept(store: Store) -> None:
    put_capture(store, 1, uid=ADA)
    assert store.uses(False) == [Use(owner_uid=ADA, stored_bytes=4096)]
    assert store.uses(True) == [Use(owner_uid=ADA, stored_bytes=4096, kept_bytes=4096)]
