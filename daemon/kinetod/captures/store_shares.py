"""Computes what a user may still store: everybody is guaranteed a share of the store that nobody else can take.

Theory of operation
    A share is `store.share_per_user` percent of what the store can hold: `store.max_bytes`, or the disk minus
    `store.min_free_bytes` if that is less. A user may store more while there is room, but the excess is removed first
    when somebody else needs the room (`retention`). Captures that cannot be removed (running, pinned or not yet
    uploaded) never exceed the share. So a capture is refused, or ended with what it has recorded, before others would
    have to make room for it; and a user within their share loses nothing to anybody.

    Only the size of the store limits administrators. `refresh` asks the index; between refreshes, only what running
    captures write is counted.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kineto_trace.base.quantities import format_size

from kinetod.base.errors import Exhausted, Reason
from kinetod.captures.target.record_spool import ShareUsed
from kinetod.config.settings import Config, Settings
from kinetod.permissions import caller_limits
from kinetod.permissions.role_policy import Caller, Role
from kinetod.store.capture_store import Store, Use, store_error
from kinetod.store.retention import Retention, share_bytes


@dataclass(frozen=True, slots=True)
class Left:
    """How many bytes a user may still store, and a readable explanation of the limit."""

    size: int
    why: str


def left_of(
    owner_uid: int, uses: Mapping[int | None, Use], live: Mapping[int, int], *, share: int, most: int, admin: bool
) -> Left:
    """Computes what a user may still store. live: bytes written by each user's running captures; 0 is no limit."""
    own = uses.get(owner_uid, Use(owner_uid=owner_uid))
    lefts = []
    if share and not admin:
        kept = own.kept_bytes + live.get(owner_uid, 0)
        why = (
            f"the captures of uid {owner_uid} that cannot be removed (pinned, running, not yet uploaded) take "
            f"{format_size(kept)}, and one user's share is {format_size(share)} (store.share_per_user); unpin or "
            "delete some: kinetoctl captures unpin, kinetoctl captures delete"
        )
        lefts.append(Left(share - kept, why))
    if most:
        total = sum(use.stored_bytes for use in uses.values()) + sum(live.values())
        can_go = own.stored_bytes - own.kept_bytes
        for uid, use in uses.items():
            if uid != owner_uid:
                can_go += min(use.stored_bytes - use.kept_bytes, max(0, use.stored_bytes - share))
        why = (
            f"the store holds {format_size(total)} of {format_size(most)} (store.max_bytes), and the other users are "
            f"within their shares of {format_size(share)} (store.share_per_user); an administrator can raise "
            "store.max_bytes or delete captures"
        )
        lefts.append(Left(most - total + can_go, why))
    return min(lefts, key=lambda each: each.size, default=Left(1 << 62, ""))


class StoreShares:
    """The shares of one store. live returns the bytes written by running captures, by user."""

    def __init__(
        self, settings: Settings, store: Store, retention: Retention, live: Callable[[], Mapping[int, int]]
    ) -> None:
        self._settings = settings
        self._store = store
        self._retention = retention
        self._live = live
        self._uses: Mapping[int | None, Use] = {}
        self._disk_bytes = 0

    @property
    def _config(self) -> Config:
        return self._settings.current

    async def refresh(self) -> None:
        """Reads the usage of all users from the index. Raises KinetodError."""
        until_uploaded = bool(self._config.upload_url)
        uses = await self._store.run(self._store.uses, until_uploaded)
        try:
            self._disk_bytes = await asyncio.to_thread(self._store.disk_bytes)
        except OSError as exc:
            raise store_error(exc, self._store.state_dir) from exc
        self._uses = {use.owner_uid: use for use in uses}

    def left(self, owner_uid: int, *, admin: bool) -> Left:
        """What this user may still write. Callable from any thread."""
        config = self._config
        share = share_bytes(config, self._disk_bytes)
        return left_of(owner_uid, self._uses, self._live(), share=share, most=config.max_store_bytes, admin=admin)

    def check_left(self, owner_uid: int, *, admin: bool) -> None:
        """Checks that a running capture may continue. Callable from any thread. Raises ShareUsed."""
        left = self.left(owner_uid, admin=admin)
        if left.size <= 0:
            raise ShareUsed(f"the capture was ended early and keeps what it had recorded: {left.why}")

    async def check(self, caller: Caller, owner_uid: int) -> None:
        """Checks that a capture of this user may begin. Raises Exhausted, KinetodError."""
        await self.refresh()
        config, admin = self._config, Role.ADMIN in caller.roles
        stored_bytes = self._uses.get(owner_uid, Use(owner_uid=owner_uid)).stored_bytes
        caller_limits.check_stored(caller, stored_bytes, config.quota_per_user_bytes)
        left = self.left(owner_uid, admin=admin)
        if left.size <= 0:
            raise Exhausted(Reason.QUOTA_EXCEEDED, f"no new capture can start: {left.why}", left_bytes=left.size)
        try:
            needed = config.needed_bytes
            free = await asyncio.to_thread(self._store.free_bytes)
            if free < needed:  # bytes beyond others' shares were lent
                await self._retention.reclaim(needed - free)
                free = await asyncio.to_thread(self._store.free_bytes)
            if free < needed:
                raise self._low_disk(free)
            await asyncio.to_thread(self._store.check_writable)
        except OSError as exc:
            raise store_error(exc, self._store.state_dir) from exc

    async def check_pin(self, caller: Caller, owner_uid: int | None, size: int) -> None:
        """Checks that a user may pin `size` more bytes. Raises Exhausted."""
        if Role.ADMIN in caller.roles or owner_uid is None:
            return
        await self.refresh()
        share = share_bytes(self._config, self._disk_bytes)
        kept = self._uses.get(owner_uid, Use(owner_uid=owner_uid)).pinned_bytes
        if share and kept + size > share:
            raise Exhausted(
                Reason.QUOTA_EXCEEDED,
                f"the pinned captures of uid {owner_uid} would take {format_size(kept + size)}, and one user's "
                f"share is {format_size(share)} (store.share_per_user); unpin some first: kinetoctl captures unpin",
                stored_bytes=kept,
                quota_bytes=share,
            )

    def _low_disk(self, free: int) -> Exhausted:
        config, path = self._config, self._store.state_dir
        needed = config.needed_bytes
        return Exhausted(
            Reason.LOW_DISK,
            f"only {format_size(free)} is free on the disk of {path}, but a new capture needs {format_size(needed)}: "
            f"{format_size(config.min_free_bytes)} must stay free (store.min_free_bytes) and "
            f"{format_size(config.start_free_bytes)} is for the capture itself (store.start_free_bytes); "
            "delete captures or free space",
            path=str(path),
            free_bytes=free,
            needed_bytes=needed,
        )
