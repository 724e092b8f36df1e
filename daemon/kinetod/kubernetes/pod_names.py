"""The names of the pods and containers on this node, according to the kubelet and the API server.

Theory of operation
    The kernel's control groups contain the id of a process's container; the kubelet reports by name which GPUs it
    allocated to which container. A container that uses GPUs is matched with the one that they were allocated to if only
    one can match; certain matches are made first and excluded from the rest. Unallocated GPUs give no information:
    privileged pods use any GPU. If the API server is asked for the pods of this node (access.kubernetes), it gives
    namespace and name of a pod by its UID.

    All of this is for display and joins, not for decisions.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import secrets
import socket
import socket as sockets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio
from kineto_protos import unix_peer
from kineto_protos.kubelet.v1 import pod_resources_pb2 as pb
from kineto_protos.services import Stub

from kinetod.attach_helper.helper_client import HelperUnreachable
from kinetod.base.safe_text import clean
from kinetod.kubernetes.api_server import ApiError
from kinetod.processes.containers import Container, Names
from kinetod.processes.process_info import ProcessFacts

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
DEADLINE_S = 5.0
MAX_DEVICES = 50_000  # on one node: 384 with 8 GPUs in 48 shares each; more would use too much of the event loop's time
# the limit of the kubelet's own clients; gRPC's 4 MiB are too few for a node with many pods
_MAX_ANSWER_BYTES = 16 << 20
_MAX_NAME_CHARS = 253  # of a pod, by Kubernetes' rules; of devices, enough
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_ANSWER_BYTES),
    # otherwise it is the socket's path, percent-encoded, which servers in Go refuse
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
    # otherwise the back-off of an earlier connection applies to this one too
    ("grpc.use_local_subchannel_pool", 1),
)
_SHARE = re.compile(r"::\d+$")
_GPU_RESOURCE = re.compile(r"nvidia\.com/(gpu|mig-)|amd\.com/gpu|gpu\.intel\.com/|gpu\.(nvidia|amd|intel)\.com$")
_GPU_UUID = re.compile(r"(GPU|MIG)-")
_WHAT_TO_DO = {
    grpc.StatusCode.UNAVAILABLE: "is the socket mounted, and is this process running as root?",
    grpc.StatusCode.UNIMPLEMENTED: "the pod-resources API v1 needs Kubernetes 1.20 or later",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "it is queried too often; try again later",
}
_CHUNK_BYTES = 64 << 10


# Reads from the kubelet's pod-resources API (v1) which container of which pod has which GPU.
#
# The kubelet of a node answers on a Unix socket that only root can connect to; a daemon that is not root gets
# connections from the attach helper. The kubelet knows allocations that control groups and /proc do not show: those of
# a container that does not use its GPU yet.
# A device plug-in chooses the names of its devices. NVIDIA's uses the UUID (`GPU-…`, `MIG-…`), and `GPU-…::2` for one
# share of a GPU that several containers use in turn; other names (an index, `nvidia0`, a PCI address) are passed on
# unchanged. Devices of a resource claim (dynamic resource allocation) are `driver/pool/device`.
# Each request uses a new connection: requests are rare, and a persistent connection would have to be restored after
# each restart of the kubelet. The answer is a snapshot; the caller decides how long to rely on it.
class KubeletError(Exception):
    """The kubelet did not answer. The message names its socket and says why and what to do."""


@dataclass(frozen=True, slots=True, order=True)
class ContainerRef:
    """Identifies one container of a pod by names."""

    namespace: str
    pod: str
    container: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod}/{self.container}"


@dataclass(frozen=True, slots=True, order=True)
class HeldDevice:
    """A device allocated to a container. resource: that of the device plug-in, or the claim's driver."""

    resource: str
    id: str
    holder: ContainerRef

    @property
    def is_gpu(self) -> bool:
        """Whether a device is a GPU, by its resource or by an id that only GPUs have."""
        return bool(_GPU_RESOURCE.match(self.resource) or _GPU_UUID.match(self.id))


class KubeletClient:
    """Client of the kubelet on `socket`, or over the connection that `connect` returns (it may raise Unreachable)."""

    def __init__(
        self,
        socket: Path = SOCKET,
        *,
        deadline_s: float = DEADLINE_S,
        connect: Callable[[], Awaitable[sockets.socket]] | None = None,
    ) -> None:
        self._socket = socket
        self._deadline_s = deadline_s
        self._connect = connect

    async def devices(self) -> tuple[HeldDevice, ...]:
        """Every device that a container on this node holds, GPU or not. Raises KubeletError."""
        async with self._address() as address, grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
            ask = Stub(channel, pb.DESCRIPTOR.services_by_name["PodResourcesLister"]).List
            try:
                answer = await ask(pb.ListPodResourcesRequest(), timeout=self._deadline_s)
            except grpc.aio.AioRpcError as exc:
                raise KubeletError(self._text(exc)) from exc
        found = await asyncio.to_thread(lambda: tuple(itertools.islice(_devices(answer), MAX_DEVICES + 1)))
        if len(found) > MAX_DEVICES:
            raise KubeletError(f"{self._where()} lists more than {MAX_DEVICES} devices; is a device plug-in faulty?")
        return tuple(sorted(found))

    async def gpus(self) -> dict[str, tuple[ContainerRef, ...]]:
        """The GPU holders according to the kubelet. Raises KubeletError."""
        return gpu_holders(await self.devices())

    @contextlib.asynccontextmanager
    async def _address(self) -> AsyncIterator[str]:
        if self._connect is None:
            yield f"unix:{self._socket}"
            return
        try:
            connection = await self._connect()
        except HelperUnreachable as exc:
            raise KubeletError(
                f"the kubelet cannot be queried because no connection could be made through the attach helper: {exc}"
            ) from exc
        async with passage(connection) as address:
            yield address

    def _where(self) -> str:
        return f"the kubelet ({self._socket})" if self._connect is None else "the kubelet (through the attach helper)"

    def _text(self, exc: grpc.aio.AioRpcError) -> str:
        where = self._where()
        if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"{where} did not answer within {self._deadline_s:g} s"
        text = f"{where} cannot be queried: {clean(exc.details() or exc.code().name, 300)}"
        return f"{text}; {_WHAT_TO_DO[exc.code()]}" if exc.code() in _WHAT_TO_DO else text


def gpu_holders(devices: Iterable[HeldDevice]) -> dict[str, tuple[ContainerRef, ...]]:
    """The holders of each GPU, by UUID if the id contains one; several if the GPU is shared."""
    holders: dict[str, set[ContainerRef]] = {}
    for device in devices:
        if device.is_gpu:
            holders.setdefault(_SHARE.sub("", device.id), set()).add(device.holder)
    return {gpu: tuple(sorted(found)) for gpu, found in sorted(holders.items())}


def _devices(answer: pb.ListPodResourcesResponse) -> Iterable[HeldDevice]:
    for pod in answer.pod_resources:
        for container in pod.containers:
            holder = ContainerRef(_name(pod.namespace), _name(pod.name), _name(container.name))
            for group in container.devices:
                yield from (HeldDevice(_name(group.resource_name), _name(id), holder) for id in group.device_ids)
            for claim in container.dynamic_resources:
                for found in claim.claim_resources:
                    id = f"{found.driver_name}/{found.pool_name}/{found.device_name}"
                    yield HeldDevice(_name(found.driver_name), clean(id, 3 * _MAX_NAME_CHARS), holder)


def _name(text: str) -> str:
    return clean(text, _MAX_NAME_CHARS)


# Turns a connected socket into an address, because gRPC can connect only to addresses.
#
# Only root may connect to the kubelet's socket. The attach helper, which is root, connects and passes the connection
# on; it does not use gRPC, and this side needs no privileges. Here a socket with a random name in the abstract
# namespace accepts one connection from this very process and passes data both ways.
@contextlib.asynccontextmanager
async def passage(sock: socket.socket) -> AsyncIterator[str]:
    """A gRPC address that leads once to the other end of `sock`. Takes ownership of it. Raises OSError."""
    joined: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if joined or _pid(writer) != os.getpid():
            writer.close()
            return
        joined.add(task)
        await _join(reader, writer, *ends)

    try:
        ends = await asyncio.open_unix_connection(sock=sock)
    except BaseException:
        sock.close()
        raise
    name = f"kinetod-{secrets.token_hex(16)}"
    server = await asyncio.start_unix_server(accepted, path=f"\0{name}", backlog=1)
    try:
        yield f"unix-abstract:{name}"
    finally:
        server.close()
        for task in joined:
            task.cancel()
        await asyncio.gather(*joined, return_exceptions=True)
        ends[1].close()


def _pid(writer: asyncio.StreamWriter) -> int:
    return unix_peer.credentials(writer.get_extra_info("socket"))[0]


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Copies data both ways until both ends are done or one breaks."""
    try:
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))
    except OSError:
        pass
    finally:
        writer.close()
        far_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


log = logging.getLogger(__name__)

KEEP_S = 5.0
RETRY_S = 30.0  # after a failure
WAIT_S = 0.5  # lists of processes wait no longer for names
GPUS = Path("/proc/driver/nvidia/gpus")
Held = Mapping[str, Collection[ContainerRef]]  # by the GPU's UUID


class KubeletGpuHolders:
    """GPU holders according to the kubelet, at most KEEP_S old; empty, and logged, if it fails."""

    def __init__(self, ask: Callable[[], Awaitable[Held]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._asking: asyncio.Task[None] | None = None
        self._until = float("-inf")
        self._held: Held = {}
        self._problem = ""

    async def current(self, wait_s: float = WAIT_S) -> Held:
        """The current holders, or the last known ones if it does not answer in time. Use it on one loop only."""
        if self._clock() >= self._until and self._asking is None:
            self._asking = asyncio.create_task(self._refresh(), name="pod resources")
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=wait_s)
        return self._held

    async def _refresh(self) -> None:
        problem = ""
        try:
            self._held = await self._ask()
        except (KubeletError, OSError) as exc:
            self._held, problem = {}, str(exc)
        finally:
            self._asking = None
            self._until = self._clock() + (RETRY_S if problem else KEEP_S)
        if problem and problem != self._problem:
            log.warning("GPUs are shown without the pods that hold them: %s", problem)
        self._problem = problem

    def reader(self, loop: asyncio.AbstractEventLoop, deadline_s: float) -> Callable[[], Held]:
        """A function like `current` for threads other than the loop's."""

        def read() -> Held:
            asked = asyncio.run_coroutine_threadsafe(self.current(deadline_s), loop)
            with contextlib.suppress(TimeoutError):  # the loop itself is late
                return asked.result(2 * deadline_s)
            return {}

        return read


def matched(used: Mapping[Container, Collection[str]], held: Held) -> dict[Container, ContainerRef]:
    """Matches containers that use GPUs with those that the GPUs were allocated to, if only one can match."""
    possible = {container: _possible(gpus, held) for container, gpus in used.items()}
    found: dict[Container, ContainerRef] = {}
    while certain := {next(iter(refs)): each for each, refs in possible.items() if len(refs) == 1}:
        for ref, container in certain.items():
            claimed = [each for each, refs in possible.items() if refs == {ref}]
            if claimed == [container]:
                found[container] = ref
            for each in claimed:  # several that claim the same match count as none
                del possible[each]
        possible = {each: refs - certain.keys() for each, refs in possible.items()}
    return found


def _possible(gpus: Collection[str], held: Held) -> set[ContainerRef]:
    given = [set(held[gpu]) for gpu in gpus if held.get(gpu)]
    return set.intersection(*given) if given and len(given) == len(gpus) else set()


def called(ref: ContainerRef) -> Names:
    """The container's names as used in the metrics."""
    return Names(pod=ref.pod, namespace=ref.namespace, container=ref.container)


class PodNames:
    """Names processes by their containers. pods: (namespace, name) by UID from the API server, or None."""

    def __init__(
        self,
        holders: KubeletGpuHolders | None,
        pods: Callable[[], Awaitable[Mapping[str, tuple[str, str]]]] | None = None,
        *,
        gpus: Path = GPUS,
    ) -> None:
        self._holders = holders
        self._pods = pods
        self._gpus = gpus

    async def named(self, processes: Sequence[ProcessFacts]) -> list[ProcessFacts]:
        """The processes, with names if known."""
        names = await self._of(processes)
        return [replace(each, names=names[each.container]) if each.container in names else each for each in processes]

    async def _of(self, processes: Iterable[ProcessFacts]) -> dict[Container | None, Names]:
        minors: dict[Container, set[int]] = {}
        for facts in processes:
            if facts.container is not None and facts.container.pod_uid:
                minors.setdefault(facts.container, set()).update(facts.gpus)
        if not minors:
            return {}
        found: dict[Container | None, Names] = {}
        if self._pods is not None:
            pods: Mapping[str, tuple[str, str]] = {}
            with contextlib.suppress(ApiError, TimeoutError):
                pods = await asyncio.wait_for(self._pods(), WAIT_S)
            for container in minors:
                if container.pod_uid in pods:
                    namespace, name = pods[container.pod_uid]
                    found[container] = Names(pod=name, namespace=namespace)
        if self._holders is not None:
            held = await self._holders.current()
            uuids = await asyncio.to_thread(uuids_by_minor, self._gpus) if held else {}
            used = {each: {uuids.get(minor, "") for minor in group} for each, group in minors.items() if group}
            found |= {container: called(ref) for container, ref in matched(used, held).items()}
        return found


def uuids_by_minor(gpus: Path = GPUS) -> dict[int, str]:
    """The UUIDs of NVIDIA's GPUs according to its kernel driver. Blocks."""
    found = {}
    for path in gpus.glob("*/information"):
        with contextlib.suppress(OSError, ValueError):
            lines = path.read_text(errors="replace").splitlines()
            facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if "GPU UUID" in facts:
                found[int(facts.get("Device Minor", ""))] = facts["GPU UUID"]
    return found
