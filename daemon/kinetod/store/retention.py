"""Retention: decides which captures to remove, and removes them in the background.

Theory of operation
    `plan` is pure. The rules, in this order: uploaded (if no local copies are to be kept), age (since the end of the
    capture), number and bytes per user, bytes of all captures. A user's oldest captures are removed first, until the
    rest fits. The limit for all is enforced on the user who takes the most, and never on users within their share
    (`captures.store_shares`). Captures that are running, pinned or not yet uploaded are never removed, but their bytes
    count. For an uploaded capture only the files on this host are removed; its entry stays until a separate age limit.

    The rules are applied every `store.retention_interval`, after each capture and after each upload. Ages come from the
    wall clock; if that has jumped forward by more than CLOCK_JUMP_NS relative to the steady clock, nothing is removed
    by age for HOLD_AFTER_JUMP_S: a clock that is briefly wrong must not empty the store.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kineto_trace.base.quantities import format_duration, format_size

from kinetod.base import metrics
from kinetod.base.errors import KinetodError
from kinetod.config.settings import Config, Settings
from kinetod.store.capture_store import Holding, Store
from kinetod.store.path_guard import folder_bytes

log = logging.getLogger(__name__)

CLOCK_JUMP_NS = 600 * 10**9
HOLD_AFTER_JUMP_S = 3600.0
PAUSE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The limits. Ages are nanoseconds, sizes bytes; 0 means no limit."""

    max_age_ns: int = 0
    max_bytes: int = 0
    max_bytes_per_user: int = 0
    max_captures_per_user: int = 0
    share_bytes: int = 0  # guaranteed to each user; 0: nothing
    max_entry_age_ns: int = 0  # for uploaded captures that are no longer on this host
    keep_local: bool = True  # even after the upload


@dataclass(frozen=True, slots=True)
class Removal:
    """One capture to remove: the name of the rule and a readable reason."""

    holding: Holding
    rule: str
    reason: str


def plan(
    holdings: Iterable[Holding],
    policy: RetentionPolicy,
    now_ns: int,
    *,
    is_held: Callable[[Holding], bool] = lambda _: False,
    by_age: bool = True,
) -> list[Removal]:
    """The captures to remove now. is_held: captures that may not be removed, whatever the rules say; holdings: oldest
    first.
    """
    holdings = list(holdings)
    removals: dict[str, Removal] = {}

    def may_go(each: Holding) -> bool:
        held = not each.ended_ns or each.pinned or is_held(each)
        return not held and each.id not in removals

    for each in () if policy.keep_local else holdings:
        if each.uploaded and each.local_bytes != 0 and may_go(each):
            removals[each.id] = Removal(each, "uploaded", "it is uploaded, and store.keep_local is off")
    for each in holdings if by_age else ():
        age_ns = now_ns - each.ended_ns
        is_here = each.local_bytes != 0 or not each.uploaded
        limit_ns = policy.max_age_ns if is_here else policy.max_entry_age_ns
        if may_go(each) and limit_ns and age_ns > limit_ns:
            what = "" if is_here else ", and its files are only in the object store"
            reason = f"it ended {format_duration(age_ns)} ago (limit: {format_duration(limit_ns)}){what}"
            removals[each.id] = Removal(each, "age" if is_here else "entry-age", reason)
    users = defaultdict[int | None, list[Holding]](list)
    for each in holdings:
        users[each.owner_uid].append(each)
    for uid, owned in users.items():
        who = f"the captures of uid {uid}" if uid is not None else "captures of unknown users"
        _within(policy.max_captures_per_user, _COUNT, owned, who, may_go, removals)
        _within(policy.max_bytes_per_user, _BYTES, owned, who, may_go, removals)
    if policy.max_bytes:
        _fairly(users, policy.max_bytes, policy.share_bytes, may_go, removals)
    return [removals[each.id] for each in holdings if each.id in removals]


def beyond_shares(
    holdings: Iterable[Holding], share: int, wanted: int, *, is_held: Callable[[Holding], bool]
) -> list[Removal]:
    """The captures to remove to free this many bytes: from users beyond their share, starting with the largest."""
    users = defaultdict[int | None, list[Holding]](list)
    total = 0
    for each in holdings:
        users[each.owner_uid].append(each)
        total += each.bytes
    removals: dict[str, Removal] = {}

    def may_go(each: Holding) -> bool:
        return not (not each.ended_ns or each.pinned or is_held(each) or each.id in removals)

    _fairly(users, max(0, total - wanted), share, may_go, removals)
    return list(removals.values())


def _fairly(
    users: Mapping[int | None, list[Holding]],
    limit: int,
    share: int,
    may_go: Callable[[Holding], bool],
    removals: dict[str, Removal],
) -> None:
    uses = {uid: sum(each.bytes for each in owned if each.id not in removals) for uid, owned in users.items()}
    going = {uid: iter([each for each in owned if each.bytes and may_go(each)]) for uid, owned in users.items()}
    total = sum(uses.values())
    while total > limit and going:
        uid = max(going, key=lambda each: uses[each])
        if uses[uid] <= share:
            return
        if (each := next(going[uid], None)) is None:
            del going[uid]
            continue
        who = "of unknown users" if uid is None else f"of uid {uid}"
        reason = (
            f"all captures take {format_size(total)} (limit: {format_size(limit)}), and those {who} take the most: "
            f"{format_size(uses[uid])}"
        )
        removals[each.id] = Removal(each, "bytes", reason)
        uses[uid] -= each.bytes
        total -= each.bytes


@dataclass(frozen=True, slots=True)
class _Measure:
    """A quantity limited for each user. of: how much of it one capture uses; show: a readable amount."""

    rule: str
    verb: str
    of: Callable[[Holding], int]
    show: Callable[[int], str]


_COUNT = _Measure("user-count", "number", lambda _: 1, str)
_BYTES = _Measure("user-bytes", "take", lambda each: each.bytes, format_size)


def _within(
    limit: int,
    measure: _Measure,
    holdings: list[Holding],
    who: str,
    may_go: Callable[[Holding], bool],
    removals: dict[str, Removal],
) -> None:
    total = sum(measure.of(each) for each in holdings if each.id not in removals)
    for each in holdings if limit else ():
        if total <= limit:
            return
        if measure.of(each) and may_go(each):
            reason = f"{who} {measure.verb} {measure.show(total)} (limit: {measure.show(limit)})"
            removals[each.id] = Removal(each, measure.rule, reason)
            total -= measure.of(each)


def share_bytes(config: Config, disk_bytes: int) -> int:
    """Bytes guaranteed to each user on a disk of that size."""
    room = max(0, disk_bytes - config.min_free_bytes)
    return min(config.max_store_bytes or room, room) * config.user_share_percent // 100


class Retention:
    """Applies the rules in the background."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        *,
        is_pending_upload: Callable[[str], bool] = lambda _: False,
        clock_ns: Callable[[], int] = time.time_ns,
        steady_ns: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME),
    ) -> None:
        self._settings = settings
        self._store = store
        self._is_pending_upload = is_pending_upload
        self._clock_ns = clock_ns
        self._steady_ns = steady_ns
        self._offset_ns = clock_ns() - steady_ns()
        self._hold_until_ns = 0  # by the steady clock
        self._wake = asyncio.Event()
        settings.subscribe(lambda _config: self.wake())

    def wake(self) -> None:
        """Requests that the rules be applied soon, because something has ended."""
        self._wake.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            try:
                await self.apply()
            except (KinetodError, OSError) as exc:
                log.error("retention: %s", exc)
            except Exception:
                log.exception("retention failed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._settings.current.retention_interval_ns / 1e9)
            await asyncio.sleep(PAUSE_S)  # at most this often, even if many captures end
            self._wake.clear()

    async def apply(self) -> list[Removal]:
        """Removes what the rules demand. Returns what was removed. Raises KinetodError."""
        by_age = self._clock_is_steady()
        holdings = await self._measured()
        config = self._settings.current
        policy = RetentionPolicy(
            max_age_ns=config.max_age_ns,
            max_bytes=config.max_store_bytes,
            max_bytes_per_user=config.max_user_bytes,
            max_captures_per_user=config.max_user_captures,
            share_bytes=share_bytes(config, await asyncio.to_thread(self._store.disk_bytes)),
            max_entry_age_ns=config.max_entry_age_ns,
            keep_local=config.keep_local,
        )
        now_ns = self._clock_ns()
        removals = await asyncio.to_thread(plan, holdings, policy, now_ns, is_held=self._is_held, by_age=by_age)
        for each in removals:
            await self._remove(each)
        return removals

    async def reclaim(self, size: int) -> None:
        """Frees disk space from users beyond their share, as far as possible. Raises KinetodError, OSError."""
        holdings = await self._measured()
        share = share_bytes(self._settings.current, await asyncio.to_thread(self._store.disk_bytes))
        for each in await asyncio.to_thread(beyond_shares, holdings, share, size, is_held=self._is_held):
            await self._remove(each)

    def _is_held(self, holding: Holding) -> bool:
        waits = bool(self._settings.current.upload_url) and not holding.uploaded and bool(holding.local_bytes)
        return waits or self._is_pending_upload(holding.id)

    async def _measured(self) -> list[Holding]:
        """All captures, after measuring sizes that are unknown."""
        holdings = await self._store.run(self._store.holdings)
        if all(each.local_bytes is not None or not each.ended_ns for each in holdings):
            return holdings
        for each in holdings:
            if each.local_bytes is None and each.ended_ns:
                size = await asyncio.to_thread(folder_bytes, self._store.capture_dir(each.id))
                await self._store.run(self._store.set_local_bytes, each.id, size)
        return await self._store.run(self._store.holdings)

    async def _remove(self, removal: Removal) -> None:
        holding = removal.holding
        if (now := await self._store.run(self._store.get, holding.id)) is None or now.pinned:
            return  # another call was faster
        if removal.rule == "entry-age":
            await self._store.run(self._store.set_upload, holding.id, None)
        await self._store.remove(holding.id)
        size = holding.local_bytes or 0
        metrics.pruned(removal.rule, size)
        what = "local copy of uploaded capture" if holding.uploaded and size else "capture"
        uid = "unknown" if holding.owner_uid is None else holding.owner_uid
        log.info("%s %s of uid %s (%s) was removed: %s", what, holding.id, uid, format_size(size), removal.reason)

    def _clock_is_steady(self) -> bool:
        steady_ns = self._steady_ns()
        offset_ns = self._clock_ns() - steady_ns
        jump_ns, self._offset_ns = offset_ns - self._offset_ns, offset_ns
        if jump_ns > CLOCK_JUMP_NS:
            self._hold_until_ns = steady_ns + int(HOLD_AFTER_JUMP_S * 1e9)
            log.warning(
                "the clock jumped forward by %s: nothing is removed by age for %s",
                format_duration(jump_ns), format_duration(int(HOLD_AFTER_JUMP_S * 1e9)),
            )  # fmt: skip
        elif jump_ns < -CLOCK_JUMP_NS:
            self._hold_until_ns = 0  # the clock was set back: ages are right again, or too small
        return steady_ns >= self._hold_until_ns
