"""Requests to the libkineto of unmodified torch: many in a row, and many processes at once. Nothing may be lost.

    python tests/campaign/kineto_recorder.py [--requests 50] [--processes 64] [--python PYTHON] [--device cuda]

PYTHON runs the programs, so that another version of torch can be tried; it needs torch and nothing of kinetod. By turns
a duration, iterations, shapes and every call are asked for. Each trace must be whole, repeat its own number and hold
operators, on a GPU kernels too; by iteration, exactly the steps that were asked for. Prints figures, and each verdict
that is not DONE; the exit status is 1 if there is one.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.peers.on_demand_kineto import polls_in
from support.service.daemon import Daemon, running_daemon, watch_to_end
from support.waiting import until

SCRIPT = Path(__file__).parents[1] / "support/targets/polling_training.py"
SECOND_NS = 10**9
STEPS = 5
IMPORTING_AT_ONCE = 8
IMPORT_S = 300.0
CAPTURE_S = 300.0
LOOK_PAUSE_S = 0.5
KINDS: tuple[dict[str, Any], ...] = (
    {"duration_ns": SECOND_NS // 5},
    {"iterations": pb.IterationWindow(count=STEPS)},
    {"duration_ns": SECOND_NS // 2, "options": pb.Options(record_shapes=True)},
    {"iterations": pb.IterationWindow(count=STEPS), "options": pb.Options(with_stack=True, stack_trace=True)},
)
LONG = {"duration_ns": 5 * SECOND_NS}  # a window in which each of many processes gets a turn on few cores


@dataclass
class Findings:
    """What has become of the requests. latency_s: from the request to the verdict."""

    device: str
    verdicts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    trace_ids: set[str] = field(default_factory=set)

    def note(self, stub: ProfilerStub, capture: pb.Capture, *, by_iteration: bool) -> None:
        """Looks at all targets of a capture that has ended."""
        for target in capture.targets:
            name = pb.Verdict.Name(target.verdict).removeprefix("VERDICT_")
            self.verdicts[f"{name} {target.reason_code}".strip()] += 1
            if target.verdict != pb.VERDICT_DONE:
                self.problems.append(f"process {target.pid}: {name} {target.reason_code}: {target.reason}")
                continue
            self.latency_s.append((target.state_since_ns - target.requested_ns) / 1e9)
            if problem := self._problem(stub, capture, target, by_iteration=by_iteration):
                self.problems.append(f"process {target.pid}: {problem}")

    def _problem(self, stub: ProfilerStub, capture: pb.Capture, target: pb.Target, *, by_iteration: bool) -> str:
        request = pb.FetchTraceRequest(capture_id=capture.id, pid=target.pid, format="chrome-json")
        trace = json.loads(b"".join(chunk.data for chunk in stub.FetchTrace(request, timeout=60)))
        if trace["trace_id"] in self.trace_ids:
            return f"the trace {trace['trace_id']} came twice"
        self.trace_ids.add(trace["trace_id"])
        names = [row["name"] for row in trace["traceEvents"] if row.get("cat") in ("cpu_op", "user_annotation")]
        steps = sum("Optimizer.step" in name for name in names)
        if by_iteration and steps != STEPS:
            return f"{steps} steps instead of {STEPS}"
        if "aten::addmm" not in names:
            return "no operators"
        kernels = sum(row.get("cat") == "kernel" for row in trace["traceEvents"])
        return "no kernels" if self.device != "cpu" and not kernels else ""

    def __str__(self) -> str:
        verdicts = ", ".join(f"{count} {name}" for name, count in self.verdicts.most_common())
        if not self.latency_s:
            return verdicts
        spread = f"median {statistics.median(self.latency_s):.1f} s, longest {max(self.latency_s):.1f} s"
        return f"{verdicts}; from the request to the stored trace {spread}"


@contextlib.contextmanager
def programs(python: str, device: str, folder: Path, count: int, daemon: Daemon) -> Iterator[list[int]]:
    """Pids of so many programs, all of which train and poll."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("KINETO", "PYTHONPATH"))}
    environ = {**own, "KINETO_USE_DAEMON": "1", "KINETO_IPC_SOCKET_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [python, "-P", str(SCRIPT), "steps", "0.2" if count > 1 else "0.01", device]
    with contextlib.ExitStack() as stack:
        running: list[subprocess.Popen[bytes]] = []
        for begin in range(0, count, IMPORTING_AT_ONCE):
            batch = []
            for _ in range(min(IMPORTING_AT_ONCE, count - begin)):
                process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                batch.append(stack.enter_context(process))
                stack.callback(process.kill)
            for process in batch:
                assert process.stdout is not None
                assert [process.stdout.readline() for _ in range(2)] == [b"importing\n", b"training\n"]
            running += batch
            print(f"{len(running)} of {count} programs train", flush=True)
        pids = [process.pid for process in running]
        until(lambda: polling(daemon.stub()) >= set(pids), "all poll", IMPORT_S, pause_s=LOOK_PAUSE_S)
        yield pids


def polling(stub: ProfilerStub) -> set[int]:
    """The processes that poll."""
    found = stub.ListProcesses(pb.ListProcessesRequest(include_without_agent=True), timeout=60).processes
    return {process.pid for process in found if process.HasField("kineto")}


def captured(stub: ProfilerStub, pids: Sequence[int], kind: dict[str, Any]) -> pb.Capture:
    """A capture of these processes that has ended."""
    selector = pb.Selector(pids=pids)
    spec = pb.CaptureSpec(selector=selector, recorder=pb.RECORDER_KINETO, formats=["chrome-json"], **kind)
    capture = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=60)
    return watch_to_end(stub, capture.id, CAPTURE_S)


def main() -> int:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--device", default="cpu", help="where the programs train, as torch names it")
    asked = parser.parse_args()
    row, together = Findings(asked.device), Findings(asked.device)
    with tempfile.TemporaryDirectory(prefix="dynolog-") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        settings = polls_in(name)
        with running_daemon(environ=settings) as daemon:
            stub = daemon.stub()
            if asked.requests:
                with programs(asked.python, asked.device, folder, 1, daemon) as pids:
                    began = time.monotonic()
                    for number in range(asked.requests):
                        kind = KINDS[number % len(KINDS)]
                        row.note(stub, captured(stub, pids, kind), by_iteration="iterations" in kind)
                    took = time.monotonic() - began
                print(f"{asked.requests} requests in a row: {row}; {took:.0f} s in all", flush=True)
            if asked.processes:
                with programs(asked.python, asked.device, folder, asked.processes, daemon) as pids:
                    together.note(stub, captured(stub, pids, LONG), by_iteration=False)
                print(f"{asked.processes} processes at once: {together}", flush=True)
    problems = [*row.problems, *together.problems]
    left = list(Path("/tmp").glob("kinetod-*_*.json*"))
    print(f"{len(problems)} problems, {len(left)} files left behind", *problems, *left, sep="\n")
    return 1 if problems or left else 0


if __name__ == "__main__":
    sys.exit(main())
