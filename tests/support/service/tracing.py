"""`kinetoctl trace` around what a program does meanwhile: it ends when that is done, however long it takes."""

import gzip
import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from support.service.cli import kinetoctl
from support.service.daemon import Daemon
from support.waiting import scaled

LONGEST = "10min"
T = TypeVar("T")


def trace_around(
    daemon: Daemon, pid: int, folder: Path, action: Callable[[], T], *arguments: str
) -> tuple[Any, T | None]:
    """The only target of the trace, and what the action gave. The action is left out where nothing is recorded."""
    command = kinetoctl("trace", "--pid", str(pid), "--duration", LONGEST, "-o", "json", *arguments)
    folder.mkdir(parents=True, exist_ok=True)
    told: T | None = None
    with subprocess.Popen(
        command, env=daemon.client_environ(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as tracer:
        assert tracer.stderr is not None
        for line in tracer.stderr:
            if "COLLECT" in line:
                told = action()
                tracer.send_signal(signal.SIGINT)  # stops the capture and keeps what was recorded
                break
        out, err = tracer.communicate(timeout=scaled(120))
    assert out, err
    (target,) = json.loads(out)["targets"]
    return target, told


def trace_events(folder: Path) -> list[dict[str, Any]]:
    """All events of the only trace file in a folder."""
    (path,) = folder.glob("*.json.gz")
    with gzip.open(path, "rt") as stream:
        loaded: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return loaded
