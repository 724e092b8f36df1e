"""Tells the hooks of every capture that has ended, beside everything else.

Theory of operation
    A capture that has ended is copied, and each hook gets a task of its own with that copy; captures are not held up
    and never learn what became of it. Of one hook, `hooks.parallel` calls run at a time and MAX_WAITING are kept; what
    comes on top of that is dropped, logged and counted. A dead address so fills its own places only.

    A webhook that fails is tried again after pauses that double, with jitter, until `hooks.retry_for` is over; the
    place is free meanwhile. A command runs once.

    What waits is not on disk: when the daemon stops, hooks get STOP_S to end, and what is left is logged and counted.
"""

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from kineto_protos.plain import plain
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.load.source import FLEET_LABEL

from kinetod import metrics
from kinetod.config import Config, Settings
from kinetod.hooks.command import CommandHook
from kinetod.hooks.interface import (
    FLEET_VARIABLE,
    FOLDER_VARIABLE,
    HOST_VARIABLE,
    ID_VARIABLE,
    STATUS_VARIABLE,
    Ended,
    Hook,
    Outcome,
    Result,
)
from kinetod.hooks.keys import ALL
from kinetod.hooks.webhook import WebhookHook

log = logging.getLogger(__name__)

MAX_WAITING = 128  # of one hook, those that run included
STOP_S = 3.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_PREFIX = "CAPTURE_STATUS_"


class HookRunner:
    """All hooks of this daemon."""

    def __init__(
        self,
        settings: Settings,
        folder_of: Callable[[str], Path],
        *,
        hooks: Callable[[Config], Sequence[Hook]] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """folder_of: where a capture's files are, by its id."""
        self._settings = settings
        self._folder_of = folder_of
        self._hooks = hooks or configured
        self._jitter = jitter
        self._tasks: set[asyncio.Task[None]] = set()
        self._places: dict[str, _Places] = {}
        self._stopping = asyncio.Event()

    def capture_ended(self, capture: pb.Capture) -> None:
        """Returns at once and raises nothing."""
        try:
            self._begin(capture)
        except Exception:
            log.exception("the hooks of capture %s failed", capture.id)

    def _begin(self, capture: pb.Capture) -> None:
        config = self._settings.current
        status = pb.CaptureStatus.Name(capture.status).removeprefix(_PREFIX)
        if ALL not in config.hook_on and status.lower() not in config.hook_on:
            return
        hooks = []
        for hook in self._hooks(config):
            if self._places_of(hook).taken >= MAX_WAITING:
                log.error(
                    "hook %s: %d captures wait for it, capture %s is not told", hook.name, MAX_WAITING, capture.id
                )
                metrics.hook_dropped(hook.kind)
            else:
                self._places_of(hook).taken += 1
                hooks.append(hook)
        if not hooks:
            return
        copy = pb.Capture()
        copy.CopyFrom(capture)
        for hook in hooks:
            task = asyncio.create_task(self._tell(hook, copy, status), name=f"hook {hook.name} of {capture.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        metrics.hooks_waiting(self.waiting)

    @property
    def waiting(self) -> int:
        """Calls that have not come to an end."""
        return sum(places.taken for places in self._places.values())

    def _places_of(self, hook: Hook) -> "_Places":
        return self._places.setdefault(hook.name, _Places())

    async def _tell(self, hook: Hook, capture: pb.Capture, status: str) -> None:
        places = self._places_of(hook)
        try:
            ended = await asyncio.to_thread(self._ended, capture, status)
            await self._until_told(hook, places, ended)
        except asyncio.CancelledError:
            log.warning("hook %s of capture %s was ended, since the daemon stops", hook.name, capture.id)
            metrics.hook_dropped(hook.kind)
            raise
        except Exception:
            log.exception("hook %s of capture %s failed", hook.name, capture.id)
        finally:
            places.taken -= 1
            metrics.hooks_waiting(self.waiting)

    def _ended(self, capture: pb.Capture, status: str) -> Ended:
        variables = {
            ID_VARIABLE: capture.id,
            STATUS_VARIABLE: status,
            HOST_VARIABLE: capture.host,
            FOLDER_VARIABLE: str(self._folder_of(capture.id)),
            FLEET_VARIABLE: capture.spec.labels.get(FLEET_LABEL, ""),
        }
        body = json.dumps(plain(capture), ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        return Ended(capture_id=capture.id, status=status, variables=variables, body=body)

    async def _until_told(self, hook: Hook, places: "_Places", ended: Ended) -> None:
        loop = asyncio.get_running_loop()
        began, failures = loop.time(), 0
        while True:
            async with places.one(lambda: self._settings.current.hook_parallel):
                outcome = await self._call(hook, ended)
            if outcome.result is Result.OK:
                return
            failures += 1
            pause_s = max(self._pause_s(failures), outcome.after_s)
            left_s = self._settings.current.hook_retry_ns / 1e9 - (loop.time() - began)
            again = outcome.again and pause_s <= left_s and not self._stopping.is_set()
            log.warning(
                "hook %s of capture %s, try %d: %s%s",
                hook.name, ended.capture_id, failures, outcome.text, f"; again in {pause_s:.1f} s" if again else "",
            )  # fmt: skip
            if not again:
                return
            try:
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            except TimeoutError:
                continue
            log.warning("hook %s of capture %s is not tried again, since the daemon stops", hook.name, ended.capture_id)
            metrics.hook_dropped(hook.kind)
            return

    async def _call(self, hook: Hook, ended: Ended) -> Outcome:
        began = asyncio.get_running_loop().time()
        outcome = await hook.call(ended, self._settings.current.hook_timeout_ns / 1e9)
        metrics.hook_called(hook.kind, outcome.result, asyncio.get_running_loop().time() - began)
        return outcome

    def _pause_s(self, failures: int) -> float:
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 30))
        return longest * (0.5 + self._jitter() / 2)

    async def stop(self) -> None:
        """What runs or waits for its turn gets STOP_S, what pauses nothing."""
        self._stopping.set()
        tasks = list(self._tasks)
        if not tasks:
            return
        _, unfinished = await asyncio.wait(tasks, timeout=STOP_S)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Places:
    """The calls of one hook. taken: that have not come to an end."""

    def __init__(self) -> None:
        self.taken = 0
        self._running = 0
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def one(self, most: Callable[[], int]) -> AsyncIterator[None]:
        """Waits until fewer than `most()` run, and is one of them."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running < most())
            self._running += 1
        try:
            yield
        finally:
            async with self._changed:
                self._running -= 1
                self._changed.notify()


def configured(config: Config) -> list[Hook]:
    """The hooks of a configuration."""
    hooks: list[Hook] = [CommandHook(config.hook_command)] if config.hook_command else []
    return hooks + [WebhookHook(url, config.hook_secret, config.hook_ca) for url in config.hook_webhooks]
