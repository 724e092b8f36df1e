"""A user of this host who takes as much from a daemon as it gives.

with Hostile(61001, daemon.address) as ada:
    assert ada.do("hold_health", connections=10, streams=100)["refused"] == 900

Each action runs in a process of that user, and keeps what it holds until the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from kineto_protos.v1 import profiler_pb2 as pb
from support.waiting import scaled

TIMEOUT_S = 60
SETTLE_S = 5.0  # what is not answered by then waits in the client
QUIET_S = 1.0  # or once nothing more has been answered for so long
HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
PROFILER = "/kineto.v1.Profiler/"


class Hostile:
    """The process, as its parent sees it. uid: None for the user of the test itself."""

    def __init__(self, uid: int | None, address: str) -> None:
        capability = "-all,+dac_read_search"  # Python may lie in a folder of root
        rights = ("--inh-caps", capability, "--ambient-caps", capability)
        prefix = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *rights] if uid else []
        self._process = subprocess.Popen(
            [*prefix, sys.executable, __file__, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": ":".join(filter(None, sys.path)), "GRPC_VERBOSITY": "NONE"},
        )

    def do(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Carries out an action. Returns its outcome."""
        self.tell(action, **arguments)
        return self.told()

    def tell(self, action: str, **arguments: Any) -> None:
        """Begins an action without waiting for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": action, **arguments}) + "\n")
        self._process.stdin.flush()

    def told(self) -> dict[str, Any]:
        """Waits for the action that was begun. Returns its outcome."""
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.stdout.close()


class _Attack:
    """Actions. Each returns how many calls went on and how many were refused, by the answer that they got."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channels: list[grpc.Channel] = []
        self._calls: list[Any] = []  # a call that nobody refers to is cancelled

    def channel(self) -> grpc.Channel:
        """Opens a new connection, shared with no other channel."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        self._channels.append(grpc.insecure_channel(self._address, options=options))
        return self._channels[-1]

    def hold_health(self, connections: int, streams: int) -> Counter[str]:
        """Health watches, which never end by themselves."""
        request = health_pb2.HealthCheckRequest().SerializeToString()
        return self._hold(HEALTH_WATCH, request, connections, streams)

    def hold_watches(self, count: int) -> Counter[str]:
        """Holds as many calls of WatchHost as the daemon admits."""
        return self._hold(f"{PROFILER}WatchHost", pb.WatchHostRequest().SerializeToString(), 1, count)

    def hold_silent(self, connections: int, streams: int) -> Counter[str]:
        """Holds calls whose request never comes."""
        return self._hold(f"{PROFILER}GetHost", None, connections, streams)

    def _hold(self, path: str, request: bytes | None, connections: int, streams: int) -> Counter[str]:
        never = threading.Event()

        def requests() -> Any:
            if request is None:
                never.wait()
            yield request

        found: Counter[str] = Counter()
        threads = []
        for _ in range(connections):
            method: Any = self.channel().stream_stream(path)
            for _ in range(streams):
                call = method(requests(), timeout=600)
                self._calls.append(call)

                def first(call: Any = call) -> None:
                    try:
                        next(call)
                        found["held"] += 1
                    except grpc.RpcError as exc:
                        found[exc.code().name] += 1
                    except StopIteration:
                        found["ended"] += 1

                threads.append(threading.Thread(target=first, daemon=True))
                threads[-1].start()
        end, seen = time.monotonic() + scaled(SETTLE_S), 0
        while found.total() > seen or (not seen and time.monotonic() < end):
            seen, quiet = found.total(), time.monotonic() + scaled(QUIET_S)
            for thread in threads:
                thread.join(max(0.0, min(end, quiet) - time.monotonic()))
        return found

    def burst(self, connections: int, streams: int) -> Counter[str]:
        """Makes that many calls at once, again and again."""
        found: Counter[str] = Counter()
        methods: list[Any] = [self.channel().unary_unary(f"{PROFILER}GetClock") for _ in range(connections)]
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            for call in [method.future(b"", timeout=SETTLE_S) for method in methods for _ in range(streams)]:
                try:
                    call.result()
                    found["OK"] += 1
                except grpc.RpcError as exc:
                    found[exc.code().name] += 1
        return found

    def check(self, count: int) -> Counter[str]:
        """Makes health checks, one after the other."""
        found: Counter[str] = Counter()
        method: Any = self.channel().unary_unary(HEALTH_CHECK)
        for _ in range(count):
            try:
                method(b"", timeout=TIMEOUT_S)
                found["OK"] += 1
            except grpc.RpcError as exc:
                found[exc.code().name] += 1
        return found


def main() -> None:
    """Takes actions from standard input."""
    attack = _Attack(sys.argv[1])
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(attack, asked.pop("do"))(**asked)), flush=True)
    os._exit(0)  # some threads of gRPC wait for requests that never come


if __name__ == "__main__":
    main()
