"""Which container of which pod has which GPU, according to the kubelet's pod-resources API (v1).

Theory of operation
    The kubelet of a node answers on a Unix socket that only root can connect to; a daemon that is not root gets
    connections from the attach helper. The kubelet knows what it gave to whom even where control groups and /proc say
    nothing: for a container that holds a GPU but does not use it yet.

    A device plug-in names its devices as it likes. NVIDIA's says the UUID (`GPU-…`, `MIG-…`), and `GPU-…::2` for one
    of the shares of a GPU that several containers have in turn; other ways of naming (an index, `nvidia0`, a PCI
    address) are handed on as they are. Devices of a resource claim (dynamic resource allocation) are
    `driver/pool/device`.

    Each request uses a new connection: requests are rare, and a persistent connection would have to be restored after
    each restart of the kubelet. The answer holds for the moment; the caller decides how long to rely on it.
"""

import asyncio
import contextlib
import itertools
import re
import socket as sockets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from kineto_protos.kubelet.v1 import pod_resources_pb2 as pb
from kineto_protos.kubelet.v1.pod_resources_pb2_grpc import PodResourcesListerStub

from kinetod.attach_helper.helper_client import HelperUnreachable
from kinetod.base.safe_text import clean
from kinetod.kubernetes.socket_bridge import passage

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
DEADLINE_S = 5.0
MAX_DEVICES = 50_000  # of one node: with 8 GPUs in 48 shares each, 384; more would take the event loop's time
_MAX_ANSWER_BYTES = 16 << 20  # what the kubelet's own clients allow; gRPC's 4 MiB are few for a node of many pods
_MAX_NAME_CHARS = 253  # of a pod, by Kubernetes' rules; of devices, enough
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_ANSWER_BYTES),
    # else it is the socket's path in percent signs, which servers in Go refuse
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
    # else the pauses between attempts of an earlier connection hold for this one too
    ("grpc.use_local_subchannel_pool", 1),
)
_SHARE = re.compile(r"::\d+$")
_GPU_RESOURCE = re.compile(r"nvidia\.com/(gpu|mig-)|amd\.com/gpu|gpu\.intel\.com/|gpu\.(nvidia|amd|intel)\.com$")
_GPU_UUID = re.compile(r"(GPU|MIG)-")
_WHAT_TO_DO = {
    grpc.StatusCode.UNAVAILABLE: "is it mounted, and does this process run as root?",
    grpc.StatusCode.UNIMPLEMENTED: "the pod-resources API v1 needs Kubernetes 1.20 or later",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "it is asked too often; try again later",
}


class KubeletError(Exception):
    """The kubelet did not answer. The text names its socket and says why and what to do."""


@dataclass(frozen=True, slots=True, order=True)
class ContainerRef:
    """One container of a pod, by names."""

    namespace: str
    pod: str
    container: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod}/{self.container}"


@dataclass(frozen=True, slots=True, order=True)
class HeldDevice:
    """A device that the kubelet gave to a container. resource: that of the device plug-in, or the claim's driver."""

    resource: str
    id: str
    holder: ContainerRef

    @property
    def is_gpu(self) -> bool:
        """Whether a device is a GPU, by its resource or by an id that only GPUs have."""
        return bool(_GPU_RESOURCE.match(self.resource) or _GPU_UUID.match(self.id))


class KubeletClient:
    """Asks the kubelet on `socket`, or at the other end of what `connect` returns (it may raise Unreachable)."""

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
            ask = PodResourcesListerStub(channel).List  # type: ignore[no-untyped-call]
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
                f"the kubelet cannot be asked, because the attach helper provides no connection: {exc}"
            ) from exc
        async with passage(connection) as address:
            yield address

    def _where(self) -> str:
        return f"the kubelet ({self._socket})" if self._connect is None else "the kubelet (through the attach helper)"

    def _text(self, exc: grpc.aio.AioRpcError) -> str:
        where = self._where()
        if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"{where} did not answer within {self._deadline_s:g} s"
        text = f"{where} cannot be asked: {clean(exc.details() or exc.code().name, 300)}"
        return f"{text}; {_WHAT_TO_DO[exc.code()]}" if exc.code() in _WHAT_TO_DO else text


def gpu_holders(devices: Iterable[HeldDevice]) -> dict[str, tuple[ContainerRef, ...]]:
    """The holders of each GPU, by UUID if it is named by one; several if the GPU is shared."""
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
