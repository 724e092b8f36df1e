"""A kubelet's pod-resources API: a real gRPC server on a Unix socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from kineto_protos.kubelet.v1 import pod_resources_pb2 as pb
from kineto_protos.services import add_to_server
from kinetod.kubernetes.pod_names import ContainerRef, KubeletClient

from support.waiting import scaled

LISTER = pb.DESCRIPTOR.services_by_name["PodResourcesLister"]
GPU_0, GPU_1 = "GPU-5f2c1c3e-8c5d-6d1f-0a55-4d7f0f0d5f10", "GPU-8a1b7f5e-1111-2222-3333-444455556666"
LLAMA = ContainerRef("training", "llama-0", "trainer")


@contextlib.asynccontextmanager
async def kubelet(socket: Path, answer: Callable[[Any], pb.ListPodResourcesResponse]) -> AsyncIterator[KubeletClient]:
    """A server on `socket` that answers with `answer(context)`, and its client."""

    class Lister:
        async def List(self, request: pb.ListPodResourcesRequest, context: Any) -> pb.ListPodResourcesResponse:
            found = answer(context)
            return await found if asyncio.iscoroutine(found) else found

    server = grpc.aio.server()
    add_to_server(Lister(), server, LISTER)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield KubeletClient(socket, deadline_s=scaled(20))
    finally:
        await server.stop(0)


def pod(holder: ContainerRef, resource: str, *ids: str) -> pb.PodResources:
    """A pod with one container that holds these devices."""
    devices = pb.ContainerDevices(resource_name=resource, device_ids=ids)
    container = pb.ContainerResources(name=holder.container, devices=[devices])
    return pb.PodResources(name=holder.pod, namespace=holder.namespace, containers=[container])


@contextlib.contextmanager
def running_kubelet(socket: Path, *pods: pb.PodResources) -> Iterator[None]:
    """A kubelet that serves in threads. Only root may connect, as to the real one."""

    class Lister:
        def List(self, request: pb.ListPodResourcesRequest, context: Any) -> pb.ListPodResourcesResponse:
            return pb.ListPodResourcesResponse(pod_resources=pods)

    socket.parent.mkdir(mode=0o750, parents=True)
    server = grpc.server(ThreadPoolExecutor(1))
    add_to_server(Lister(), server, LISTER)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()
