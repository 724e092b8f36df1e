"""The attach helper service: accepts the front end's requests, decides on its own, and delegates the work to helper
processes.

Theory of operation
    One task per connection, one request at a time. The kernel identifies the caller (SO_PEERCRED); the policy file is
    read for each request. Before a process is touched, its start time and owner are checked, by our policy and against
    what the front end has approved. The result goes to the helper process, which compares it during the stop in which
    it enters the process (injection.py), to detect an execve that makes the process another user's. Once the agent
    runs, the same is checked once more.

    Nothing here reads a target's memory or files: helper processes do (`AttachHelpers`), which are killed at their
    deadlines; those that attach and those that inspect are separate, so that neither waits for the other. When the
    caller closes the connection, its work is cancelled.

    Every use is logged (`RequestLog`): caller, request, target process and its owner, result.
"""

import asyncio
import contextlib
import io
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kinetod.attach.attach_types import Approval, AttachCode, AttachError, replaced
from kinetod.attach_helper import kept_folders, messages
from kinetod.attach_helper.allow_list import Policy, load, owner
from kinetod.attach_helper.attach_pool import AttachHelpers
from kinetod.attach_helper.diagnosis import KnownAgent
from kinetod.attach_helper.diagnosis_runner import DiagnosisProcess
from kinetod.attach_helper.kept_folders import KeptFolder, KeptFolders
from kinetod.attach_helper.messages import Denial
from kinetod.attach_helper.worker_queries import DEVICE_GRAPHS, LOOK, NAMESPACES, SEARCH, TOOLKIT
from kinetod.base.fair_slots import fair_share_key
from kinetod.base.policy_file import PolicyError
from kinetod.base.safe_text import clean
from kinetod.base.unix_sockets import send
from kinetod.kineto_ipc.network_namespaces import open_in
from kinetod.processes import credentials
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import PROC, ProcessKey, start_time_ns
from kinetod.stacks import thread_stacks
from kinetod.stacks.stack_reader import StackReader
from kinetod.supervise.child import Crashed, TooLate
from kinetod.supervise.helper_service import Connections, HelperCaller, HungUp

log = logging.getLogger(__name__)

REQUEST_S = 30.0  # how long a connection may be silent
SEND_S = 5.0
WARM_UP_S = 30.0
KUBELET_S = 2.0  # it listens, or it does not
LOOK_S = 3.0  # for at most messages.MAX_PROCESSES processes; usually a few ms
_PROC = Path("/proc")

Brought = socket.socket | io.FileIO | None  # sent along with an answer
T = TypeVar("T")


@dataclass(slots=True)
class _Looks:
    """How many processes one connection asked about, and how many were inspected."""

    asked: int = 0
    seen: int = 0


class RequestLog:
    """The log of one connection."""

    def __init__(self, log: logging.Logger, caller_pid: int, caller: str) -> None:
        self._log = log
        self._caller_pid = caller_pid
        self._caller = caller
        self._looks: dict[str, _Looks] = {}

    def answered(self, asked: messages.Request, said: messages.Answer, began: float) -> None:
        """Logs a request and its answer. began: monotonic."""
        self.note(asked, _result(said), began, seen=_seen(said))

    def note(self, asked: messages.Request, result: str, began: float, *, seen: int = 0) -> None:
        """Logs a request and its result. seen: how many processes were inspected."""
        kind = type(asked).__name__.lower()
        if isinstance(asked, messages.Look | messages.Search):
            looks = self._looks.setdefault(kind, _Looks())
            # a caller that asks about itself only checks whether the service answers
            looks.asked += sum(target.pid != self._caller_pid for target in asked.targets)
            looks.seen += seen
            return
        took_ms = (time.monotonic() - began) * 1000
        if isinstance(asked, messages.Kubelet | messages.OpenPollSocket):  # they concern no process
            self._log.debug("%s by %s: %s in %.0f ms", kind, self._caller, result, took_ms)
            return
        level = logging.INFO if not result.startswith("refused") else logging.WARNING
        if isinstance(asked, messages.LookIntoFolder):  # the folder's creation and removal have a line each
            level = logging.DEBUG
        whose = _describe(asked.target.pid)
        self._log.log(
            level,
            "%s by %s to process %d (%s): %s in %.0f ms",
            kind, self._caller, asked.target.pid, whose, result, took_ms,
        )  # fmt: skip

    def end(self) -> None:
        """Logs the inspections: once, since a list of processes takes many requests."""
        for kind, looks in self._looks.items():
            if looks.asked:
                self._log.info("%s by %s: %d of %d processes seen", kind, self._caller, looks.seen, looks.asked)


def _result(said: messages.Answer) -> str:
    if isinstance(said, messages.RefusedReply):
        return f"refused {said.code}: {clean(said.reason, 500)}"
    if isinstance(said, messages.PollSockets) and said.namespace:
        return f"network namespace {said.namespace}: {said.problem or 'opened'}"
    if isinstance(said, messages.FolderMade):
        return f"created {clean(said.path, 600)}"
    if isinstance(said, messages.TraceFileReply) and said.refused:
        return f"refused the file: {clean(said.refused, 500)}"
    if isinstance(said, messages.AttachReply):
        return f"done by {said.method}; one thread was stopped for {said.stopped_ns / 1e6:.2f} ms"
    return "done"


def _seen(said: messages.Answer) -> int:
    if isinstance(said, messages.Seen):
        return len(said.facts)
    return len(said.searched) if isinstance(said, messages.Found) else 0


def _describe(pid: int) -> str:
    """Owner and name of a process, for the log."""
    with contextlib.suppress(OSError, IndexError):
        name = (PROC / str(pid) / "comm").read_text(errors="replace").strip()
        return f"uid {credentials.read(pid).uid}, {clean(name, 32)}"
    return "ended"


class AttachService:
    """Serves connections. `load_policy` is called for each request; `helpers` and `lookers` are started here."""

    def __init__(
        self,
        load_policy: Callable[[], Policy] = load,
        *,
        helpers: AttachHelpers | None = None,
        lookers: AttachHelpers | None = None,
        proc: Path = _PROC,
    ) -> None:
        self._load_policy = load_policy
        self._helpers = helpers or AttachHelpers()
        self._lookers = lookers or AttachHelpers(1)
        self._keepers = AttachHelpers(1)  # for folders; the first query starts it
        self._folders = KeptFolders(self._keepers, self._is_alive)
        self._diagnosis = DiagnosisProcess()
        self._stacks = StackReader()
        self._proc = proc
        self.connections = Connections(self._serve, is_busy=lambda: bool(self._folders.count))

    async def start(self) -> None:
        """Starts the helpers; the one that inspects has answered by then. Raises OSError."""
        await asyncio.gather(self._helpers.start(), self._lookers.start())
        with contextlib.suppress(TooLate, Crashed):  # a later one may succeed
            nothing = {"do": LOOK, "boot_time_ns": 0, "targets": [], "signs": []}
            await self._lookers.ask(nothing, deadline_s=WARM_UP_S)

    async def stop(self) -> None:
        """Closes all connections and ends the helpers."""
        await self.connections.stop()
        await self._folders.stop()
        await asyncio.gather(self._helpers.stop(), self._lookers.stop(), self._keepers.stop())

    async def _serve(self, sock: socket.socket, caller: HelperCaller) -> None:
        await _Connection(self, sock, caller).serve()

    def policy_for(self, caller: HelperCaller) -> Policy:
        """Loads the policy, if it serves the caller. Raises Denial."""
        try:
            policy = self._load_policy()
        except PolicyError as exc:
            log.error("%s was refused: %s", caller, exc)
            raise Denial("CALLER", f"the attach helper serves no caller: {exc}") from exc
        if why := policy.refuses_caller(caller.uid):
            log.warning("%s was refused: %s", caller, why)
            raise Denial("CALLER", why)
        return policy

    def check(
        self, caller: HelperCaller, policy: Policy, key: ProcessKey, boot_time_ns: int, *, administrator: bool = True
    ) -> Credentials:
        """Checks that the process is still the named one and may be entered. Raises Denial.

        administrator: whether the front end asks for one; inspections are done for everybody it asks for.
        """
        try:
            before = start_time_ns(key.pid, self._proc, boot_time_ns=boot_time_ns)
            found = credentials.read(key.pid, proc=self._proc)
            if not before == start_time_ns(key.pid, self._proc, boot_time_ns=boot_time_ns) == key.start_time_ns:
                raise ProcessLookupError
        except (OSError, ValueError):
            raise Denial(
                AttachCode.GONE, f"process {key.pid} has ended; `kinetoctl ps --all` lists running processes"
            ) from None
        if key.pid == os.getpid() or _is_child(key.pid, self._proc):
            reason = f"process {key.pid} is the attach helper itself; choose another process"
            raise Denial(AttachCode.UNSUITABLE, reason)
        if key.pid == caller.pid:
            raise Denial(AttachCode.UNSUITABLE, f"process {key.pid} is the caller itself; choose another process")
        if why := policy.refuses_owner(owner(key.pid, found, self._proc), administrator=administrator):
            raise Denial(AttachCode.NOT_PERMITTED, f"process {key.pid}: the attach helper's policy forbids it: {why}")
        fair_share_key.set(f"uid {found.uid}")
        return found

    async def attach(
        self, caller: HelperCaller, policy: Policy, asked: messages.Attach
    ) -> tuple[messages.AttachReply, socket.socket]:
        """Attaches for a caller. Raises Denial, AttachError."""
        key = ProcessKey(asked.target.pid, asked.target.start_time_ns)
        approved = Credentials.from_dict(msgspec.structs.asdict(asked.approved))

        def check() -> Credentials:
            return self.check(caller, policy, key, asked.boot_time_ns, administrator=asked.administrator)

        found = check()
        _same(key, approved, found)
        attached, channel = await self._helpers.attach(
            key, Approval(found), deadline_s=asked.deadline_ms / 1000, boot_time_ns=asked.boot_time_ns
        )
        try:
            _same(key, found, check())
        except BaseException:
            channel.close()  # the agent leaves
            raise
        said = messages.AttachReply(
            method=attached.method, stopped_ns=attached.stopped_ns, latency_ns=attached.latency_ns
        )
        return said, channel

    async def diagnose(self, caller: HelperCaller, policy: Policy, asked: messages.Diagnose) -> messages.Diagnosed:
        """Inspects a process for a caller. Raises Denial."""
        key = ProcessKey(asked.target.pid, asked.target.start_time_ns)
        before = self.check(caller, policy, key, asked.boot_time_ns)
        agent = KnownAgent(**msgspec.structs.asdict(asked.agent))
        try:
            found = await self._diagnosis.diagnose(key.pid, agent)
        except ProcessLookupError as exc:
            raise Denial(AttachCode.GONE, f"process {key.pid} has ended") from exc
        _same(key, before, self.check(caller, policy, key, asked.boot_time_ns))
        return messages.Diagnosed(diagnosis=asdict(found))

    async def read_stacks(
        self, caller: HelperCaller, policy: Policy, asked: messages.ReadStacks
    ) -> tuple[messages.StacksReply, io.FileIO]:
        """Reads where the threads of a process stand. Raises Denial, AttachError."""
        key = ProcessKey(asked.target.pid, asked.target.start_time_ns)
        before = self.check(caller, policy, key, asked.boot_time_ns)
        try:
            found = await self._stacks.read(key, before.uid)
        except ProcessLookupError as exc:
            raise Denial(AttachCode.GONE, f"process {key.pid} has ended") from exc
        _same(key, before, self.check(caller, policy, key, asked.boot_time_ns))
        file = os.fdopen(os.memfd_create("kineto-stacks"), "w+b", buffering=0)
        file.write(thread_stacks.encode(found))
        return messages.StacksReply(), file

    async def look(self, caller: HelperCaller, policy: Policy, asked: messages.Look) -> messages.Seen:
        """Answers for the processes that may be inspected. Raises Denial if inspecting them fails."""
        if not (allowed := self._allowed(caller, policy, asked)):
            return messages.Seen(facts=())
        signs = msgspec.to_builtins(asked.signs)
        said = await self._ask({"do": LOOK, "boot_time_ns": asked.boot_time_ns, "targets": allowed, "signs": signs})
        return messages.Seen(facts=msgspec.convert(said["seen"], tuple[messages.PrivateFactsItem, ...]))

    async def search(self, caller: HelperCaller, policy: Policy, asked: messages.Search) -> messages.Found:
        """Answers for the processes that may be inspected. Raises Denial if inspecting them fails."""
        if not (allowed := self._allowed(caller, policy, asked)):
            return messages.Found(searched=(), tools=())
        said = await self._ask({"do": SEARCH, "boot_time_ns": asked.boot_time_ns, "targets": allowed})
        tools = msgspec.convert(said["tools"], tuple[messages.Tool, ...])
        return messages.Found(searched=tuple(said["searched"]), tools=tools)

    def _allowed(self, caller: HelperCaller, policy: Policy, asked: messages.Look | messages.Search) -> list[list[int]]:
        """Pid and start time of the processes that may be inspected."""
        allowed, users = [], set[int]()
        for target in asked.targets:
            with contextlib.suppress(Denial):
                key = ProcessKey(target.pid, target.start_time_ns)
                users.add(self.check(caller, policy, key, asked.boot_time_ns).uid)
                allowed.append([target.pid, target.start_time_ns])
        if len(users) > 1:
            fair_share_key.set("")  # so that no single user's turn delays the service's own query
        return allowed

    async def toolkit(self, caller: HelperCaller, policy: Policy, asked: messages.Toolkit) -> messages.Tools:
        """Reads which libcupti a process should load. Raises Denial."""
        key = ProcessKey(asked.target.pid, asked.target.start_time_ns)
        found = self.check(caller, policy, key, asked.boot_time_ns)
        targets = [[key.pid, key.start_time_ns]]
        said = await self._ask({"do": TOOLKIT, "boot_time_ns": asked.boot_time_ns, "targets": targets})
        self._still(key, found)
        return messages.Tools(cupti=said["cupti"], environ=said["environ"])

    async def device_code(
        self, caller: HelperCaller, policy: Policy, asked: messages.DeviceCode
    ) -> messages.LaunchesReply:
        """Finds device code that launches CUDA graphs. Raises Denial."""
        key = ProcessKey(asked.target.pid, asked.target.start_time_ns)
        found = self.check(caller, policy, key, asked.boot_time_ns)
        targets = [[key.pid, key.start_time_ns]]
        said = await self._ask({"do": DEVICE_GRAPHS, "boot_time_ns": asked.boot_time_ns, "targets": targets})
        self._still(key, found)
        return messages.LaunchesReply(file=said["file"])

    def _still(self, key: ProcessKey, found: Credentials) -> None:
        """Checks that the data read belongs to the process that was checked. Raises AttachError."""
        with contextlib.suppress(ProcessLookupError):
            _same(key, found, credentials.read(key.pid, proc=self._proc))

    async def kubelet(self, policy: Policy) -> tuple[messages.Connected, socket.socket]:
        """Opens a connection and passes it on, without looking at what the caller sends on it. Raises Denial."""
        path = policy.kubelet_socket
        if path is None:
            reason = f"access to the kubelet is not configured: set kubelet_socket in {policy.path} to its socket"
            raise Denial(AttachCode.NOT_PERMITTED, reason)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(KUBELET_S):
                await asyncio.get_running_loop().sock_connect(sock, str(path))
        except BaseException as exc:
            sock.close()
            if not isinstance(exc, OSError):  # a TimeoutError is one
                raise
            why = exc.strerror or f"it did not respond within {KUBELET_S:g} s"
            raise Denial(AttachCode.FAILED, f"{path}: {why}; is the node's folder mounted?") from exc
        return messages.Connected(), sock

    async def poll_socket(
        self, caller: HelperCaller, policy: Policy, asked: messages.OpenPollSocket
    ) -> tuple[messages.PollSockets, socket.socket | None]:
        """Opens a poll socket in one more network namespace. Raises Denial."""
        return await open_one(
            asked, caller.pid, self._ask, lambda key: self.check(caller, policy, key, boot_time_ns=0), self._proc
        )

    async def make_folder(
        self, caller: HelperCaller, policy: Policy, asked: messages.MakeFolder
    ) -> messages.FolderMade:
        """Makes a folder for a trace. Raises Denial, AttachError."""
        check = partial(self._check_target, caller, policy, asked, administrator=asked.administrator)
        return await kept_folders.make_folder(self._folders, asked, check, self._proc)

    async def use_folder(
        self, caller: HelperCaller, policy: Policy, asked: messages.FolderUse
    ) -> tuple[messages.FolderAnswer, io.FileIO | None]:
        """Inspects, opens or removes a folder. Raises Denial, AttachError."""
        check = partial(self._check_target, caller, policy, asked)
        return await kept_folders.use_folder(self._folders, asked, check, policy, self._proc)

    def _check_target(
        self,
        caller: HelperCaller,
        policy: Policy,
        asked: messages.MakeFolder | messages.FolderUse,
        *,
        administrator: bool = True,
    ) -> Credentials:
        key = ProcessKey(asked.target.pid, asked.target.start_time_ns)
        return self.check(caller, policy, key, asked.boot_time_ns, administrator=administrator)

    def _is_alive(self, folder: KeptFolder) -> bool:
        with contextlib.suppress(OSError):
            return (
                start_time_ns(folder.key.pid, self._proc, boot_time_ns=folder.boot_time_ns) == folder.key.start_time_ns
            )
        return False

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._lookers.ask(question, deadline_s=LOOK_S, start_s=WARM_UP_S)
        except TooLate:
            slow = "a file that one of them has mapped may be on a file system that is not responding"
            reason = f"inspecting these processes took longer than {LOOK_S:g} s: {slow}"
        except (OSError, Crashed) as exc:
            reason = f"inspecting these processes failed: {exc}"
        raise Denial(AttachCode.FAILED, reason)


class _Connection:
    """One caller."""

    def __init__(self, service: AttachService, sock: socket.socket, caller: HelperCaller) -> None:
        self._service = service
        self._sock = sock
        self._caller = caller
        self._loop = asyncio.get_running_loop()
        self._log = RequestLog(log, caller.pid, str(caller))

    async def serve(self) -> None:
        """Serves until the caller closes the connection, is silent for too long, or breaks the protocol."""
        try:
            await self._serve()
        finally:
            self._log.end()

    async def _serve(self) -> None:
        try:
            while True:
                async with asyncio.timeout(REQUEST_S):
                    packet = await self._receive()
                # Not earlier: closing a socket with an unread packet would lose the refusal.
                policy = self._service.policy_for(self._caller)
                await self._carry_out(policy, messages.request(packet))
        except Denial as exc:
            await self._send(messages.RefusedReply(code=exc.code, reason=str(exc)[:4000]))
        except messages.WrongVersion as exc:
            log.warning("%s was refused: %s", self._caller, exc)
            await self._send(messages.RefusedReply(code="VERSION", reason=str(exc)))
        except messages.BadMessage as exc:
            log.warning("%s was refused: %s", self._caller, clean(str(exc), 500))
            await self._send(messages.RefusedReply(code="REQUEST", reason=clean(str(exc), 500)))

    async def _receive(self) -> bytes:
        packet = await self._loop.sock_recv(self._sock, messages.MAX_REQUEST_BYTES + 1)
        if not packet:
            raise HungUp
        return packet

    async def _carry_out(self, policy: Policy, asked: messages.Request) -> None:
        began = time.monotonic()
        said: messages.Answer
        channel: Brought = None
        try:
            said, channel = await self._unless_it_hangs_up(self._answer(policy, asked))
        except Denial as exc:
            said = messages.RefusedReply(code=exc.code, reason=str(exc)[:4000])
        except AttachError as exc:
            said = messages.RefusedReply(code=exc.code, reason=exc.reason[:4000])
        except HungUp:
            self._log.note(asked, "given up: the caller hung up", began)
            raise
        try:
            self._log.answered(asked, said, began)
            await self._send(said, channel)
        finally:
            if channel is not None:
                channel.close()

    async def _answer(self, policy: Policy, asked: messages.Request) -> tuple[messages.Answer, Brought]:
        """Returns the answer and the descriptor to send with it. Raises Denial, AttachError."""
        service, caller = self._service, self._caller
        if isinstance(asked, messages.Attach):
            return await service.attach(caller, policy, asked)
        if isinstance(asked, messages.Diagnose):
            return await service.diagnose(caller, policy, asked), None
        if isinstance(asked, messages.ReadStacks):
            return await service.read_stacks(caller, policy, asked)
        if isinstance(asked, messages.Look):
            return await service.look(caller, policy, asked), None
        if isinstance(asked, messages.Search):
            return await service.search(caller, policy, asked), None
        if isinstance(asked, messages.Toolkit):
            return await service.toolkit(caller, policy, asked), None
        if isinstance(asked, messages.DeviceCode):
            return await service.device_code(caller, policy, asked), None
        if isinstance(asked, messages.OpenPollSocket):
            return await service.poll_socket(caller, policy, asked)
        if isinstance(asked, messages.MakeFolder):
            return await service.make_folder(caller, policy, asked), None
        if isinstance(asked, messages.Kubelet):
            return await service.kubelet(policy)
        return await service.use_folder(caller, policy, asked)

    async def _unless_it_hangs_up(self, work: Coroutine[Any, Any, T]) -> T:
        """Cancels the work if the caller closes the connection, or breaks the protocol by sending before its answer."""
        doing = asyncio.create_task(work)
        listening = asyncio.create_task(self._receive())
        try:
            await asyncio.wait((doing, listening), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            raise HungUp
        finally:
            for task in (doing, listening):
                if not task.done():
                    task.cancel()
            await asyncio.gather(doing, listening, return_exceptions=True)

    async def _send(self, said: messages.Answer, channel: Brought = None) -> None:
        """Sends an answer. Raises OSError, TimeoutError."""
        descriptors = [channel.fileno()] if channel is not None else []
        await send(self._sock, messages.encode(said), descriptors, SEND_S)


def _same(key: ProcessKey, approved: Credentials, found: Credentials) -> None:
    """Raises AttachError if the process has been replaced."""
    if difference := approved.difference(found):
        raise replaced(key.pid, difference)


def _is_child(pid: int, proc: Path) -> bool:
    """Whether it is a child of this process: a helper, where its user (root, in a container) does not show that."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid()
    return False


# Sockets for libkineto's polls in other network namespaces, made for a front end that may not enter any.
# The front end says which namespaces it serves already, and nothing else: which there are is read here, and each is
# entered for a process only that the policy allows. A process of its own enters it, binds the one name and ends. One
# answer brings one descriptor at most.
_MAX_REASON_CHARS = 200


async def open_one(
    asked: messages.OpenPollSocket,
    caller_pid: int,
    ask: Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]],
    check: Callable[[ProcessKey], object],
    proc: Path,
) -> tuple[messages.PollSockets, socket.socket | None]:
    """Opens the first namespace that is not served. ask: a helper process; check: raises Denial. Raises Denial."""
    try:
        own = (proc / str(caller_pid) / "ns/net").stat().st_ino
    except OSError as exc:
        raise Denial(AttachCode.GONE, "the caller's network namespace cannot be read") from exc
    found = (await ask({"do": NAMESPACES, "own": own}))["found"]
    allowed = dict[int, list[ProcessKey]]()
    for namespace, processes in found:
        for pid, start in processes:
            with contextlib.suppress(Denial):
                check(ProcessKey(pid, start))
                allowed.setdefault(namespace, []).append(ProcessKey(pid, start))
    inhabited = tuple(allowed)
    for namespace in allowed.keys() - set(asked.served):
        try:
            sock = await asyncio.to_thread(open_in, namespace, allowed[namespace])
        except OSError as exc:
            problem = str(exc)[:_MAX_REASON_CHARS]
            return messages.PollSockets(inhabited=inhabited, namespace=namespace, problem=problem), None
        return messages.PollSockets(inhabited=inhabited, namespace=namespace, problem=""), sock
    return messages.PollSockets(inhabited=inhabited, namespace=0, problem=""), None
