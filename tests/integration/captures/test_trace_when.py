"""A trace that begins when the GPU of a process does something, with the real daemon over a fake NVML."""

import subprocess
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb
from support.machine.gpus import FakeGpus
from support.service.cli import kinetoctl
from support.service.daemon import running_daemon
from support.targets.programs import connected
from support.waiting import scaled

LOOP = """
import os, sys, threading, kineto_agent
kineto_agent.start()
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
os.write(1, b"ready" + bytes([10]))
while not over.wait(0.002):
    sum(range(2000))
"""
SM_ACTIVE = 2  # NVML_GPM_METRIC_SM_UTIL, in per cent


def test_a_trace_begins_when_the_gpu_of_the_process_falls_idle(tmp_path: Path) -> None:
    gpus = FakeGpus(tmp_path)
    with running_daemon(environ=gpus.environ) as daemon, connected(daemon, LOOP) as process:

        def works(percent: int) -> None:
            gpus.say(f"process 0 {process.pid} 1000 {percent}", f"metric {SM_ACTIVE} {percent}")

        works(90)
        options = ("--when", "sm_active<30% for 1s", "--duration", "200ms", "--no-fetch")
        with subprocess.Popen(
            kinetoctl("trace", "--pid", str(process.pid), *options),
            env=daemon.client_environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as tracing:
            assert tracing.stderr is not None
            assert tracing.stderr.readline() == "waiting until a GPU of the processes has sm_active < 30 % for 1 s\n"
            assert not daemon.stub().ListCaptures(pb.ListCapturesRequest(), timeout=scaled(10)).captures
            works(10)
            assert tracing.stderr.readline() == "GPU 0: sm_active is 10 %; tracing now\n"
            output, told = tracing.communicate(timeout=scaled(60))
        assert tracing.returncode == 0, told
        assert "DONE" in output
        (capture,) = daemon.stub().ListCaptures(pb.ListCapturesRequest(), timeout=scaled(10)).captures
        assert capture.status == pb.CAPTURE_STATUS_DONE
