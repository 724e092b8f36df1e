"""The kubelet through a connection that somebody else has made."""

import asyncio
import contextlib
import gc
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kineto_protos.kubelet.v1 import pod_resources_pb2 as pb
from kinetod.attach_helper.helper_client import HelperUnreachable
from kinetod.kubernetes.pod_resources import KubeletClient, KubeletError
from kinetod.kubernetes.socket_bridge import passage
from support.peers.kubelet import GPU_0, LLAMA, kubelet, pod
from support.waiting import until

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

    with pytest.raises(KubeletError, match=r"the kubelet \(through the attach helper\) cannot be asked"):
        asyncio.run(KubeletClient(connect=connect).gpus())


def test_a_helper_that_gives_no_connection_says_why() -> None:
    async def connect() -> socket.socket:
        raise HelperUnreachable("nobody is connected to the kubelet")

    with pytest.raises(KubeletError, match="the attach helper provides no connection: nobody is connected"):
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
