"""What a cluster answers: the API server in JSON, the kubelet in protobuf, Slurm in lines."""

from collections.abc import Iterator

from google.protobuf.message import DecodeError
from kineto_protos.kubelet.v1 import pod_resources_pb2 as pb
from kinetoctl.client import slurm
from kinetoctl.errors import CliError
from kinetod.kubernetes import pod_names
from kinetod.kubernetes.api_server import ApiError, ApiServer, Exchange, NodePods, Reviews, User
from kinetod.kubernetes.pod_names import called, matched

from fuzz import event_loop


class Answering(ApiServer):
    """Says always the same."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 1))
        self.said = b""

    def _call(
        self, exchange: Exchange, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        return 200, self.said


_server = Answering()


def play(data: bytes) -> None:
    kind, said = data[:1], data[1:]
    if kind == b"k":
        _kubelet(said)
    elif kind == b"s":
        _slurm(said.decode("utf-8", "replace"))
    else:
        _server.said = said
        event_loop.run(_api(kind))


async def _api(kind: bytes) -> None:
    try:
        if kind == b"p":
            found = await NodePods(_server, "node").current()
            assert all(isinstance(text, str) for names in found.values() for text in names)
        elif kind == b"t":
            user = await Reviews(_server).user("token")
            assert user is None or user.name
        else:
            await Reviews(_server).may_exec(User("ada"), "ns", "pod")
    except ApiError as exc:
        assert len(str(exc)) < 4000


def _kubelet(said: bytes) -> None:
    try:
        answer = pb.ListPodResourcesResponse.FromString(said)
    except DecodeError:
        return
    holders = pod_names.gpu_holders(sorted(pod_names._devices(answer)))
    matched({}, holders)
    for refs in holders.values():
        assert all(called(ref).pod.isprintable() for ref in refs)


def _slurm(said: str) -> None:
    job = slurm.parse_slurm_job("42_3.0" if said[:1] == "_" else "42")
    answers = iter(said.split("\x01"))
    try:
        slurm.expand(job, run=lambda _command: next(answers, ""))
        slurm.node_addresses(["n1"], run=lambda _command: said)
    except CliError as exc:
        assert len(str(exc)) < 100_000


def seeds() -> Iterator[bytes]:
    """Good answers."""
    yield b'p{"items":[{"metadata":{"uid":"8f2c1d3e-1111-2222-3333-123456789012","namespace":"ml","name":"llama-0"}}]}'
    yield b't{"status":{"authenticated":true,"user":{"username":"ada","uid":"7","groups":["a"],"extra":{"s":["x"]}}}}'
    yield b'a{"status":{"allowed":true,"denied":false,"reason":""}}'
    devices = pb.ContainerDevices(resource_name="nvidia.com/gpu", device_ids=["GPU-1::2", "GPU-2"])
    container = pb.ContainerResources(name="c", devices=[devices])
    pod = pb.PodResources(name="p", namespace="n", containers=[container])
    yield b"k" + pb.ListPodResourcesResponse(pod_resources=[pod]).SerializeToString()
    yield b"s42|42|RUNNING|1000|ada|n[1-3,7]|None\n\x01n1\nn2\nn3\nn7\n"
    yield b"s_43|42_3|RUNNING|1000|ada|n1|None\n44|42_[4-9]|PENDING|1000|ada||Priority\n\x0142_3.0|n1\n"
    yield b"sNodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=n1 \n"
