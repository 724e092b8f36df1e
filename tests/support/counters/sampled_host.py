"""A daemon on a host whose driver, GPUs and CUPTI are fakes, with "training" programs on the GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.counters.fake_pm_sampling import FakePmSampling
from support.machine.gpus import FakeGpus
from support.machine.native import FAKES, fake_cupti
from support.service.cli import kinetoctl, wait_for_agent
from support.service.daemon import Daemon, running_daemon

UUIDS = "counters 1"  # those of the fake that samples


class SampledHost:
    """sampling: the fake that kinetod-counters uses. The driver says that the programs are on the GPUs."""

    def __init__(self, daemon: Daemon, sampling: FakePmSampling, gpus: FakeGpus, stack: ExitStack) -> None:
        self.daemon = daemon
        self.sampling = sampling
        self._gpus = gpus
        self._stack = stack
        self._lines = [UUIDS]

    def say(self, *lines: str) -> None:
        """More of what the fake driver says (tests/fakes/fake_nvml.c)."""
        self._lines += lines
        self._gpus.say(*self._lines)

    def is_on(self, pid: int, *gpus: int) -> None:
        """The process has a context on these GPUs."""
        self.say(*(f"process {gpu} {pid} 100 50" for gpu in gpus))

    def train(self, *gpus: int, **environ: str) -> "subprocess.Popen[str]":
        """A program on these GPUs, the first of which it sees as its device 0, after its first step."""
        variables = {
            **self.daemon.client_environ(),
            "KINETO_CUPTI_LIBRARY": str(fake_cupti()),
            "FAKE_CUDA_VISIBLE": "".join(map(str, gpus)),
            **environ,
        }
        process = self._stack.enter_context(
            subprocess.Popen(
                kinetoctl("--quiet", "run", "--", sys.executable, str(FAKES / "fake_cuda_app.py")),
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        self._stack.callback(process.kill)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["ready"]
        wait_for_agent(self.daemon, process.pid)
        self.is_on(process.pid, *gpus)
        return process

    def sampler_pid(self) -> int:
        """The daemon's own kinetod-counters."""
        (pid,) = (
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and _is_sampler_of(entry, self.daemon.pid)
        )
        return pid


def _is_sampler_of(entry: Path, parent: int) -> bool:
    try:
        status, command = (entry / "stat").read_text(), (entry / "cmdline").read_bytes()
    except OSError:
        return False
    return int(status.rpartition(")")[2].split()[1]) == parent and b"kinetod.counters" in command


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
    with running_daemon(*options, environ=variables) as daemon, ExitStack() as stack:
        yield SampledHost(daemon, sampling, gpus, stack)
