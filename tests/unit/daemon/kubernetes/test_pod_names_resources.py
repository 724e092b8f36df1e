"""The kubelet's pod-resources API, asked of a real gRPC server of the test's own."""

import asyncio
import contextlib
import gc
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from kineto_protos.kubelet.v1 import pod_resources_pb2 as pb
from kinetod.attach_helper.helper_client import HelperUnreachable
from kinetod.kubernetes import pod_names
from kinetod.kubernetes.pod_names import ContainerRef, HeldDevice, KubeletClient, KubeletError, passage
from support.peers.kubelet import GPU_0, GPU_1, LLAMA, kubelet, pod
from support.waiting import scaled, until

MIG = "MIG-0a55c0de-8c5d-6d1f-0a55-4d7f0f0d5f10"
SERVICE = "v1.PodResourcesLister"


def gpus_of(tmp_path: Path, *pods: pb.PodResources) -> dict[str, tuple[ContainerRef, ...]]:
    async def ask() -> dict[str, tuple[ContainerRef, ...]]:
        async with kubelet(tmp_path / "kubelet.sock", lambda _: pb.ListPodResourcesResponse(pod_resources=pods)) as it:
            return await it.gpus()

    return asyncio.run(ask())


def test_each_gpu_is_the_container_s_that_holds_it(tmp_path: Path) -> None:
    other = ContainerRef("training", "llama-1", "trainer")
    pods = (pod(other, "nvidia.com/gpu", GPU_1), pod(LLAMA, "nvidia.com/gpu", GPU_0))
    assert gpus_of(tmp_path, *pods) == {GPU_0: (LLAMA,), GPU_1: (other,)}


def test_a_mig_instance_is_a_gpu_of_its_own(tmp_path: Path) -> None:
    assert gpus_of(tmp_path, pod(LLAMA, "nvidia.com/mig-1g.10gb", MIG)) == {MIG: (LLAMA,)}


def test_a_gpu_in_shares_is_of_all_containers_that_have_one(tmp_path: Path) -> None:
    other = ContainerRef("notebooks", "ada", "jupyter")
    pods = (
        pod(LLAMA, "nvidia.com/gpu", f"{GPU_0}::0", f"{GPU_0}::3"),
        pod(other, "nvidia.com/gpu.shared", f"{GPU_0}::1"),
    )
    assert gpus_of(tmp_path, *pods) == {GPU_0: (other, LLAMA)}


def test_an_amd_gpu_keeps_the_name_that_its_plug_in_gives_it(tmp_path: Path) -> None:
    assert gpus_of(tmp_path, pod(LLAMA, "amd.com/gpu", "0000:03:00.0")) == {"0000:03:00.0": (LLAMA,)}


def test_a_uuid_is_a_gpu_s_whatever_the_resource_is_called(tmp_path: Path) -> None:
    assert gpus_of(tmp_path, pod(LLAMA, "example.com/fast", GPU_0)) == {GPU_0: (LLAMA,)}


def test_other_devices_are_no_gpus(tmp_path: Path) -> None:
    assert gpus_of(tmp_path, pod(LLAMA, "nvidia.com/hostdev", "0000:1a:00.1"), pod(LLAMA, "rdma/hca", "7")) == {}


def test_a_claimed_gpu_is_driver_pool_and_device(tmp_path: Path) -> None:
    claim = pb.ClaimResource(driver_name="gpu.nvidia.com", pool_name="node-7", device_name="gpu-3")
    dynamic = pb.DynamicResource(claim_name="four", claim_namespace="training", claim_resources=[claim])
    container = pb.ContainerResources(name=LLAMA.container, dynamic_resources=[dynamic])
    claimed = pb.PodResources(name=LLAMA.pod, namespace=LLAMA.namespace, containers=[container])
    assert gpus_of(tmp_path, claimed) == {"gpu.nvidia.com/node-7/gpu-3": (LLAMA,)}


def test_what_a_newer_kubelet_says_besides_is_passed_over(tmp_path: Path) -> None:
    """Bytes as the kubelet's own API has them, with CPUs, memory and NUMA nodes, which are not in our file."""

    def field(number: int, payload: bytes) -> bytes:
        return bytes([number << 3 | 2, len(payload)]) + payload

    topology = field(1, b"\x08\x01")
    devices = field(1, b"nvidia.com/gpu") + field(2, GPU_0.encode()) + field(3, topology)
    container = field(1, b"trainer") + field(2, devices) + field(3, b"\x01\x02") + field(4, field(1, b"memory"))
    said = field(1, field(1, b"llama-0") + field(2, b"training") + field(3, container) + field(4, b"\x07"))

    async def ask() -> tuple[HeldDevice, ...]:
        server = grpc.aio.server()
        handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: said)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"List": handler}),))
        server.add_insecure_port(f"unix:{tmp_path}/kubelet.sock")
        await server.start()
        try:
            return await KubeletClient(tmp_path / "kubelet.sock", deadline_s=scaled(20)).devices()
        finally:
            await server.stop(0)

    assert asyncio.run(ask()) == (HeldDevice("nvidia.com/gpu", GPU_0, LLAMA),)


def test_an_answer_beyond_grpc_s_usual_limit_is_taken(tmp_path: Path) -> None:
    many = (
        pod(ContainerRef("n", f"p{at}", "c"), "nvidia.com/gpu", *(f"GPU-{at}-{i:0200d}" for i in range(250)))
        for at in range(100)
    )
    assert len(gpus_of(tmp_path, *many)) == 25_000


def failure(tmp_path: Path, answer: Callable[[Any], Any], deadline_s: float | None = None) -> str:
    within_s = scaled(20) if deadline_s is None else deadline_s

    async def ask() -> str:
        async with kubelet(tmp_path / "kubelet.sock", answer):
            with pytest.raises(KubeletError) as raised:
                await KubeletClient(tmp_path / "kubelet.sock", deadline_s=within_s).devices()
            return str(raised.value)

    return asyncio.run(ask()).replace(str(tmp_path), "TMP")


def test_an_answer_of_very_many_devices_is_refused_before_it_takes_the_loop_s_time(tmp_path: Path) -> None:
    ids = [f"{number:x}" for number in range(pod_names.MAX_DEVICES + 1)]
    with pytest.raises(KubeletError, match="lists more than 50000 devices; is a device plug-in faulty"):
        gpus_of(tmp_path, pod(LLAMA, "nvidia.com/gpu", *ids))


def test_a_kubelet_that_is_asked_too_often_is_said(tmp_path: Path) -> None:
    async def refuse(context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")

    assert failure(tmp_path, refuse) == (
        "the kubelet (TMP/kubelet.sock) cannot be queried: rejected by rate limit; it is queried too often; "
        "try again later"
    )


def test_a_silent_kubelet_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    async def never(context: Any) -> None:
        await asyncio.get_running_loop().create_future()

    assert failure(tmp_path, never, deadline_s=0.2) == "the kubelet (TMP/kubelet.sock) did not answer within 0.2 s"


def test_without_a_kubelet_the_text_names_the_socket_and_what_to_look_at(tmp_path: Path) -> None:
    advice = "is the socket mounted, and is this process running as root"
    with pytest.raises(KubeletError, match=rf"nowhere\.sock\) cannot be queried: .*{advice}"):
        asyncio.run(KubeletClient(tmp_path / "nowhere.sock").devices())


def give(answer: pb.ListPodResourcesResponse, context: Any) -> pb.ListPodResourcesResponse:
    return answer


def test_a_kubelet_that_was_started_again_is_asked_without_more_ado(tmp_path: Path) -> None:
    client = KubeletClient(tmp_path / "kubelet.sock", deadline_s=scaled(20))

    async def ask() -> list[int]:
        counts = []
        for held in ((), (GPU_0,)):
            answer = pb.ListPodResourcesResponse(pod_resources=[pod(LLAMA, "nvidia.com/gpu", *held)])
            async with kubelet(tmp_path / "kubelet.sock", partial(give, answer)):
                counts.append(len(await client.gpus()))
            with pytest.raises(KubeletError):
                await client.gpus()
        return counts

    assert asyncio.run(ask()) == [0, 1]


def fields() -> Iterator[tuple[str, int]]:
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            yield f"{message.name}.{field.name}", field.number


def test_the_field_numbers_are_the_kubelet_s() -> None:
    """As in kubernetes/kubelet, pkg/apis/podresources/v1/api.proto."""
    assert dict(fields()) == {
        "ListPodResourcesResponse.pod_resources": 1,
        "PodResources.name": 1,
        "PodResources.namespace": 2,
        "PodResources.containers": 3,
        "ContainerResources.name": 1,
        "ContainerResources.devices": 2,
        "ContainerResources.dynamic_resources": 5,
        "ContainerDevices.resource_name": 1,
        "ContainerDevices.device_ids": 2,
        "DynamicResource.claim_name": 2,
        "DynamicResource.claim_namespace": 3,
        "DynamicResource.claim_resources": 4,
        "ClaimResource.cdi_devices": 1,
        "ClaimResource.driver_name": 2,
        "ClaimResource.pool_name": 3,
        "ClaimResource.device_name": 4,
        "CDIDevice.name": 1,
    }
    assert pb.DESCRIPTOR.services_by_name["PodResourcesLister"].full_name == "v1.PodResourcesLister"


ANSWER = pb.ListPodResourcesResponse(pod_resources=[pod(LLAMA, "nvidia.com/gpu", GPU_0)])


def open_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_kubelet_is_asked_over_a_connection_that_the_helper_has_made(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.sock"

    async def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(path))
        sock.setblocking(False)
        return sock

    async def ask() -> list[object]:
        async with kubelet(path, lambda _: ANSWER):
            client = KubeletClient(tmp_path / "nowhere", connect=connect)
            return [await client.gpus() for _ in range(3)]

    before = open_descriptors()
    assert asyncio.run(ask()) == [{GPU_0: (LLAMA,)}] * 3
    # gRPC keeps one, and closes the others on threads of its own; a stream that was cut off is closed with its garbage.
    until(lambda: open_descriptors() <= before + 1, "the connections to be closed")


def test_a_kubelet_that_hangs_up_is_said() -> None:
    async def connect() -> socket.socket:
        near, far = socket.socketpair()
        far.close()
        return near

    with pytest.raises(KubeletError, match=r"the kubelet \(through the attach helper\) cannot be queried"):
        asyncio.run(KubeletClient(connect=connect).gpus())


def test_a_helper_that_gives_no_connection_says_why() -> None:
    async def connect() -> socket.socket:
        raise HelperUnreachable("nobody is connected to the kubelet")

    with pytest.raises(
        KubeletError, match="no connection could be made through the attach helper: nobody is connected"
    ):
        asyncio.run(KubeletClient(connect=connect).gpus())


STRANGER = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + sys.argv[1])
sock.sendall(b"x")
print(sock.recv(1))
"""


def test_another_process_that_has_found_the_name_gets_nowhere() -> None:
    async def look() -> tuple[str, bytes]:
        near, far = socket.socketpair()
        far.setblocking(False)
        with far:
            async with passage(near) as address:
                name = address.removeprefix("unix-abstract:")
                command = [sys.executable, "-c", STRANGER, name]
                done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
            received = b""
            with contextlib.suppress(BlockingIOError):  # nothing came, and the end has not been closed yet
                received = far.recv(1)
            return done.stdout + done.stderr, received

    said, received = asyncio.run(look())
    assert ("b''" in said or "ConnectionResetError" in said or "BrokenPipe" in said) and received == b""
