"""One kind of flood, as a program: hostile_floods.py KIND ADDRESS SECONDS. Prints the answers it got, as JSON.

calls        every method, with and without sense, as fast as answers come, on many connections
streams      watches of everything, and calls whose request never comes, as many as are let in, again and again
connections  connecting and hanging up, saying nothing, and saying nonsense
captures     captures of an own process, one after the other, pinned and checked, and fetched without being read
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from kineto_protos.v1 import profiler_pb2 as pb

PROFILER = "/kineto.v1.Profiler/"
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
CONNECTIONS = 24
AT_A_TIME = 24  # calls on each
# In each period there are floods for so long, of connections shorter: they keep out the captures of the same user.
PERIOD_S, FLOOD_S, CONNECTIONS_S = 40.0, 20.0, 5.0
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
ME = os.getpid()
CALLS: list[tuple[str, bytes]] = [
    (f"{PROFILER}GetHost", b""),
    (f"{PROFILER}GetClock", b""),
    (f"{PROFILER}ListProcesses", pb.ListProcessesRequest(include_without_agent=True).SerializeToString()),
    (f"{PROFILER}DiagnoseProcess", pb.DiagnoseProcessRequest(pid=ME).SerializeToString()),
    (f"{PROFILER}DiagnoseHost", b""),
    (f"{PROFILER}ListCaptures", pb.ListCapturesRequest(page_size=1000).SerializeToString()),
    (f"{PROFILER}GetCapture", pb.GetCaptureRequest(id="x" * 100_000).SerializeToString()),
    (f"{PROFILER}CreateCapture", b"\xff\xff"),
    (f"{PROFILER}PinCapture", pb.PinCaptureRequest(id="none").SerializeToString()),
    (f"{PROFILER}NoSuchMethod", b""),
    (f"{HEALTH}Check", b""),
    (f"{HEALTH}Check", health_pb2.HealthCheckRequest(service="nobody's").SerializeToString()),
    (REFLECTION, reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()),
    ("/no.such.Service/Method", b""),
]
WATCHES: list[tuple[str, bytes | None]] = [
    (f"{HEALTH}Watch", b""),
    (
        f"{PROFILER}WatchHost",
        pb.WatchHostRequest(interval_ns=5 * 10**8, include_without_agent=True).SerializeToString(),
    ),
    (f"{PROFILER}GetHost", None),
    (f"{PROFILER}WatchCapture", None),
    (REFLECTION, None),
]
# Without the capability to read everything, which this program may have: others would not be let into the process.
PLAIN_PYTHON = ["setpriv", "--inh-caps", "-all", "--ambient-caps", "-all", "/usr/bin/python3"]
found: Counter[str] = Counter()


async def call(channel: grpc.aio.Channel, path: str, request: bytes | None, timeout_s: float) -> None:
    """Makes one call and counts its outcome."""
    method: Any = channel.stream_stream(path)
    try:
        made = method(timeout=timeout_s)
        if request is not None:
            await made.write(request)
            await made.done_writing()
        async for _ in made:
            pass
        found["OK"] += 1
    except grpc.aio.AioRpcError as exc:
        found[exc.code().name] += 1
    except (grpc.aio.UsageError, asyncio.InvalidStateError, cygrpc.ExecuteBatchError):
        found["cut off"] += 1  # it was refused before its request was sent


async def flooding(seconds: float = FLOOD_S) -> None:
    """Waits for the part of a period in which floods run."""
    while time.monotonic() % PERIOD_S > seconds:
        await asyncio.sleep(0.1)


async def calls(address: str, end: float) -> None:
    async def one(channel: grpc.aio.Channel) -> None:
        while time.monotonic() < end:
            await flooding()
            path, request = random.choice(CALLS)
            await call(channel, path, request, 20)

    channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(CONNECTIONS)]
    await asyncio.gather(*(one(channel) for channel in channels for _ in range(AT_A_TIME)))


async def streams(address: str, end: float) -> None:
    async def one(channel: grpc.aio.Channel) -> None:
        while time.monotonic() < end:
            await flooding()
            path, request = random.choice(WATCHES)
            await call(channel, path, request, 5)

    channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(CONNECTIONS)]
    await asyncio.gather(*(one(channel) for channel in channels for _ in range(AT_A_TIME)))


async def connections(address: str, end: float) -> None:
    path = address.removeprefix("unix:")
    held: list[socket.socket] = []
    while time.monotonic() < end:
        await flooding(CONNECTIONS_S)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(path)
            found["connected"] += 1
            if (kind := found["connected"] % 4) == 0:
                sock.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 1000)
            elif kind == 1:
                sock.send(b"nonsense" * 1000)
            elif kind == 2:
                held.append(sock)
        except OSError as exc:
            found[type(exc).__name__] += 1
        if sock not in held[-1:]:
            sock.close()
        if len(held) > 500:
            for each in held:
                each.close()
            held.clear()
        if found.total() % 50 == 0:
            await asyncio.sleep(0.001)


async def captures(address: str, end: float) -> None:
    from support.agent.scripted_agent import RemoteAgent

    channel = grpc.aio.insecure_channel(address, options=OPTIONS)
    create: Any = channel.unary_unary(f"{PROFILER}CreateCapture", pb.CreateCaptureRequest.SerializeToString)
    agents = Path(address.removeprefix("unix:")).with_name("agent.sock")
    unread: list[Any] = []

    async def one(agent: RemoteAgent) -> None:
        agent.do("hello")
        spec = pb.CaptureSpec(selector=pb.Selector(pids=[agent.pid]), duration_ns=10**8, no_attach=True)
        while time.monotonic() < end:
            try:
                made = pb.Capture.FromString(await create(pb.CreateCaptureRequest(spec=spec), timeout=20))
            except grpc.aio.AioRpcError as exc:
                found[f"create {exc.code().name}"] += 1
                continue
            found["created"] += 1
            agent.tell("capture 4000")
            await asyncio.to_thread(agent.told)
            pin, verify = pb.PinCaptureRequest(id=made.id, pinned=True), pb.VerifyCaptureRequest(id=made.id)
            await call(channel, f"{PROFILER}PinCapture", pin.SerializeToString(), 9)
            await call(channel, f"{PROFILER}VerifyCapture", verify.SerializeToString(), 9)
            fetch: Any = channel.unary_stream(f"{PROFILER}FetchTrace", pb.FetchTraceRequest.SerializeToString)
            unread.append(fetch(pb.FetchTraceRequest(capture_id=made.id)))
            del unread[:-50]

    with contextlib.ExitStack() as stack:
        remote = [stack.enter_context(RemoteAgent(agents, python=PLAIN_PYTHON)) for _ in range(12)]
        await asyncio.gather(*(one(agent) for agent in remote))


def main() -> None:
    """Runs one kind of flood for the given time."""
    kind, address, seconds = sys.argv[1:]
    end = time.monotonic() + float(seconds)

    async def run() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(seconds) + 10):
                await globals()[kind](address, end)

    asyncio.run(run())
    print(json.dumps(found), flush=True)
    os._exit(0)  # calls under way are not waited for


if __name__ == "__main__":
    main()
