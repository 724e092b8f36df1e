"""Calls the hooks for every capture that has ended, in the background.

Theory of operation
    An ended capture is copied, and each hook gets its own task with that copy; captures are not delayed and never see
    the result. For each hook, `hooks.parallel` calls run at a time and MAX_WAITING are kept; further ones are dropped,
    logged and counted. So a dead address fills only its own slots.

    All users share these slots. Users take turns, and a user without a running call does not wait for one who occupies
    all of them: that is one additional call. When all slots are taken, the user with the most loses the newest that is
    not running.

    A webhook, or a push of profiles, that fails is retried after pauses that double, with jitter, until
    `hooks.retry_for` is over; its slot is free in between. A command runs once.

    Waiting calls are not on disk: when the daemon stops, hooks get STOP_S to end, and the remaining ones are logged and
    counted.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

from kineto_protos.plain import plain
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.output_formats import SUFFIXES
from kineto_trace.store.upload_manifest import FLEET_LABEL

from kinetod.base import metrics
from kinetod.base.fair_slots import FairSlots, fair_share_key
from kinetod.base.http_headers import headers_in, secrets_in
from kinetod.base.safe_text import redacted
from kinetod.config.settings import ALL_ENDS, Config, Settings
from kinetod.hooks.hook_types import (
    FLEET_VARIABLE,
    FOLDER_VARIABLE,
    HOST_VARIABLE,
    ID_VARIABLE,
    STATUS_VARIABLE,
    Ended,
    Hook,
    HookOutcome,
    HookResult,
)
from kinetod.hooks.http_post import ReceiverAnswer
from kinetod.hooks.profile_sender import ProfileDelivery
from kinetod.hooks.webhook_sender import Delivery
from kinetod.supervise import child
from kinetod.supervise.child import end

log = logging.getLogger(__name__)

MAX_WAITING = 128  # per hook, including running ones
STOP_S = 3.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_PREFIX = "CAPTURE_STATUS_"
_WEBHOOK_COMMAND = child.python("kinetod.hooks.webhook_sender")
_PROFILE_COMMAND = child.python("kinetod.hooks.profile_sender")
_OWN_S = 2.0  # additional time for the process itself
_SECRET_CHARS = 16  # of a path component: chat services put their token there
_HIDDEN = "…"
_MAX_TEXT_CHARS = 300
# Variables of the service manager, for the daemon only.
_DAEMONS_OWN = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "PYTHONSAFEPATH",
)  # fmt: skip
NICE = 10  # the traced programs and the daemon's answers have priority
MAX_OUTPUT_BYTES = 16 << 10
_TERM_GRACE_S = 2.0
_REST_S = 0.5  # to read the rest of the output, once nobody is left who could write


class HookRunner:
    """Calls the hooks of this daemon."""

    def __init__(
        self,
        settings: Settings,
        folder_of: Callable[[str], Path],
        *,
        hooks: Callable[[Config], Sequence[Hook]] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """folder_of: the folder of a capture's files, by its id."""
        self._settings = settings
        self._folder_of = folder_of
        self._hooks = hooks or configured
        self._jitter = jitter
        self._tasks: set[asyncio.Task[None]] = set()
        self._places: dict[str, _Places] = {}
        self._stopping = asyncio.Event()

    def capture_ended(self, capture: pb.Capture) -> None:
        """Starts the hooks of a capture. Returns at once and never raises."""
        try:
            self._begin(capture)
        except Exception:
            log.exception("the hooks of capture %s failed", capture.id)

    def _begin(self, capture: pb.Capture) -> None:
        config = self._settings.current
        status = pb.CaptureStatus.Name(capture.status).removeprefix(_PREFIX)
        if ALL_ENDS not in config.hook_on and status.lower() not in config.hook_on:
            return
        hooks = []
        owner = f"uid {capture.owner_uid}" if capture.HasField("owner_uid") else ""
        for hook in self._hooks(config):
            places = self._places_of(hook)
            if places.taken >= MAX_WAITING and not self._displace(hook, places, owner):
                self._drop(hook, capture.id)
            else:
                hooks.append(hook)
        if not hooks:
            return
        copy = pb.Capture()
        copy.CopyFrom(capture)
        for hook in hooks:
            place = _Place(owner=owner, capture_id=capture.id)
            self._places_of(hook).held.append(place)
            task = asyncio.create_task(self._tell(hook, place, copy, status), name=f"hook {hook.name} of {capture.id}")
            place.task = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        metrics.HOOKS_WAITING.set(self.waiting)

    def _displace(self, hook: Hook, places: "_Places", owner: str) -> bool:
        """Makes room by displacing a call of a user with many more; returns whether there is a slot now."""
        place = places.to_give_up(owner)
        if place is None or place.task is None:
            return False
        places.held.remove(place)
        place.task.cancel()
        self._drop(hook, place.capture_id)
        return True

    def _drop(self, hook: Hook, capture_id: str) -> None:
        log.error(
            "hook %s is not called for capture %s: %d captures are already waiting", hook.name, capture_id, MAX_WAITING
        )
        metrics.HOOKS.labels(hook.kind, "dropped").inc()

    @property
    def waiting(self) -> int:
        """The number of calls that have not ended."""
        return sum(places.taken for places in self._places.values())

    def _places_of(self, hook: Hook) -> "_Places":
        return self._places.setdefault(hook.name, _Places())

    async def _tell(self, hook: Hook, place: "_Place", capture: pb.Capture, status: str) -> None:
        places = self._places_of(hook)
        fair_share_key.set(place.owner)
        try:
            ended = await asyncio.to_thread(self._ended, capture, status)
            await self._until_told(hook, places, place, ended)
        except asyncio.CancelledError:
            if place in places.held:  # otherwise it was displaced, which has been counted
                log.warning("hook %s of capture %s was cancelled because the daemon is stopping", hook.name, capture.id)
                metrics.HOOKS.labels(hook.kind, "dropped").inc()
            raise
        except Exception:
            log.exception("hook %s of capture %s failed", hook.name, capture.id)
        finally:
            if place in places.held:
                places.held.remove(place)
            metrics.HOOKS_WAITING.set(self.waiting)

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

    async def _until_told(self, hook: Hook, places: "_Places", place: "_Place", ended: Ended) -> None:
        loop = asyncio.get_running_loop()
        began, failures = loop.time(), 0
        while True:
            async with places.turn(place, self._settings.current.hook_parallel):
                outcome = await self._call(hook, ended)
            if outcome.result is HookResult.OK:
                return
            failures += 1
            pause_s = max(self._pause_s(failures), outcome.after_s)
            left_s = self._settings.current.hook_retry_ns / 1e9 - (loop.time() - began)
            again = outcome.again and pause_s <= left_s and not self._stopping.is_set()
            log.warning(
                "hook %s of capture %s, attempt %d: %s%s",
                hook.name, ended.capture_id, failures, outcome.text, f"; retrying in {pause_s:.1f} s" if again else "",
            )  # fmt: skip
            if not again:
                return
            try:
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            except TimeoutError:
                continue
            log.warning(
                "hook %s of capture %s will not be retried because the daemon is stopping", hook.name, ended.capture_id
            )
            metrics.HOOKS.labels(hook.kind, "dropped").inc()
            return

    async def _call(self, hook: Hook, ended: Ended) -> HookOutcome:
        began = asyncio.get_running_loop().time()
        outcome = await hook.call(ended, self._settings.current.hook_timeout_ns / 1e9)
        metrics.hook_called(hook.kind, outcome.result, asyncio.get_running_loop().time() - began)
        return outcome

    def _pause_s(self, failures: int) -> float:
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 30))
        return longest * (0.5 + self._jitter() / 2)

    async def stop(self) -> None:
        """Stops all hooks. Calls that run or wait for their turn get STOP_S; those waiting for a retry end at once."""
        self._stopping.set()
        tasks = list(self._tasks)
        if not tasks:
            return
        _, unfinished = await asyncio.wait(tasks, timeout=STOP_S)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class CommandHook:
    """Runs a program with the capture's JSON on its standard input. No shell is involved, and a try is final."""

    kind = "command"

    def __init__(self, argv: tuple[str, ...], environ: Mapping[str, str] = os.environ) -> None:
        self._argv = argv
        self._environ = environ
        self.name = argv[0]

    async def call(self, ended: Ended, timeout_s: float) -> HookOutcome:
        """See Hook."""
        environ = {name: value for name, value in self._environ.items() if name not in _DAEMONS_OWN}
        try:
            found = await run_program(self._argv, ended.body, environ | dict(ended.variables), timeout_s)
        except (OSError, ValueError) as exc:
            return HookOutcome(result=HookResult.FAILED, text=f"cannot be started: {exc}")
        said = last_line(found.output)
        if found.status is None:
            return HookOutcome(result=HookResult.TIMEOUT, text=f"took longer than {timeout_s:g} s and was killed{said}")
        if found.status:
            return HookOutcome(result=HookResult.FAILED, text=f"{_how(found.status)}{said}")
        return HookOutcome(result=HookResult.OK)


def _how(status: int) -> str:
    if status > 0:
        return f"exited with status {status}"
    known = {int(number): number.name for number in signal.Signals}
    return f"was killed by {known.get(-status, f'signal {-status}')}"


def last_line(output: bytes) -> str:
    """The last line of the output, for a message: without what looks like a secret."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return f": {redacted(lines[-1])[:_MAX_TEXT_CHARS]}" if lines else ""


# Runs an arbitrary program with a deadline, low priority and bounded output.
#
# The program gets its input as a file in memory, so that no task has to feed it, and leads a session of its own.
# Its output is read as fast as it arrives, and only the last bytes are kept. When the program has ended, or at the
# deadline, every process still in its group is killed too: a hook leaves nothing behind.
@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A program's result. status: as in asyncio, negative for signals; None at the deadline. output: its last bytes."""

    status: int | None
    output: bytes


async def run_program(argv: Sequence[str], data: bytes, environ: Mapping[str, str], timeout_s: float) -> Exit:
    """Runs a program to its end. Raises OSError if it cannot be started. If cancelled, ends it first."""
    reader, writer = os.pipe()
    output = _Output(reader)
    try:
        with open(_in_memory(data), "rb") as stdin:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=stdin, stdout=writer, stderr=writer, cwd="/", env=environ, start_new_session=True
            )
    except BaseException:
        os.close(writer)
        await output.stop()
        raise
    os.close(writer)
    status: int | None = None
    try:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, process.pid, NICE)
        await output.start()
        with contextlib.suppress(TimeoutError):
            status = await asyncio.wait_for(process.wait(), timeout_s)
        if status is None:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _TERM_GRACE_S)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        await end(process)
        await output.stop()
    return Exit(status=status, output=bytes(output.kept))


def _in_memory(data: bytes) -> int:
    """A descriptor of a file with this content, at its beginning."""
    descriptor = os.memfd_create("capture", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


class _Output(asyncio.Protocol):
    """Reads a pipe to its end and keeps the last bytes."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "rb", buffering=0)  # closing it twice is harmless
        self._transport: asyncio.ReadTransport | None = None
        self._ended = asyncio.Event()
        self.kept = bytearray()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: self, self._pipe)

    def data_received(self, data: bytes) -> None:
        self.kept += data
        del self.kept[:-MAX_OUTPUT_BYTES]

    def connection_lost(self, _exc: Exception | None) -> None:
        self._ended.set()

    async def stop(self) -> None:
        """Stops reading. A process that left the group may keep the pipe open; it is not waited for."""
        if self._transport is None:
            self._pipe.close()
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _REST_S)
        self._transport.close()


@dataclass(eq=False, slots=True)
class _Place:
    """One capture to pass to a hook. owner: its user; empty: nobody."""

    owner: str
    capture_id: str
    runs: bool = False
    task: "asyncio.Task[None] | None" = None


class _Places:
    """The calls of one hook that have not ended, oldest first."""

    def __init__(self) -> None:
        self.held: list[_Place] = []
        self._slots = FairSlots(1)

    @property
    def taken(self) -> int:
        """The number of calls."""
        return len(self.held)

    def to_give_up(self, owner: str) -> _Place | None:
        """The newest waiting call of the owner with most calls; None if that owner has hardly more than this one."""
        counts = Counter(place.owner for place in self.held)
        most, count = counts.most_common(1)[0]
        if count <= counts[owner] + 1:
            return None
        return next((place for place in reversed(self.held) if place.owner == most and not place.runs), None)

    @contextlib.asynccontextmanager
    async def turn(self, place: _Place, parallel: int) -> AsyncIterator[None]:
        """Waits for a slot; one more than `parallel` is kept for owners who hold none."""
        self._slots.resize(parallel, spare=1)
        async with self._slots.turn():
            place.runs = True
            try:
                yield
            finally:
                place.runs = False


def configured(config: Config) -> list[Hook]:
    """The hooks of a configuration."""
    hooks: list[Hook] = [CommandHook(config.hook_command)] if config.hook_command else []
    hooks += [WebhookHook(url, config.hook_secret, config.hook_ca) for url in config.hook_webhooks]
    return [*hooks, ProfileHook(config)] if config.hook_profiles else hooks


class WebhookHook:
    """Sends a POST with the capture's JSON."""

    kind = "webhook"

    def __init__(self, url: str, secret_file: Path | None, ca_file: Path | None) -> None:
        self._url = url
        self._secret_file = secret_file
        self._ca_file = ca_file
        parts = urlsplit(url)
        segments = parts.path.split("/")
        shown = "/".join(_HIDDEN if len(each) >= _SECRET_CHARS else each for each in segments)
        self.name = f"{parts.scheme}://{parts.netloc}{shown}"  # without the parts that must not be logged
        values = [value for _, value in parse_qsl(parts.query)]
        hidden = {parts.query, *values, *(quote(value) for value in values)}
        hidden |= {each for each in segments if len(each) >= _SECRET_CHARS}
        self._hidden = frozenset(each for each in hidden if each)

    async def call(self, ended: Ended, timeout_s: float) -> HookOutcome:
        """See Hook."""
        delivery = Delivery(
            url=self._url,
            message_id=ended.capture_id,
            secret_file=str(self._secret_file or ""),
            ca_file=str(self._ca_file or ""),
            timeout_s=timeout_s,
        )
        data = json.dumps(asdict(delivery)).encode() + b"\n" + ended.body
        return await _tried(_WEBHOOK_COMMAND, data, timeout_s, self._read, lambda: self._hidden)

    def _read(self, output: bytes) -> ReceiverAnswer | None:
        try:
            return ReceiverAnswer(**json.loads(output.splitlines()[-1]))
        except (ValueError, TypeError, IndexError):
            return None


class ProfileHook:
    """Sends one message for each target with a trace. Created anew for each capture, so it knows what it has sent."""

    kind = "profiles"

    def __init__(self, config: Config) -> None:
        self._config = config
        self.name = config.hook_profiles
        self._sent: set[str] = set()

    async def call(self, ended: Ended, timeout_s: float) -> HookOutcome:
        """See Hook."""
        config = self._config
        delivery = ProfileDelivery(
            address=config.hook_profiles,
            folder=ended.variables[FOLDER_VARIABLE],
            headers_file=str(config.hook_profiles_headers or ""),
            ca_file=str(config.hook_profiles_ca or ""),
            timeout_s=timeout_s,
            memory_bytes=config.decode_memory_bytes,
            sandbox=config.decode_sandbox,
            targets=_with_trace(ended.body),
            sent=sorted(self._sent),
        )
        data = json.dumps(asdict(delivery)).encode() + b"\n"
        return await _tried(_PROFILE_COMMAND, data, timeout_s, self._read, self._secrets)

    def _read(self, output: bytes) -> ReceiverAnswer | None:
        """Notes which targets were sent, and returns the outcome, if there is one."""
        answer = None
        for line in output.splitlines():
            try:
                told = json.loads(line)
                if "sent" in told:
                    self._sent.add(str(told["sent"]))
                else:
                    answer = ReceiverAnswer(**told)
            except (ValueError, TypeError):
                continue  # a line from elsewhere, such as a library's warning
        return answer

    def _secrets(self) -> frozenset[str]:
        path = self._config.hook_profiles_headers
        try:
            return frozenset(secrets_in(headers_in(path.read_bytes()) if path is not None else {}))
        except (OSError, ValueError):
            return frozenset()


def _with_trace(body: bytes) -> list[str]:
    """Returns the names of the folders of targets with a trace."""
    return [
        f"{target['pid']}-{target['start_time_ns']}"
        for target in json.loads(body)["targets"]
        if any(file["format"] in SUFFIXES for file in target["files"])
    ]


async def _tried(
    command: Sequence[str],
    data: bytes,
    timeout_s: float,
    read: Callable[[bytes], ReceiverAnswer | None],
    secrets: Callable[[], frozenset[str]],
) -> HookOutcome:
    """One try by a process that sends. secrets: a receiver may repeat the address, or a header."""
    try:
        found = await run_program(command, data, os.environ, timeout_s + _OWN_S)
    except OSError as exc:
        return HookOutcome(result=HookResult.FAILED, text=f"cannot be called: {exc}", again=True)
    answer = read(found.output)
    if found.status is None:
        return HookOutcome(result=HookResult.TIMEOUT, text=f"did not answer within {timeout_s:g} s", again=True)
    if answer is None:
        text = f"cannot be called: its process exited with status {found.status}{last_line(found.output)}"
        return HookOutcome(result=HookResult.FAILED, text=redacted(text, secrets()), again=True)
    if not answer.text:
        return HookOutcome(result=HookResult.OK)
    text = redacted(answer.text, secrets())
    return HookOutcome(result=HookResult.FAILED, text=text, again=answer.again, after_s=answer.after_s)
