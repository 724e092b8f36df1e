"""A pool of warm processes that attach: started ahead of time, given a deadline, replaced when they die.

Theory of operation
    Each helper has a SOCK_SEQPACKET socketpair as its standard input: one packet is one request, one packet is
    its answer, which carries the channel to the target by SCM_RIGHTS. A helper does one attach at a time. The death of
    a helper never harms a target, so a helper that overruns its deadline is simply killed.

    `count` helpers are kept warm, since starting an interpreter takes longer than an attach. For the same reason an
    attach first waits for a warm helper; after WAIT_FOR_WARM_S it gets a new one, up to MAX_HELPERS in all, which
    ends with its attach. Beyond that, waiting requests take turns by user (`base.fair_slots`). An attach's deadline
    includes the start of a helper; that of other queries does not if they say how long the start may take: a slow start
    would be mistaken for a slow target.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from kineto_trace.base.quantities import format_duration

from kinetod.attach.attach_types import Approval, AttachCode, Attached, AttachError
from kinetod.attach.inspect import standstill
from kinetod.attach_helper.folder_queries import FOLDER, NOTHING
from kinetod.attach_helper.worker_queries import DEVICE_GRAPHS
from kinetod.base.fair_slots import FairSlots
from kinetod.base.safe_text import clean
from kinetod.base.unix_sockets import receive
from kinetod.processes.identity import BOOT_TIME_NS, ProcessKey
from kinetod.supervise import child
from kinetod.supervise.child import Crashed, TooLate, WarmChild

log = logging.getLogger(__name__)

COMMAND = child.python("kinetod.attach_helper.attach_worker")
WARM_HELPERS = min(max(1, (os.cpu_count() or 1) // 2), 2)  # the process that one attaches to needs a processor, too
MAX_HELPERS, SPARE_HELPERS = 8, 2  # the spare ones for users who have no request running
MAX_ANSWER_BYTES = 64 << 10
WAIT_FOR_WARM_S = 0.1  # an attach takes some 10 ms
START_S = 5.0  # 0.3 s are usual; an attach waits as long as it may take itself
LOOK_S = 2.0  # 5 ms are usual
_KILLED = "exit status -9"
_HELPERS_KILLED = 6  # in an attach, until it fails: beside a load of 25 on two processors four in a row were
_PAUSE_S = 0.1  # until the second one, and twice as long until each later one: who has slept gets a processor sooner
# A helper keeps its deadline by itself, reports it, and withdraws what it has begun (attempt.LET_GO_S); a hanging one
# is killed after this time.
KILL_GRACE_S = 1.0


class DeadBefore(Crashed):
    """A helper had ended before it got the request, so another one can be asked."""


class NeverStarted(TooLate):
    """A helper was killed before it had answered anything."""


class _Helper(WarmChild):
    """One process. Used by one attach at a time."""

    def __init__(self, process: Process, sock: socket.socket) -> None:
        super().__init__(process, log, "attach helper")
        self._sock = sock
        self.has_answered = False

    @classmethod
    async def start(cls, command: Sequence[str]) -> "_Helper":
        """Starts a process. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=theirs.fileno(), stdout=DEVNULL, stderr=PIPE
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        return cls(process, ours)

    async def ask(self, request: Mapping[str, Any], descriptor: int | None = None) -> tuple[dict[str, Any], int | None]:
        """Sends one request, with a descriptor if any; returns its answer and descriptor, which the caller owns.

        Raises Crashed, DeadBefore.
        """
        try:
            sent = [] if descriptor is None else [descriptor]
            socket.send_fds(self._sock, [json.dumps(request).encode()], sent, socket.MSG_NOSIGNAL)
        except OSError as exc:
            raise DeadBefore(str(exc)) from exc
        try:
            data, fds = await receive(self._sock, MAX_ANSWER_BYTES)
        except OSError as exc:
            raise Crashed(str(exc)) from exc
        try:
            answer = json.loads(data) if data else None
            if not isinstance(answer, dict) or answer.get("id") != request["id"] or len(fds) > 1:
                raise Crashed("it answered a different request" if data else "it ended")
            self.has_answered = True
            return answer, fds.pop() if fds else None
        except (ValueError, RecursionError) as exc:
            raise Crashed(str(exc)) from exc
        finally:
            for fd in fds:
                os.close(fd)

    async def stop(self, *, kill: bool) -> str:
        """See WarmChild: the socket is its standard input."""
        self._sock.close()
        return await super().stop(kill=kill)


class AttachHelpers:
    """The helpers; attaches beyond MAX_HELPERS wait for a free one."""

    def __init__(self, count: int = WARM_HELPERS, *, command: Sequence[str] = COMMAND) -> None:
        self._count = count
        self._command = command
        self._idle: list[_Helper] = []
        self._freed = asyncio.Event()  # one has become idle
        self._busy: set[_Helper] = set()
        self._slots = FairSlots(max(count, MAX_HELPERS) - SPARE_HELPERS, spare=SPARE_HELPERS)
        self._starting = 0
        self._background: set[asyncio.Task[object]] = set()
        self._requests = 0
        self._token = 0
        self._stopped = False

    def pids(self) -> set[int]:
        """The pids of the running helpers."""
        return {helper.process.pid for helper in (*self._idle, *self._busy)}

    async def start(self) -> None:
        """Warms all helpers up. Raises OSError if none can be started."""
        self._idle = list(await asyncio.gather(*(_Helper.start(self._command) for _ in range(self._count))))

    async def attach(
        self, key: ProcessKey, approval: Approval, *, deadline_s: float, boot_time_ns: int = BOOT_TIME_NS
    ) -> tuple[Attached, socket.socket]:
        """Injects the agent into a process. The caller owns the channel. Raises AttachError.

        boot_time_ns: the origin of the key's start time.
        """
        async with self._slots.turn():
            return await self._attach(key, approval, deadline_s, boot_time_ns)

    async def _attach(
        self, key: ProcessKey, approval: Approval, deadline_s: float, boot_time_ns: int
    ) -> tuple[Attached, socket.socket]:
        start_s = max(START_S, deadline_s)
        try:
            for killed in range(1, _HELPERS_KILLED + 1):
                request = self._request(key, approval, deadline_s, boot_time_ns)
                try:
                    answer, fd = await self._answer(request, deadline_s + KILL_GRACE_S, start_s=start_s)
                    break
                except Crashed as exc:
                    if exc.how != _KILLED or killed == _HELPERS_KILLED:
                        raise
                    # By its watchdog, on a busy machine: the process is unchanged, or ignores what it has received.
                    log.warning("the helper attaching to process %d was killed: trying again with another one", key.pid)
                    await asyncio.sleep(_PAUSE_S * 2 ** (killed - 1))
        except NeverStarted:
            raise AttachError(
                AttachCode.FAILED,
                f"process {key.pid} was not touched: the daemon's attach helper did not start within {start_s:g} s. "
                "The host may be short of CPU time or memory; try again",
            ) from None
        except OSError as exc:
            raise AttachError(
                AttachCode.FAILED, f"process {key.pid}: the daemon cannot start an attach helper: {exc.strerror}"
            ) from exc
        except TooLate:
            standstill.check(key.pid)
            raise AttachError(
                AttachCode.TIMEOUT,
                f"process {key.pid} could not be attached to within {format_duration(int(deadline_s * 1e9))} (kinetod "
                "--attach-deadline); the injected code does nothing if it runs later. Is the process in a long call "
                "that holds the GIL, or does it release the GIL for only microseconds at a time? Try again",
            ) from None
        except Crashed as exc:
            log.error("attaching to process %d crashed its helper (%s)", key.pid, exc)
            raise AttachError(
                AttachCode.FAILED,
                f"the helper attaching to process {key.pid} crashed ({exc.how}). If it was killed by SIGKILL, it had "
                "too little CPU time to release a thread of the process within 20 ms. The daemon's log may have more "
                "details; try again",
            ) from exc
        return _outcome(answer, fd, key)

    async def ask(self, question: Mapping[str, Any], *, deadline_s: float, start_s: float = 0.0) -> dict[str, Any]:
        """Sends a query other than an attach (`worker_queries.py`). Raises OSError, TooLate, Crashed.

        start_s: how long a helper that has never answered may take before the deadline begins; 0: it has begun.
        """
        answer, fd = await self.ask_with(question, None, deadline_s=deadline_s, start_s=start_s)
        if fd is not None:
            os.close(fd)
        return answer

    async def ask_with(
        self, question: Mapping[str, Any], descriptor: int | None, *, deadline_s: float, start_s: float = 0.0
    ) -> tuple[dict[str, Any], int | None]:
        """Like `ask`, with a descriptor that the caller keeps; the caller owns the answer's descriptor."""
        async with self._slots.turn():
            return await self._answer({"id": self._number(), **question}, deadline_s, descriptor, start_s)

    async def device_graphs(self, key: ProcessKey) -> str:
        """The file of a process whose device code launches CUDA graphs; "" if none is found. Raises OSError."""
        question = {"do": DEVICE_GRAPHS, "boot_time_ns": BOOT_TIME_NS, "targets": [[key.pid, key.start_time_ns]]}
        try:
            return str((await self.ask(question, deadline_s=LOOK_S, start_s=START_S))["file"])
        except TooLate as exc:
            raise OSError(f"reading its files took longer than {LOOK_S:g} s") from exc
        except Crashed as exc:
            raise OSError(f"reading its files failed: {exc}") from exc

    async def _answer(
        self, request: Mapping[str, Any], deadline_s: float, descriptor: int | None = None, start_s: float = 0.0
    ) -> tuple[dict[str, Any], int | None]:
        """Returns a helper's answer; kills the helper at the deadline. Raises OSError, TooLate, Crashed."""
        while helper := await self._warm():  # it may have ended since
            with contextlib.suppress(DeadBefore):
                return await self._answer_by(helper, request, deadline_s, descriptor, start_s)
        return await self._answer_by(await _Helper.start(self._command), request, deadline_s, descriptor, start_s)

    async def _warm(self) -> _Helper | None:
        """An idle helper, or one that becomes idle soon."""
        if not self._idle and self._busy:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAIT_FOR_WARM_S):
                    while not self._idle:
                        self._freed.clear()
                        await self._freed.wait()
        return self._idle.pop() if self._idle else None

    async def _answer_by(
        self,
        helper: _Helper,
        request: Mapping[str, Any],
        deadline_s: float,
        descriptor: int | None,
        start_s: float,
    ) -> tuple[dict[str, Any], int | None]:
        self._busy.add(helper)
        try:
            if start_s and not helper.has_answered:
                nothing = {"id": self._number(), "do": FOLDER, "step": NOTHING}
                try:
                    await helper.within(start_s, helper.ask(nothing))
                except TooLate:
                    raise NeverStarted from None
            answer = await helper.within(deadline_s, helper.ask(request, descriptor))
            self._give_back(helper)
            return answer
        finally:
            self._busy.discard(helper)
            self._refill()

    def _number(self) -> int:
        self._requests += 1
        return self._requests

    def _request(self, key: ProcessKey, approval: Approval, deadline_s: float, boot_time_ns: int) -> dict[str, Any]:
        self._token = max(self._token + 1, time.time_ns())
        return {
            "id": self._number(),
            "pid": key.pid,
            "start_time_ns": key.start_time_ns,
            "boot_time_ns": boot_time_ns,  # origin of start times, which moves when the clock is set
            "approved": approval.credentials.to_dict(),
            "deadline_s": deadline_s,
            "token": self._token,
            "debug": log.isEnabledFor(logging.DEBUG),
        }

    def _give_back(self, helper: _Helper) -> None:
        if self._stopped or len(self._idle) >= self._count:
            self._in_background(helper.stop(kill=False))
        else:
            self._idle.append(helper)
            self._freed.set()

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work, name="attach helper")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _refill(self) -> None:
        """Replaces helpers that have ended, including idle ones, in the background."""
        for helper in [each for each in self._idle if each.process.returncode is not None]:
            self._idle.remove(helper)
            self._in_background(helper.stop(kill=True))
        while not self._stopped and len(self._idle) + len(self._busy) + self._starting < self._count:
            self._starting += 1
            self._in_background(self._start_one())

    async def _start_one(self) -> None:
        try:
            helper = await _Helper.start(self._command)
        except OSError as exc:
            log.error("an attach helper cannot be started: %s", exc.strerror)
        else:
            self._give_back(helper)
        finally:
            self._starting -= 1

    async def stop(self) -> None:
        """Ends the idle helpers; busy ones end with their attach."""
        self._stopped = True
        while self._background:
            await asyncio.wait(self._background)
        helpers, self._idle = self._idle, []
        await asyncio.gather(*(helper.stop(kill=False) for helper in helpers))


def _outcome(answer: Mapping[str, Any], fd: int | None, key: ProcessKey) -> tuple[Attached, socket.socket]:
    """Turns an answer into the attach's result. Takes ownership of the descriptor. Raises AttachError."""
    if answer.get("ok") is True and fd is not None:
        attached = Attached(
            method=clean(str(answer.get("method", "")), 40),
            stopped_ns=_count(answer.get("stopped_ns")),
            latency_ns=_count(answer.get("latency_ns")),
        )
        return attached, socket.socket(fileno=fd)
    if fd is not None:
        os.close(fd)
    try:
        code = AttachCode(str(answer.get("code")))
    except ValueError:
        code = AttachCode.FAILED
    unknown = f"attaching to process {key.pid} failed, and the helper gave no reason"
    reason = clean(str(answer.get("reason", "")), 1000) or unknown
    raise AttachError(code, reason)


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**63 else 0
