"""On two GPUs: a job whose second rank stops coming is traced truthfully, and ends as it would have ended untouched.

Prints one line of JSON for each kind.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.machine.gpus import torch_with_driver
from support.service.cli import kinetoctl
from support.service.daemon import Daemon, child_environ, free_address, running_daemon

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
KINDS = ("lock", "loader", "order", "killed")
LIMIT_S = 40.0  # of NCCL's watchdog; the job comes up and is traced within that time
SAME_S = 2.0


class Job:
    """Two ranks. ends: exit status of each and the seconds from its last whole step until then."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self.ends: dict[int, tuple[int, float]] = {}
        port = free_address().rpartition(":")[2]
        self.ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "gpu.hung_collective", str(rank), port, kind, str(LIMIT_S)],
                    env=child_environ(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        for rank in self.ranks:
            stack.callback(rank.kill)
        self._waiting: list[threading.Thread] = []

    def await_begun(self) -> None:
        """Until both have made their steps."""
        for rank, process in enumerate(self.ranks):
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"begun": True}
            self._waiting.append(threading.Thread(target=self._await_end, args=(rank, time.monotonic())))
            self._waiting[-1].start()

    def _await_end(self, rank: int, begun: float) -> None:
        status = self.ranks[rank].wait()
        self.ends[rank] = status, time.monotonic() - begun

    def await_end(self) -> None:
        """Until the first rank has ended by itself; the second one is killed where it does not."""
        self._waiting[0].join(LIMIT_S + 30)
        self.ranks[1].kill()
        self._waiting[1].join()


@contextmanager
def jobs() -> Iterator[dict[str, tuple[Job, Job]]]:
    """For each kind one to trace and one to leave in peace, all of which stand still."""
    with ExitStack() as stack:
        made = {kind: (Job(kind, stack), Job(kind, stack)) for kind in KINDS}
        for pair in made.values():
            for job in pair:
                job.await_begun()
        yield made


def stacks(daemon: Daemon, job: Job) -> dict[str, list[str]]:
    """By rank: what its main thread waits for, in what words, and in which function of the program's own."""
    selector = pb.Selector(pids=[each.pid for each in job.ranks if each.poll() is None])
    began, found = time.monotonic(), {}
    for each in daemon.stub().ReadStacks(pb.ReadStacksRequest(selector=selector), timeout=30):
        main, rank = each.threads[0], [rank.pid for rank in job.ranks].index(each.process.pid)
        own = next((frame.function for frame in main.frames if frame.own), each.reason)
        found[str(rank)] = [pb.Wait.Name(main.wait), main.waits, own]
    assert time.monotonic() - began < 3
    return found


def test_a_job_that_hangs_in_a_collective_is_traced_and_ends_as_if_it_were_not(tmp_path: Path) -> None:
    ours: dict[str, Any] = {}
    with running_daemon() as daemon, jobs() as made:
        stands, traces = {}, {}
        for kind, (job, _) in made.items():
            stands[kind] = stacks(daemon, job)
            print(json.dumps({"kind": kind, "stacks": stands[kind]}))
        for kind, (job, _) in made.items():
            pids = [str(each.pid) for each in job.ranks if each.poll() is None]
            command = kinetoctl("-o", "json", "trace", *pids, "--duration", "2s", "--output-dir", str(tmp_path / kind))
            traces[kind] = subprocess.Popen(
                command, env=daemon.client_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        for kind, trace in traces.items():
            out, err = trace.communicate(timeout=60)
            assert out, err
            ours[kind] = json.loads(out)
        for pair in made.values():
            for job in pair:
                job.await_end()
    for kind, (traced, untouched) in made.items():
        told = [{key: each.get(key) for key in ("verdict", "reason_code", "reason")} for each in ours[kind]["targets"]]
        print(json.dumps({"kind": kind, "traced": traced.ends, "untouched": untouched.ends, "told": told}))
    for kind, (traced, untouched) in made.items():
        (status, after_s), (twin_status, twin_after_s) = traced.ends[0], untouched.ends[0]
        assert status == twin_status, kind
        assert abs(after_s - twin_after_s) < SAME_S, kind
        waiting, *_ = ours[kind]["targets"]
        assert waiting["reason_code"] == "GPU_DOES_NOT_DRAIN", waiting
        assert stands[kind]["0"][0::2] == ["WAIT_GPU", "main"], kind
    assert [stands[kind].get("1", [""])[0] for kind in KINDS] == ["WAIT_LOCK", "WAIT_FILE", "WAIT_GPU", ""]
