"""Program: one user floods the door until its standard input ends: flood.py HOST:PORT. Says "ready", then its counts.

hang_up     connects and hangs up          silent     holds connections without a word
status      asks for the status            nonsense   sends what no client of Dynolog sends
trace       asks for traces of its own process with 4096 pids
"""

import contextlib
import json
import os
import random
import socket
import struct
import sys
import threading
from collections import Counter

WORKERS = 4  # of each kind
TIMEOUT_S = 10


def framed(body: bytes) -> bytes:
    """A request in its frame."""
    return struct.pack("=i", len(body)) + body


STATUS = framed(b'{"fn":"getStatus"}')
_PIDS = [os.getpid(), *range(2**22 - 4095, 2**22)]
TRACE = framed(json.dumps({"fn": "setKinetOnDemandRequest", "config": "", "pids": _PIDS}).encode())


class Flood:
    """What is done, and how often."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._over = threading.Event()
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Until standard input ends."""
        kinds = (self._hang_up, self._silent, self._status, self._nonsense, self._trace)
        threads = [threading.Thread(target=self._again, args=(kind,)) for kind in kinds for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()
        self._over.set()
        for thread in threads:
            thread.join()

    def _again(self, kind: object) -> None:
        assert callable(kind)
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                kind()

    def _connected(self) -> socket.socket:
        return socket.create_connection(self._address, TIMEOUT_S)

    def _sent(self, name: str, data: bytes) -> None:
        with self._connected() as sock:
            sock.sendall(data)
            self.counts[f"{name} answered" if sock.recv(4096) else f"{name} closed"] += 1

    def _hang_up(self) -> None:
        self._connected().close()
        self.counts["hang_up"] += 1

    def _silent(self) -> None:
        held = []
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for _ in range(64):
                held.append(stack.enter_context(self._connected()))
            self._over.wait(1)
        self.counts["silent"] += len(held)

    def _status(self) -> None:
        self._sent("status", STATUS)

    def _nonsense(self) -> None:
        self._sent("nonsense", random.choice((b"GET / HTTP/1.1\r\n\r\n", random.randbytes(300), b"\0" * 4)))

    def _trace(self) -> None:
        self._sent("trace", TRACE)


if __name__ == "__main__":
    host, _, port = sys.argv[1].rpartition(":")
    flood = Flood(host, int(port))
    flood.run()
    sys.stdout.write(json.dumps(flood.counts) + "\n")
