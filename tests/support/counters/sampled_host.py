"""A daemon on a host whose driver, GPUs and CUPTI are fakes, with "training" programs on the GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.spool.counter_samples import SUFFIX, last_end_ns
from kinetod.counters.power.interface import POWER_SUFFIX

from support.counters.fake_pm_sampling import FakePmSampling
from support.machine.gpus import FakeGpus
from support.machine.native import FAKES, fake_cuda, fake_cupti
from support.service.calls_as import plain_python
from support.service.cli import kinetoctl, wait_for_agent
from support.service.daemon import Daemon, running_daemon, watch_to_end
from support.waiting import scaled, until

LONG_NS = 300 * 10**9
HALF_A_SECOND_BYTES = 500 * 48
UUIDS = "counters 1"  # those of the fake that samples


class SampledHost:
    """sampling: the fake that kinetod-counters uses. The driver says that the programs are on the GPUs."""

    def __init__(self, daemon: Daemon, sampling: FakePmSampling, gpus: FakeGpus) -> None:
        self.daemon = daemon
        self.sampling = sampling
        self._gpus = gpus
        self._programs = ExitStack()
        self._lines = [UUIDS]

    def say(self, *lines: str) -> None:
        """More of what the fake driver says (tests/fakes/fake_nvml.c)."""
        self._lines += lines
        self._gpus.say(*self._lines)

    def is_on(self, pid: int, *gpus: int) -> None:
        """The process has a context on these GPUs."""
        self.say(*(f"process {gpu} {pid} 100 50" for gpu in gpus))

    def train(self, *gpus: int, uid: int | None = None, **environ: str) -> "subprocess.Popen[str]":
        """A program on these GPUs, the first of which it sees as its device 0, after its first step. uid: whose."""
        variables = {
            **self.daemon.client_environ(),
            "KINETO_CUPTI_LIBRARY": str(fake_cupti()),
            "FAKE_CUDA_VISIBLE": "".join(map(str, gpus)),
            **environ,
        }
        fake_cuda()  # it may not be built by another user
        python = [sys.executable] if uid is None else plain_python(uid)
        process = self._programs.enter_context(
            subprocess.Popen(
                kinetoctl("--quiet", "run", "--", *python, str(FAKES / "fake_cuda_app.py")),
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        self._programs.callback(process.kill)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["ready"]
        wait_for_agent(self.daemon, process.pid)
        self.is_on(process.pid, *gpus)
        return process

    def unsay(self, begin: str) -> None:
        """Takes back what begins like this."""
        self._lines = [line for line in self._lines if not line.startswith(begin)]
        self.say()

    def leave(self, pid: int, *gpus: int) -> None:
        """The process has no context on these GPUs any more."""
        for gpu in gpus:
            self.unsay(f"process {gpu} {pid} ")

    def end_programs(self) -> None:
        """Ends those that `train`, and frees the GPUs."""
        self._programs.close()
        self._lines = [UUIDS]
        self.say()

    def create(self, *pids: int, **fields: Any) -> pb.Capture:
        """A capture of these processes with the set overview, until it is cancelled unless `fields` say otherwise."""
        if "iterations" not in fields:
            fields.setdefault("duration_ns", LONG_NS)
        spec = pb.CaptureSpec(selector=pb.Selector(pids=pids), counters=pb.CounterRequest(), **fields)
        capture: pb.Capture = self.daemon.stub().CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(30))
        return capture

    def cancel(self, capture: pb.Capture, *, keep: bool) -> pb.Capture:
        """The capture, ended."""
        request = pb.CancelCaptureRequest(id=capture.id, keep_partial=keep)
        self.daemon.stub().CancelCapture(request, timeout=60)
        return watch_to_end(self.daemon.stub(), capture.id)

    def folder(self, capture_id: str, pid: int) -> Path:
        """Of a target."""
        (path,) = (self.daemon.state_dir / "captures" / capture_id / "targets").glob(f"{pid}-*")
        return path

    def counter_files(self, capture_id: str, pid: int) -> list[Path]:
        """A target's files of hardware counters, without those of power and clocks."""
        raw = self.folder(capture_id, pid) / "raw"
        return [path for path in sorted(raw.glob(f"*{SUFFIX}")) if not path.name.endswith(POWER_SUFFIX)]

    def until_sampled(self, capture: pb.Capture) -> None:
        """Waits until all targets record, and for half a second of samples since then of each of them."""

        def collects() -> bool:
            request = pb.GetCaptureRequest(id=capture.id)
            targets = self.daemon.stub().GetCapture(request, timeout=30).targets
            return all(each.state == pb.TARGET_STATE_COLLECT for each in targets)

        until(collects, "the targets record", state=self.daemon.log)
        for target in capture.targets:
            self.until_grown(capture.id, target.pid)

    def until_power_is_read(self, capture: pb.Capture) -> None:
        """Waits until all targets have a row of power and clocks."""

        def read() -> bool:
            folders = [self.folder(capture.id, target.pid) / "raw" for target in capture.targets]
            return all(_is_read(folder) for folder in folders)

        until(read, "power is read", state=self.daemon.log)

    def until_grown(self, capture_id: str, pid: int) -> None:
        """Waits for half a second of further samples of a target, of 1 ms and eight metrics."""

        def size() -> int:
            return min((path.stat().st_size for path in self.counter_files(capture_id, pid)), default=0)

        before = size()
        until(lambda: size() >= before + HALF_A_SECOND_BYTES, "the files have rows", state=self.daemon.log)

    def sampler_pid(self) -> int:
        """The daemon's own kinetod-counters."""
        (pid,) = (
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and _is_sampler_of(entry, self.daemon.pid)
        )
        return pid


def _is_read(folder: Path) -> bool:
    found = [path for path in folder.glob(f"*{POWER_SUFFIX}") if path.stat().st_size]
    return bool(found) and all(last_end_ns(path) for path in found)


def _is_sampler_of(entry: Path, parent: int) -> bool:
    try:
        status, command = (entry / "stat").read_text(), (entry / "cmdline").read_bytes()
    except OSError:
        return False
    return int(status.rpartition(")")[2].split()[1]) == parent and b"kinetod.counters\0" in command


@contextmanager
def sampled_host(folder: Path, *options: str, **environ: str) -> Iterator[SampledHost]:
    """A started daemon there. environ: its further environment."""
    (folder / "driver").mkdir()
    sampling, gpus = FakePmSampling(folder / "driver"), FakeGpus(folder)
    gpus.say(UUIDS)  # the driver is asked for them when it is opened
    paths = [sampling.environ["LD_LIBRARY_PATH"], gpus.environ["LD_LIBRARY_PATH"]]
    variables = {
        **sampling.environ,
        **gpus.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(paths),
        "KINETOD_COUNTERS_LIBRARY": str(sampling.library),
        "KINETOD_COUNTERS_SOCKET": "",
        **environ,
    }
    with running_daemon(*options, environ=variables) as daemon:
        host = SampledHost(daemon, sampling, gpus)
        try:
            yield host
        finally:
            host.end_programs()
