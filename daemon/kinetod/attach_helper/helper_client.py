"""The front end's client of the attach helper service: offers what `AttachHelpers` does, without rights of its own.

Theory of operation
    One connection for each request: a Unix socket connects in microseconds, no connection has to survive restarts of
    the other side, and closing it cancels an attach. The service must be root's or our own user's (SO_PEERCRED; for a
    socket that systemd passes it is root).

    If the service is unreachable, facts are left out, a diagnosis says that the helper is missing, and an attach fails
    with advice.

    A front end that may open no process's folder has access through the helper, too. The helper makes a folder of its
    own for each trace, in which libkineto is told to write. It reports whether the file exists, opens the complete
    file, and removes both. The file's descriptor is checked here once more, and copied from in a thread.

    If the helper refuses a query or does not answer while a trace is awaited, that is an OSError with its text: the
    next query may succeed.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from kinetod.attach.attach_types import Approval, AttachCode, Attached, AttachError, Finding, Status
from kinetod.attach_helper import diagnosis, messages
from kinetod.attach_helper.diagnosis import Diagnosis, KnownAgent
from kinetod.base.fair_slots import FairSlots
from kinetod.base.safe_text import clean, clean_code
from kinetod.base.unix_sockets import receive
from kinetod.kineto_files.direct_folders import FileThreads
from kinetod.kineto_files.interface import FileRefused, FolderUnreachable, OpenTraceFolder, Sight
from kinetod.kineto_files.trace_folder import check_file, copy_file
from kinetod.kineto_ipc.network_namespaces import NamespacesSeen
from kinetod.processes import process_info
from kinetod.processes.accelerator_signs import OutsideSigns
from kinetod.processes.identity import BOOT_TIME_NS, ProcessKey, start_time_ns
from kinetod.processes.process_info import PrivateFacts
from kinetod.profilers import ProfilingTool
from kinetod.stacks import thread_stacks
from kinetod.stacks.thread_stacks import StackReading
from kinetod.supervise.helper_connection import connected

log = logging.getLogger(__name__)

START_GRACE_S = 20.0  # the first caller after a while waits for the service's start
ANSWER_GRACE_S = 2.0  # in addition to the service's own limit
LOOK_DEADLINE_S = 5.0
DIAGNOSE_DEADLINE_S = 15.0
STACKS_DEADLINE_S = 15.0
KUBELET_DEADLINE_S = 5.0
NAMESPACES_DEADLINE_S = 60.0  # each new one takes as long as starting Python
DEVICE_CODE_DEADLINE_S = 2.0  # usually about 10 ms; a capture waits for it
_BRINGERS = (
    messages.AttachReply | messages.Connected | messages.PollSockets | messages.StacksReply | messages.TraceFileReply
)
Said = TypeVar("Said", messages.Seen, messages.Found)
ASK_DEADLINE_S = 15.0  # the helper gives up after 5 s, once it is this folder's turn
_SPARE_S = 3600  # longer than the file is wanted: a large one takes time to write
_TURNS, _SPARE_TURNS = 16, 8  # queries at a time: the service has 64 connections for all requests
_TRIED_NAME = "kinetod-try.json"
_MAX_UNTIL_S = (1 << 32) - 1  # the bound of messages.Id
_Ask = Callable[[messages.FolderUse], Awaitable[tuple[messages.Answer, int | None]]]


class HelperUnreachable(Exception):
    """The service does not answer. The message says why and what to do."""


class HelperService:
    """Client of the service that listens on `path`."""

    def __init__(self, path: Path, *, start_grace_s: float = START_GRACE_S) -> None:
        self._path = path
        self._start_grace_s = start_grace_s

    def pids(self) -> set[int]:
        """Empty: the service's processes are not ours, and it refuses to enter them by itself."""
        return set()

    async def start(self) -> None:
        """Logs whether the service is reachable; it may start later."""
        if not self._path.is_socket():
            log.warning("%s", self._unreachable("there is no such socket"))

    async def stop(self) -> None:
        """Does nothing: no connection is kept."""

    async def attach(self, key: ProcessKey, approval: Approval, *, deadline_s: float) -> tuple[Attached, socket.socket]:
        """Injects the agent into a process. The caller owns the channel. Raises AttachError."""
        deadline_ms = min(max(1, round(deadline_s * 1000)), messages.MAX_DEADLINE_MS)
        asked = messages.Attach(
            target=target_of(key),
            approved=msgspec.convert(approval.credentials.to_dict(), messages.Approved),
            administrator=approval.administrator,
            boot_time_ns=BOOT_TIME_NS,
            deadline_ms=deadline_ms,
        )
        try:
            async with _Conversation(self._path, deadline_s + self._start_grace_s + ANSWER_GRACE_S) as service:
                said, descriptor = await service.ask(asked)
        except HelperUnreachable as exc:
            raise AttachError(AttachCode.FAILED, f"process {key.pid}: {self._unreachable(str(exc))}") from exc
        if isinstance(said, messages.AttachReply) and descriptor is not None:
            attached = Attached(method=clean(said.method, 40), stopped_ns=said.stopped_ns, latency_ns=said.latency_ns)
            return attached, socket.socket(fileno=descriptor)
        _close(descriptor)
        raise refusal(said, key.pid)

    async def diagnose(self, pid: int, agent: KnownAgent) -> Diagnosis:
        """Inspects a process. Raises ProcessLookupError if it does not exist."""
        try:
            key = ProcessKey(pid, await asyncio.to_thread(start_time_ns, pid))
        except OSError as exc:
            raise ProcessLookupError(f"there is no process {pid}") from exc
        known = messages.AgentFacts(
            state=clean(agent.state, 128),
            version=clean(agent.version, 128),
            attached=agent.attached,
            capture_id=clean(agent.capture_id, 128),
            attaching=agent.attaching,
        )
        asked = messages.Diagnose(target=target_of(key), boot_time_ns=BOOT_TIME_NS, agent=known)
        try:
            async with _Conversation(self._path, DIAGNOSE_DEADLINE_S + self._start_grace_s) as service:
                said, _ = await service.ask(asked)
        except HelperUnreachable as exc:
            return _no_diagnosis("attach_helper", self._unreachable(str(exc)))
        if isinstance(said, messages.Diagnosed):
            try:
                return diagnosis.decode(msgspec.json.encode(said.diagnosis))
            except ValueError as exc:
                return _no_diagnosis("attach_helper", f"its answer cannot be decoded: {exc}")
        error = refusal(said, pid)
        if error.code is AttachCode.GONE:
            raise ProcessLookupError(error.reason)
        return _no_diagnosis("attach_helper", error.reason, error.code)

    async def read(self, key: ProcessKey, uid: int) -> StackReading:
        """Reads the stacks of a process. Raises ProcessLookupError if it does not exist."""
        asked = messages.ReadStacks(target=target_of(key), boot_time_ns=BOOT_TIME_NS)
        try:
            async with _Conversation(self._path, STACKS_DEADLINE_S + self._start_grace_s) as service:
                said, descriptor = await service.ask(asked)
        except HelperUnreachable as exc:
            return thread_stacks.only_reason(self._unreachable(str(exc)))
        if isinstance(said, messages.StacksReply) and descriptor is not None:
            with os.fdopen(descriptor, "rb") as file, contextlib.suppress(ValueError):
                return thread_stacks.decode(os.pread(file.fileno(), thread_stacks.MAX_ANSWER_BYTES, 0))
            return thread_stacks.only_reason("the attach helper's response cannot be decoded")
        _close(descriptor)
        error = refusal(said, key.pid)
        if error.code is AttachCode.GONE:
            raise ProcessLookupError(error.reason)
        return thread_stacks.only_reason(error.reason)

    async def private_facts(
        self, keys: Iterable[ProcessKey], signs: Iterable[OutsideSigns] = ()
    ) -> dict[ProcessKey, PrivateFacts]:
        """The private facts of the processes that the service may inspect; empty, and logged, if it is unreachable.

        signs: of the plug-ins to look for, together at most messages.MAX_SIGNS_BYTES.
        """
        wanted = {key.pid: key for key in keys}
        look = partial(messages.Look, signs=tuple(messages.SignsItem(*each) for each in signs))
        seen = await self._about(wanted.values(), look, messages.Seen, "rank, job and GPUs of")
        return {wanted[each.pid]: _private(each) for said in seen for each in said.facts if each.pid in wanted}

    async def profilers(self, pids: Iterable[int]) -> tuple[set[int], list[ProfilingTool]]:
        """Returns the processes that the service searched, and the tools in them; empty, and logged, if it is
        unreachable.
        """
        keys = await asyncio.to_thread(_keys, pids)
        found = await self._about(keys, messages.Search, messages.Found, "other profilers in")
        tools = [
            ProfilingTool(product=each.product, pid=each.pid, gpus=each.gpus) for said in found for each in said.tools
        ]
        return {pid for said in found for pid in said.searched}, tools

    async def _about(
        self,
        keys: Iterable[ProcessKey],
        question: Callable[..., messages.Look | messages.Search],
        wanted: type[Said],
        what: str,
    ) -> list[Said]:
        """Returns the answers about these processes. what: name of the facts, for the log if they are unavailable."""
        answers: list[Said] = []
        if not (asked := list(keys)):
            return answers
        try:
            async with _Conversation(self._path, LOOK_DEADLINE_S + self._start_grace_s) as service:
                for batch in _batches(asked, messages.MAX_PROCESSES):
                    targets = tuple(map(target_of, batch))
                    said, _ = await service.ask(question(targets=targets, boot_time_ns=BOOT_TIME_NS))
                    if isinstance(said, wanted):
                        answers.append(said)
                    else:
                        log.warning("%s some processes are unknown: %s", what, refusal(said, 0).reason)
        except HelperUnreachable as exc:
            log.warning("%s other users' processes are unknown: %s", what, self._unreachable(str(exc)))
        return answers

    async def device_graphs(self, key: ProcessKey) -> str:
        """The file of a process whose device code launches CUDA graphs; "" if none is found. Raises OSError."""
        asked = messages.DeviceCode(target=target_of(key), boot_time_ns=BOOT_TIME_NS)
        try:
            async with _Conversation(self._path, DEVICE_CODE_DEADLINE_S) as service:
                said, _ = await service.ask(asked)
        except HelperUnreachable as exc:
            raise OSError(self._unreachable(str(exc))) from exc
        if isinstance(said, messages.LaunchesReply):
            return said.file
        raise OSError(refusal(said, key.pid).reason)

    async def kubelet(self) -> socket.socket:
        """Returns a connection to the kubelet, which the caller owns. Raises HelperUnreachable."""
        async with _Conversation(self._path, KUBELET_DEADLINE_S) as service:
            said, descriptor = await service.ask(messages.Kubelet())
        if isinstance(said, messages.Connected) and descriptor is not None:
            return socket.socket(fileno=descriptor)
        _close(descriptor)
        raise HelperUnreachable(refusal(said, 0).reason)

    async def poll_sockets(self, served: Collection[int]) -> NamespacesSeen | None:
        """Sockets in the network namespaces that are not served; None, and logged, if the service is unreachable."""
        opened, problems = dict[int, socket.socket](), dict[int, str]()
        try:
            async with _Conversation(self._path, NAMESPACES_DEADLINE_S + self._start_grace_s) as service:
                while True:
                    known = tuple({*served, *opened, *problems})[: messages.MAX_SERVED]
                    said, descriptor = await service.ask(messages.OpenPollSocket(served=known))
                    if not isinstance(said, messages.PollSockets):
                        raise HelperUnreachable(refusal(said, 0).reason)
                    if not said.namespace or said.namespace in known:
                        _close(descriptor)
                        return NamespacesSeen(frozenset(said.inhabited), opened, problems)
                    if descriptor is None:
                        problems[said.namespace] = clean(said.problem, 200)
                    else:
                        opened[said.namespace] = socket.socket(fileno=descriptor)
        except HelperUnreachable as exc:
            log.warning("cannot serve the network namespaces of containers: %s", self._unreachable(str(exc)))
            for sock in opened.values():
                sock.close()
            return None

    async def ask(self, asked: messages.Request, *, deadline_s: float) -> tuple[messages.Answer, int | None]:
        """Sends one request; returns its answer and the descriptor that came with it, which the caller owns.

        Raises HelperUnreachable.
        """
        try:
            async with _Conversation(self._path, deadline_s + self._start_grace_s) as service:
                return await service.ask(asked)
        except HelperUnreachable as exc:
            raise HelperUnreachable(self._unreachable(str(exc))) from exc

    async def problem(self) -> str:
        """Why the service is unavailable; empty if it answers. Asks about our own process, so it reveals nothing."""
        targets = (target_of(ProcessKey(os.getpid(), start_time_ns(os.getpid()))),)
        try:
            async with _Conversation(self._path, LOOK_DEADLINE_S + self._start_grace_s) as service:
                said, _ = await service.ask(messages.Look(targets=targets, boot_time_ns=BOOT_TIME_NS))
        except HelperUnreachable as exc:
            return self._unreachable(str(exc))
        return "" if isinstance(said, messages.Seen) else refusal(said, os.getpid()).reason

    def _unreachable(self, why: str) -> str:
        return (
            f"the attach helper cannot be reached ({self._path}: {why}); check `systemctl status "
            "kinetod-attach.socket kinetod-attach.service`"
        )


def toolkit(path: Path, key: ProcessKey, *, boot_time_ns: int, deadline_s: float = START_GRACE_S) -> messages.Tools:
    """The facts that a proxy needs about its process. Blocking. Raises HelperUnreachable, AttachError."""

    async def ask() -> messages.Answer:
        async with _Conversation(path, deadline_s) as service:
            said, _ = await service.ask(messages.Toolkit(target=target_of(key), boot_time_ns=boot_time_ns))
            return said

    said = asyncio.run(ask())
    if isinstance(said, messages.Tools):
        return said
    raise refusal(said, key.pid)


class _Conversation:
    """One connection. Raises HelperUnreachable, also when the deadline has passed."""

    def __init__(self, path: Path, deadline_s: float) -> None:
        self._path = path
        self._end = asyncio.get_running_loop().time() + deadline_s

    async def __aenter__(self) -> "_Conversation":
        try:
            async with asyncio.timeout_at(self._end):
                self._sock = await connected(self._path)
        except TimeoutError as exc:
            raise HelperUnreachable("it is not responding") from exc
        except OSError as exc:
            raise HelperUnreachable(exc.strerror or str(exc)) from exc
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._sock.close()

    async def ask(self, asked: messages.Request) -> tuple[messages.Answer, int | None]:
        """Sends one request; returns its answer and descriptor, which the caller owns."""
        try:
            async with asyncio.timeout_at(self._end):
                await asyncio.get_running_loop().sock_sendall(self._sock, messages.encode(asked))
                packet, fds = await receive(self._sock, messages.MAX_ANSWER_BYTES + 1)
        except TimeoutError as exc:
            raise HelperUnreachable("it is not responding") from exc
        except OSError as exc:
            raise HelperUnreachable(exc.strerror or str(exc)) from exc
        try:
            if not packet:
                raise HelperUnreachable("it hung up")
            said = messages.answer(packet)
            keep = fds.pop() if isinstance(said, _BRINGERS) and len(fds) == 1 else None
            return said, keep
        except messages.BadMessage as exc:
            raise HelperUnreachable(str(exc)) from exc
        finally:
            for fd in fds:
                os.close(fd)


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _keys(pids: Iterable[int]) -> list[ProcessKey]:
    """The keys of the processes that exist. Blocking."""
    keys = []
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            keys.append(ProcessKey(pid, start_time_ns(pid)))
    return keys


def target_of(key: ProcessKey) -> messages.Target:
    """A process as messages identify it."""
    return messages.Target(key.pid, key.start_time_ns)


def _batches(keys: Sequence[ProcessKey], size: int) -> Iterable[Sequence[ProcessKey]]:
    return (keys[at : at + size] for at in range(0, len(keys), size))


def _private(each: messages.PrivateFactsItem) -> PrivateFacts:
    return PrivateFacts(
        gpus=each.gpus,
        rank=each.rank,
        world_size=each.world_size,
        job_id=clean(each.job_id, 128),
        job_step=clean(each.job_step, 32),
        is_python=each.is_python,
        framework=each.framework,
        plugins=tuple(clean(name, 16) for name in each.plugins),
        own_user_namespace=each.own_user_namespace,
        uid=each.uid,
        program=clean(each.program, 128),
        trace_parent=process_info.checked_trace_parent(each.trace_parent),
        resource=process_info.checked_resource(each.resource),
    )


def refusal(said: messages.Answer, pid: int) -> AttachError:
    """The error for an unexpected answer."""
    if not isinstance(said, messages.RefusedReply):
        return AttachError(AttachCode.FAILED, f"the attach helper gave an unexpected answer about process {pid}")
    code, reason = clean_code(said.code, ""), clean(said.reason, 1000)
    if code in {each.value for each in AttachCode}:
        return AttachError(AttachCode(code), reason)
    kind = AttachCode.NOT_PERMITTED if code == "CALLER" else AttachCode.FAILED
    return AttachError(kind, f"process {pid}: the attach helper refused this daemon: {reason}")


def _no_diagnosis(name: str, why: str, code: AttachCode = AttachCode.FAILED) -> Diagnosis:
    advice = "an administrator can change the attach helper's policy" if code is AttachCode.NOT_PERMITTED else ""
    return Diagnosis(method="", findings=(Finding(name, Status.PROBLEM, why, advice, code),))


class HelperTraceFolders:
    """Implements TraceFolders through the attach helper."""

    look_period_s = 0.5  # each look involves two other processes

    def __init__(self, helper: HelperService) -> None:
        self._helper = helper
        self._threads = FileThreads()
        self._turns = FairSlots(_TURNS, spare=_SPARE_TURNS)

    async def problem(self, key: ProcessKey, approval: Approval) -> str:
        """See TraceFolders: the helper makes a folder and removes it."""
        try:
            await self._made(key, approval, _TRIED_NAME, 0, only_try=True)
        except FolderUnreachable as exc:
            return str(exc)
        return ""

    async def open(self, key: ProcessKey, approval: Approval, name: str, *, until_ns: int) -> OpenTraceFolder:
        """See TraceFolders: the helper makes a folder."""
        until_s = min(until_ns // 10**9 + _SPARE_S, _MAX_UNTIL_S)
        path = await self._made(key, approval, name, until_s, only_try=False)
        return _HelperTraceFolder(self._ask, self._threads, key, path, name, approval.credentials.uids[-1])

    async def _made(self, key: ProcessKey, approval: Approval, name: str, until_s: int, *, only_try: bool) -> str:
        asked = messages.MakeFolder(
            target=target_of(key),
            approved=msgspec.convert(approval.credentials.to_dict(), messages.Approved),
            administrator=approval.administrator,
            boot_time_ns=BOOT_TIME_NS,
            file=name,
            until_s=until_s,
            only_try=only_try,
        )
        try:
            said, _ = await self._ask(asked)
        except HelperUnreachable as exc:
            raise FolderUnreachable(f"process {key.pid}: {exc}") from exc
        if not isinstance(said, messages.FolderMade):
            raise FolderUnreachable(refusal(said, key.pid).reason)
        return said.path

    async def _ask(self, asked: messages.MakeFolder | messages.FolderUse) -> tuple[messages.Answer, int | None]:
        async with self._turns.turn():
            return await self._helper.ask(asked, deadline_s=ASK_DEADLINE_S)

    async def reopen(self, key: ProcessKey, path: str, name: str, *, uid: int) -> OpenTraceFolder:
        """See TraceFolders: the helper has the folder open, or opens it at the first look."""
        folder = _HelperTraceFolder(self._ask, self._threads, key, path, name, uid)
        try:
            await folder.look()
        except OSError as exc:
            raise FolderUnreachable(str(exc)) from exc
        return folder

    async def stop(self) -> None:
        """See TraceFolders."""
        self._threads.stop()


class _HelperTraceFolder:
    """An OpenTraceFolder that the helper keeps open."""

    def __init__(self, ask: _Ask, threads: FileThreads, key: ProcessKey, path: str, name: str, uid: int) -> None:
        self.path = path
        self._ask_helper = ask
        self._threads = threads
        self._key = key
        self._name = name
        self._uid = uid
        self._removed = False

    async def look(self) -> Sight:
        if self._removed:
            return Sight()
        said, _ = await self._ask(messages.LookIntoFolder)
        if not isinstance(said, messages.FolderSeen):
            raise OSError(refusal(said, self._key.pid).reason)
        return Sight(said.writing_bytes, said.whole)

    async def copy(
        self, destination: Path, *, max_bytes: int, on_bytes: Callable[[int], None], deadline_s: float
    ) -> int:
        try:
            said, descriptor = await self._ask(messages.OpenTraceFile)
        except OSError as exc:
            raise FolderUnreachable(str(exc)) from exc
        if descriptor is None:
            if isinstance(said, messages.TraceFileReply):
                raise FileRefused(said.refused or f"{self._name} was not sent by the attach helper")
            raise FolderUnreachable(refusal(said, self._key.pid).reason)

        def work() -> int:
            try:
                check_file(descriptor, self._name, self._uid)
            except BaseException:
                os.close(descriptor)
                raise
            return copy_file(descriptor, destination, max_bytes=max_bytes, on_bytes=on_bytes)

        return await self._threads.run(work, deadline_s=deadline_s)

    async def remove(self) -> None:
        if self._removed:
            return
        said, _ = await self._ask(messages.RemoveFolder)
        if not isinstance(said, messages.FolderRemoved):
            raise OSError(refusal(said, self._key.pid).reason)
        self._removed = True

    async def _ask(
        self, kind: type[messages.LookIntoFolder] | type[messages.OpenTraceFile] | type[messages.RemoveFolder]
    ) -> tuple[messages.Answer, int | None]:
        asked = kind(
            target=target_of(self._key),
            boot_time_ns=BOOT_TIME_NS,
            name=PurePosixPath(self.path).name,
            file=self._name,
        )
        try:
            return await self._ask_helper(asked)
        except HelperUnreachable as exc:
            raise OSError(str(exc)) from exc

    def close(self) -> None:
        """Leaves the folder to the helper, which removes it when its time is over."""
