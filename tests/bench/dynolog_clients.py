"""The same request of a Dynolog client, recorded by kinetod's agent and by the process's own libkineto, side by side.

usage: dynolog_clients.py [--work launch,compute] [--trace-s 2] [--traces 5] [--dyno PROGRAM] [--json FILE]
                                                            (needs an NVIDIA GPU and torch)
       dynolog_clients.py --work cpu                        (anywhere)

One training loop is started with KINETO_USE_DAEMON=1, as for Dynolog. A request comes through the door for Dynolog's
clients, by an unmodified `dyno` if --dyno names one and else by the same bytes, and is carried out by each recorder in
turn, several times. Rows are medians, with all values of "lost" below them.
Columns: step = median step time in ms before the trace; during, after = median step time divided by that of before;
stall = longest step in ms from the request on; lost = seconds of training lost from the request until the file is
where the client has asked for it; first = s from the request to the first recorded activity; file = s from the request
to that file; size = that file in MB.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.overhead import AFTER_S, BEFORE_S, durations, end_loop, start_loop
from support.service.daemon import Daemon, running_daemon
from support.waiting import until

RECORDERS = ("agent", "kineto")
FILE_DEADLINE_S = 120.0
EVENTS_READ = 64 << 20  # bytes of the file that are searched for its first activity
_TIME = re.compile(r'"ph":\s*"X".{0,400}?"ts":\s*([0-9.]+)', re.DOTALL)
_BASE = re.compile(r'"baseTimeNanoseconds":\s*(\d+)')


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def request_trace(port: int, dyno: str | None, pid: int, log_file: Path, duration_ms: int) -> str:
    """Asks for a trace as `dyno gputrace` does; returns the reply. Raises RuntimeError if nobody was triggered."""
    if dyno is not None:
        command = [dyno, "--hostname", "127.0.0.1", "--port", str(port), "gputrace", "--pids", str(pid)]
        command += ["--duration-ms", str(duration_ms), "--log-file", str(log_file), "--fail-on-no-process"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"dyno ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout
    config = f"ACTIVITIES_LOG_FILE={log_file}\nPROFILE_START_TIME=0\nACTIVITIES_DURATION_MSECS={duration_ms}\n"
    asked = {"fn": "setKinetOnDemandRequest", "config": config, "job_id": 0, "pids": [pid], "process_limit": 3}
    body = json.dumps(asked).encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(struct.pack("=i", len(body)) + body)
        (length,) = struct.unpack("=i", connection.recv(4, socket.MSG_WAITALL))
        reply = json.loads(connection.recv(length, socket.MSG_WAITALL))
    if not reply["activityProfilersTriggered"]:
        raise RuntimeError(f"no process was triggered: {reply}")
    return json.dumps(reply)


def traced_file(log_file: Path, pid: int) -> Path:
    """Where the client finds the trace of this process."""
    return log_file.with_name(f"{log_file.stem}_{pid}{log_file.suffix}")


def first_activity_ns(trace: Path) -> int:
    """Unix time of the earliest complete event in the file. Raises RuntimeError if there is none."""
    with trace.open(errors="replace") as file:
        text = file.read(EVENTS_READ)
        file.seek(max(0, trace.stat().st_size - 4096))
        text_end = file.read()
    base = _BASE.search(text) or _BASE.search(text_end)
    times = [float(found) for found in _TIME.findall(text)]
    if not times:
        raise RuntimeError(f"{trace} has no activities")
    return int(min(times) * 1000) + (int(base.group(1)) if base is not None else 0)


def trace_once(options: argparse.Namespace, port: int, pid: int, log_file: Path) -> tuple[dict[str, int], int]:
    """Requests a trace and waits for its file: the points in time, and the size in bytes."""
    requested = time.time_ns()
    request_trace(port, options.dyno, pid, log_file, int(options.trace_s * 1000))
    trace = traced_file(log_file, pid)
    until(trace.exists, f"{trace}", FILE_DEADLINE_S)
    stored = time.time_ns()
    first = first_activity_ns(trace)
    marks = {"requested": requested, "first": first, "collected": first + int(options.trace_s * 1e9), "stored": stored}
    size = trace.stat().st_size
    trace.unlink()
    return marks, size


def figures(steps: Sequence[int], marks: dict[str, int], size_bytes: int) -> dict[str, float]:
    """The columns of the module's docstring."""
    logged = list(steps)
    quiet = durations(logged, marks["requested"] - 4_000_000_000, marks["requested"])
    before = statistics.median(quiet)
    during = durations(logged, marks["first"], marks["collected"])
    after = durations(logged, marks["stored"] + 1_000_000_000, logged[-1])
    return {
        "step_ms": before / 1e6,
        "during": statistics.median(during) / before if during else float("nan"),
        "after": statistics.median(after) / before if after else float("nan"),
        "stall_ms": max(durations(logged, marks["requested"], logged[-1])) / 1e6,
        "lost_s": sum(step - before for step in durations(logged, marks["requested"], marks["stored"])) / 1e9,
        "first_s": (marks["first"] - marks["requested"]) / 1e9,
        "file_s": (marks["stored"] - marks["requested"]) / 1e9,
        "size_mb": size_bytes / 1e6,
    }


def traced(options: argparse.Namespace, folder: Path, work: str, recorder: str) -> dict[str, Any]:
    """Traces one loop several times by one recorder: the medians of the figures, and all values of what was lost."""
    log, traces, port = folder / f"{work}-{recorder}.json", folder / "traces", free_port()
    traces.mkdir(exist_ok=True)
    settings = {
        "KINETOD_DYNOLOG_IPC": "true",
        "KINETOD_DYNOLOG_CONTAINERS": "false",
        "KINETOD_DYNOLOG_RPC": f"127.0.0.1:{port}",
        "KINETOD_DYNOLOG_TRACING": recorder,
        "KINETOD_DYNOLOG_LOG_ROOTS": str(traces),
    }
    with running_daemon(environ=settings) as daemon:
        environ = {**daemon.client_environ(), "KINETO_USE_DAEMON": "1"}
        loop = start_loop(environ, work, log, agent=False, extra=[])
        await_polling(daemon, loop.pid)
        captures = []
        for number in range(options.traces):
            time.sleep(BEFORE_S)
            captures.append(trace_once(options, port, loop.pid, traces / f"{number}.json"))
        time.sleep(AFTER_S)
        steps = end_loop(loop, log)["steps"]
    ends = [marks["requested"] for marks, _ in captures[1:]] + [steps[-1]]
    rows = [
        figures([step for step in steps if step <= end], marks, size)
        for (marks, size), end in zip(captures, ends, strict=True)
    ]
    result: dict[str, Any] = {column: statistics.median(row[column] for row in rows) for column in rows[0]}
    result["all lost_s"] = [round(row["lost_s"], 3) for row in rows]
    result["all during"] = [round(row["during"], 3) for row in rows]
    return result


def await_polling(daemon: Daemon, pid: int) -> None:
    """Waits until the daemon lists the process as one that polls."""

    def polls() -> bool:
        command = [sys.executable, "-m", "kinetoctl", "-o", "json", "ps", "--pid", str(pid)]
        done = subprocess.run(command, env=daemon.client_environ(), capture_output=True, text=True, check=True)
        return any("kineto" in process for process in json.loads(done.stdout))

    until(polls, "the first poll", pause_s=0.2)


def main() -> int:
    """Runs both recorders on every kind of work and prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", default="launch,compute")
    parser.add_argument("--trace-s", type=float, default=2.0)
    parser.add_argument("--traces", type=int, default=5)
    parser.add_argument("--dyno", help="an unmodified dyno; its requests' bytes are sent without it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    columns = ["step_ms", "during", "after", "stall_ms", "lost_s", "first_s", "file_s", "size_mb"]
    everything: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="kineto-") as folder:
        for work in options.work.split(","):
            rows = everything[work] = {each: traced(options, Path(folder), work, each) for each in RECORDERS}
            print(f"\n{work:<12}" + "".join(f"{column:>10}" for column in columns))
            for name, row in rows.items():
                print(f"{name:<12}" + "".join(f"{row[column]:>10.3f}" for column in columns))
            for name, row in rows.items():
                print(f"  {name}: lost {row['all lost_s']}, during {row['all during']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
