"""A libkineto that takes requests and writes what a test wants where it was told to, as the real one would."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.peers.libkineto import BUSY, FREE, Libkineto
from support.waiting import until

ANSWER_S = 2.0
POLL_PAUSE_S = 0.25  # the daemon looks at five datagrams of a process in a second
BASE_NS = 1_700_000_000_000_000_000


def polls_in(folder: str) -> dict[str, str]:
    """Settings of a daemon that answers polls in this folder and leaves network namespaces of other tests alone."""
    return {
        "KINETOD_DYNOLOG_IPC": "true",
        "KINETOD_DYNOLOG_CONTAINERS": "false",
        "KINETOD_DYNOLOG_SOCKET_DIRS": folder,
    }


def event(name: str, begin_us: float, length_us: float, **fields: Any) -> dict[str, Any]:
    """An operator as libkineto writes it."""
    own = {"ph": "X", "cat": "cpu_op", "pid": os.getpid(), "tid": os.getpid(), "ts": begin_us, "dur": length_us}
    return {**own, "name": name, "args": {"External id": 1, "Ev Idx": 0}, **fields}


def trace_text(trace_id: object, events: list[dict[str, Any]] | None = None) -> str:
    """A whole file, laid out as libkineto's."""
    now_us = (time.time_ns() - BASE_NS) / 1000
    rows = [event("aten::mm", now_us, 10.0), event("aten::add", now_us + 20, 5.0)] if events is None else events
    rows = [*rows, {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": now_us + 1000}]
    head = f'{{\n  "schemaVersion": 1,\n  "deviceProperties": [],\n  "trace_id": {json.dumps(str(trace_id))},\n'
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return (
        f'{head}  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": {BASE_NS},\n  "traceEvents": [\n  {lines}\n  ],\n'
        '  "traceName": "x.json"\n}\n'
    )


class OnDemandKineto:
    """This process as one whose libkineto polls."""

    def __init__(self, socket_dir: Path) -> None:
        self.client = Libkineto(socket_dir)
        self.request: Mapping[str, str] = {}

    def poll(self, wants: int = FREE) -> str:
        """Polls until it is answered, since the daemon leaves out those that come too fast. "": there is no request."""
        answer = until(lambda: self._answer(wants), "the poll is answered", 60, pause_s=POLL_PAUSE_S)
        return answer[0]

    def _answer(self, wants: int) -> tuple[str] | None:
        text = self.client.poll(wants, patience_s=ANSWER_S)
        return None if text is None else (text,)

    def take(self) -> Mapping[str, str]:
        """Polls until there is a request, and returns its keys."""
        text = until(self.poll, "there is a request", pause_s=POLL_PAUSE_S)
        self.request = dict(line.split("=", 1) for line in text.splitlines())
        return self.request

    def is_busy(self) -> None:
        """Tells that the profiler is armed or records."""
        assert self.poll(BUSY) == ""

    @property
    def path(self) -> Path:
        """Where the file of the request belongs."""
        return Path(self.request["ACTIVITIES_LOG_FILE"].replace(".json", f"_{os.getpid()}.json"))

    @property
    def temporary(self) -> Path:
        """What it is called until it is whole."""
        return self.path.with_name(f"{self.path.name}.tmp")

    def write(self, text: str | None = None) -> bytes:
        """Writes the file as libkineto does; returns its bytes."""
        data = (trace_text(self.request["REQUEST_TRACE_ID"]) if text is None else text).encode()
        self.temporary.write_bytes(data)
        self.temporary.rename(self.path)
        return data

    def close(self) -> None:
        """Closes the socket and removes what a test has left."""
        self.client.close()
        if self.request:
            self.path.unlink(missing_ok=True)
            self.temporary.unlink(missing_ok=True)


@contextmanager
def on_demand_kineto(socket_dir: Path) -> Iterator[OnDemandKineto]:
    """One that has polled, so that the daemon knows this process."""
    process = OnDemandKineto(socket_dir)
    try:
        assert process.poll() == ""
        yield process
    finally:
        process.close()
