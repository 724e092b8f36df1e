"""The kinetod-writer service: accepts the front end's requests, decides on its own, and starts a child that becomes the
user and writes.

Theory of operation
    One task per connection, one request at a time. The kernel identifies the caller (SO_PEERCRED); the policy file is
    read for each request. This process opens no path of a request: `trace_writer` does, as the user, below a root of
    the policy, and is killed at its deadline.

    A hanging write must not block others. Each root has its own turns, fair by user. A user whose folder did not answer
    is refused below that root for HANG_S, and as long as one of the writing processes cannot be killed (its user may
    have stopped it): each keeps a pipe open until then.

    Every use is logged: caller, user, files, folder and result.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec
from kineto_trace.base.quantities import parse_size_bytes, times

from kinetod.base.fair_slots import FairSlots, fair_share_key
from kinetod.base.policy_file import CallersAndUsers, PolicyError, PolicyUsers, read_policy, users_of
from kinetod.base.safe_text import clean
from kinetod.base.unix_sockets import receive, send
from kinetod.permissions.caller_limits import RequestRate
from kinetod.supervise.helper_service import Connections, HelperCaller, HungUp
from kinetod.trace_writing import writer_messages as messages
from kinetod.trace_writing.writer_messages import (
    CHECK_S,
    FILES_AT_ONCE,
    WRITE_S,
    WRITER,
    NoAnswer,
    PlaceTraces,
    WriteQuestion,
    run_writer,
)

log = logging.getLogger(__name__)

UNIT = "kinetod-writer.service"
REQUEST_S = 30.0  # how long a connection may be silent
SEND_S = 5.0
TURNS, SPARE_TURNS = 2, 6  # for each root: for one user, and for users who have none
TURN_S = 10.0  # the front end waits longer than this and the work together
REQUESTS_PER_SECOND = 10  # per user; four seconds' worth may come at once
HANG_S = 60.0
_LOOKING = -1  # instead of a user's number
DEFAULT_FILE = Path("/etc/kinetod/writer.toml")
DEFAULT_MAX_FILE = "4GiB"


# The writer's policy: who may call it, as which users it writes, and below which folders; only root can write the file.
#
# The front end has checked its own settings; it serves a network and can be broken into. So the
# writer trusts nobody else: the file is read again for every request, and if it is missing, wrong or writable by
# others, everything is refused. `dynolog.log_roots` cannot widen it. Files are written as root only if the policy names
# root, and never as this service's own user or its callers: breaking into one part must not give the rights of another.
class _File(CallersAndUsers, forbid_unknown_fields=True, kw_only=True):
    roots: list[str] = msgspec.field(default_factory=list)
    max_file: str = DEFAULT_MAX_FILE


@dataclass(frozen=True, slots=True)
class WriterPolicy:
    """The content of a policy file. max_bytes: of one trace."""

    named: PolicyUsers
    roots: tuple[PurePath, ...]
    max_bytes: int
    path: Path = DEFAULT_FILE

    def refuses_caller(self, uid: int) -> str:
        """Why this user is not served; empty if it is."""
        if uid == 0 or uid in self.named.callers:
            return ""
        return f"uid {uid} is not allowed to use the writer service; `callers` in {self.path} lists the users who are"

    def refuses_user(self, uid: int) -> str:
        """Why nothing is written as this user; empty if it may be."""
        if uid == self.named.own_uid:
            return f"uid {uid} is the user of the writer service itself"
        if uid and uid in self.named.callers:
            return f"uid {uid} is one of the `callers` in {self.path}, and files are never written as a caller"
        if uid in self.named.denied or uid not in self.named.users:
            return f"writing as uid {uid} is not allowed; see users and denied_users in {self.path}"
        return ""

    def root_of(self, folder: PurePath) -> PurePath | None:
        """The root that contains a folder by its name, or equals it; None if there is none."""
        if ".." in folder.parts:
            return None
        return next((root for root in self.roots if folder.is_relative_to(root)), None)


def load(path: Path = DEFAULT_FILE, *, uid_of: Callable[[str], int] | None = None) -> WriterPolicy:
    """Reads the policy file. Raises PolicyError."""
    file = read_policy(path, _File)
    named = users_of(file, path, uid_of)
    for text in file.roots:
        if not text.startswith("/") or ".." in PurePath(text).parts or "\0" in text:
            raise PolicyError(f"{path}: roots: must be absolute paths without .., not {text!r}")
    try:
        max_bytes = parse_size_bytes(file.max_file)
    except ValueError as exc:
        raise PolicyError(f"{path}: max_file: {exc}") from exc
    return WriterPolicy(named, tuple(PurePath(text) for text in file.roots), max_bytes, path)


class _Refused(Exception):
    """The request is refused; the message says why."""


class WriterService:
    """Serves connections. load_policy: called for each request."""

    def __init__(
        self,
        load_policy: Callable[[], WriterPolicy] = load,
        *,
        command: Sequence[str] = WRITER,
        check_s: float = CHECK_S,
        write_s: float = WRITE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load_policy = load_policy
        self._command = command
        self._check_s = check_s
        self._write_s = write_s
        self._clock = clock
        self._turns: dict[PurePath, FairSlots] = {}
        self._rate = RequestRate(lambda: REQUESTS_PER_SECOND, clock)
        self._hung: dict[tuple[int, str], list[_Hang]] = {}
        self.connections = Connections(self._serve)

    async def start(self) -> None:
        """Does nothing: processes are started on demand."""

    async def stop(self) -> None:
        """Closes all connections and ends their processes."""
        await self.connections.stop()
        for where in list(self._hung):
            self._forget_hangs(where)

    async def _serve(self, sock: socket.socket, caller: HelperCaller) -> None:
        try:
            while True:
                async with asyncio.timeout(REQUEST_S):
                    packet, fds = await receive(sock, messages.MAX_PACKET_BYTES + 1, FILES_AT_ONCE)
                try:
                    if not packet:
                        raise HungUp
                    problems = await self._answer(caller, packet, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
                await _tell(sock, problems)
        # before the request was decoded: the end of the connection
        except (_Refused, messages.BadWriterMessage) as exc:
            why = clean(str(exc), messages.MAX_PROBLEM_CHARS)
            log.warning("%s was refused: %s", caller, why)
            await _tell(sock, [why])

    async def _answer(self, caller: HelperCaller, packet: bytes, fds: Sequence[int]) -> list[str]:
        """Answers a request. Raises _Refused, BadWriterMessage."""
        policy = self._policy_for(caller)
        asked = messages.request(packet)
        began = self._clock()
        try:
            problems = await self._placed(policy, asked, fds)
        except _Refused as exc:
            problems = [str(exc)] * max(1, len(asked.names))
        self._note(caller, asked, problems, self._clock() - began)
        return problems

    def _policy_for(self, caller: HelperCaller) -> WriterPolicy:
        try:
            policy = self._load_policy()
        except PolicyError as exc:
            raise _Refused(f"the writer service serves no caller: {exc}") from exc
        if why := policy.refuses_caller(caller.uid):
            raise _Refused(why)
        return policy

    async def _placed(self, policy: WriterPolicy, asked: PlaceTraces, fds: Sequence[int]) -> list[str]:
        """Writes the files. Raises _Refused."""
        folder = PurePath(asked.folder)
        root = policy.root_of(folder)
        if root is None or "\0" in asked.folder:
            where = clean(asked.folder, 200)
            raise _Refused(f"{where} is not inside any folder of `roots` in {policy.path}; an administrator can add it")
        if len(fds) != len(asked.names):
            announced = times(len(asked.names), "file was", "files were")
            received = times(len(fds), "descriptor was", "descriptors were")
            raise _Refused(f"{announced} announced, but {received} received")
        for name in asked.names:
            _check_name(name)
        if asked.uid is None and asked.names:
            raise _Refused("files cannot be written without a user")
        if asked.uid is not None and (why := policy.refuses_user(asked.uid)):
            raise _Refused(why)
        user = _LOOKING if asked.uid is None else asked.uid
        if self._rate.late_s(str(user)):
            raise _Refused(f"more than {REQUESTS_PER_SECOND} requests per second; try again in a moment")
        question = WriteQuestion(
            uid=asked.uid,
            root=str(root),
            parts=folder.relative_to(root).parts,
            files=tuple(zip(fds, asked.names, strict=True)),
            unit=UNIT,
            max_bytes=policy.max_bytes,
        )
        fair_share_key.set(f"uid {user}")
        turns = self._turns.setdefault(root, FairSlots(TURNS, spare=SPARE_TURNS))
        async with contextlib.AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(TURN_S):
                    await turn.enter_async_context(turns.turn())
            except TimeoutError:
                raise _Refused(f"too many traces are being written below {root}; try again in a moment") from None
            return await self._asked(question, (user, question.root))

    async def _asked(self, question: WriteQuestion, where: tuple[int, str]) -> list[str]:
        """Runs the writing process. where: user and root. Raises _Refused."""
        self._check_hang(where)
        deadline_s = self._write_s if question.files else self._check_s
        with _pipe() as (kept, alive):
            try:
                return await run_writer(question, deadline_s=deadline_s, command=self._command, alive=alive)
            except NoAnswer as exc:
                hang = _Hang(os.dup(kept), self._clock() + HANG_S, str(exc))
                self._hung.setdefault(where, []).append(hang)
                raise _Refused(str(exc)) from exc

    def _check_hang(self, where: tuple[int, str]) -> None:
        """Raises _Refused while this user's last folder below this root is assumed to hang."""
        for hang in self._hung.get(where, ()):
            if hang.until > self._clock() or not hang.has_ended():
                raise _Refused(f"{hang.why} a moment ago; nothing is written there until it responds")
        self._forget_hangs(where)

    def _forget_hangs(self, where: tuple[int, str]) -> None:
        for hang in self._hung.pop(where, ()):
            hang.close()

    def _note(self, caller: HelperCaller, asked: PlaceTraces, problems: Sequence[str], took_s: float) -> None:
        bad = [each for each in problems if each]
        whom = "no user" if asked.uid is None else f"uid {asked.uid}"
        result = f"{len(problems) - len(bad)} of {len(asked.names)} written" if asked.names else "checked"
        if bad:
            result += f", refused: {clean(bad[0], 500)}"
        log.log(
            logging.WARNING if bad else logging.INFO,
            "request from %s as %s for %s %s: %s in %.0f ms",
            caller, whom, clean(asked.folder, 300), [clean(name, 100) for name in asked.names], result, took_s * 1000,
        )  # fmt: skip


class _Hang:
    """A process killed at its deadline. kept: reading end of the pipe that it keeps open."""

    def __init__(self, kept: int, until: float, why: str) -> None:
        self._kept = kept
        self.until = until
        self.why = why

    def has_ended(self) -> bool:
        """Whether the kernel has released the process."""
        try:
            return os.read(self._kept, 1) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self._kept)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe for the block; the reading one does not block."""
    kept, alive = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield kept, alive
    finally:
        os.close(kept)
        os.close(alive)


def _check_name(name: str) -> None:
    """Raises _Refused unless it is a plain file name."""
    if not name.isprintable() or "/" in name or name in (".", "..") or len(name.encode()) > messages.MAX_NAME_BYTES:
        raise _Refused(f"{clean(name, 100)!r} is not a file name")


async def _tell(sock: socket.socket, problems: Sequence[str]) -> None:
    """Sends the answer. Raises OSError, TimeoutError."""
    said = messages.TracesPlaced(problems=tuple(each[: messages.MAX_PROBLEM_CHARS] for each in problems))
    await send(sock, messages.encode(said), [], SEND_S)
