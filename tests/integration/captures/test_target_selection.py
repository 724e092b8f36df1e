"""Which processes are meant of a launcher, two training processes and the workers of one, none of them prepared."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.call_values import ANY_RANK
from kineto_protos.v1 import profiler_pb2 as pb
from support.machine.gpus import FakeGpus
from support.machine.kernel import allowed_to_trace
from support.service import cli
from support.service.cli import Result, run_process
from support.service.daemon import Daemon, running_daemon
from support.targets.programs import ready_pids
from support.waiting import until

JOB = f"job-{uuid.uuid4().hex[:8]}"
# Starts what it is given, once for each rank, as torchrun does.
LAUNCHER = """
import os, subprocess, sys
ranks = [subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, "RANK": str(n)}) for n in range(2)]
for rank in ranks:
    rank.wait()
"""
# Rank 0 has a forked worker and a spawned one, which multiprocessing gives a resource tracker. Says its pids when all
# are there; ends with its standard input.
TRAIN = """
import json, multiprocessing, os, sys, threading, time
def work(pipe):
    pipe.send(os.getpid())
    try:
        pipe.recv()
    except EOFError:
        pass
if __name__ == "__main__":
    rank, pids, pipes = int(os.environ["RANK"]), {"trainer": os.getpid()}, []
    for method in ("fork", "spawn") if rank == 0 else ():
        here, there = multiprocessing.Pipe()
        multiprocessing.get_context(method).Process(target=work, args=(there,), daemon=True).start()
        there.close()
        pids[method] = here.recv()
        pipes.append(here)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    os.write(1, (json.dumps([rank, pids]) + chr(10)).encode())
    while not over.wait(0.002):
        sum(range(2000))
"""


@dataclass(frozen=True)
class Job:
    """The pids of a running job."""

    script: Path
    launcher: int
    trainers: tuple[int, int]
    forked: int
    spawned: int

    @property
    def all_but_the_tracker(self) -> set[int]:
        return {self.launcher, *self.trainers, self.forked, self.spawned}


@contextmanager
def running(folder: Path, environ: dict[str, str], *prefix: str) -> Iterator[Job]:
    """The job, once all its processes are there."""
    launcher, train = folder / "launch.py", folder / "train.py"
    launcher.write_text(LAUNCHER)
    train.write_text(TRAIN)
    process = subprocess.Popen(
        [*prefix, sys.executable, str(launcher), str(train)],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        ranks = dict(json.loads(process.stdout.readline()) for _ in range(2))
        trainers = (ranks[0]["trainer"], ranks[1]["trainer"])
        yield Job(train, process.pid, trainers, ranks[0]["fork"], ranks[0]["spawn"])
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KINETO", "PYTHON"))}
    environ |= {"SLURM_JOB_ID": JOB, "SLURM_STEP_ID": "3"}
    with running(tmp_path_factory.mktemp("job"), environ) as started:
        yield started


def kinetoctl(daemon: Daemon, *arguments: str) -> Result:
    return run_process(arguments, daemon.client_environ())


def listed(daemon: Daemon, *, everything: bool = False, **conditions: Any) -> set[int]:
    request = pb.ListProcessesRequest(selector=pb.Selector(**conditions), include_without_agent=everything)
    return {process.pid for process in daemon.stub().ListProcesses(request, timeout=20).processes}


def shown(daemon: Daemon, *, everything: bool = False, **conditions: Any) -> set[int]:
    """In the first sample of `kinetoctl top`."""
    request = pb.WatchHostRequest(selector=pb.Selector(**conditions), include_without_agent=everything)
    call = daemon.stub().WatchHost(request, timeout=20)
    try:
        return {sample.process.pid for sample in next(call).processes}
    finally:
        call.cancel()


def test_top_shows_the_training_processes_that_nothing_was_prepared_in(daemon: Daemon, job: Job) -> None:
    trainers, others = set(job.trainers), job.all_but_the_tracker - set(job.trainers)
    assert shown(daemon) >= trainers and not shown(daemon) & others
    assert shown(daemon, job_ids=[JOB], ranks=[1]) == {job.trainers[1]}


def test_the_training_processes_of_a_job_are_meant(daemon: Daemon, job: Job) -> None:
    trainers = set(job.trainers)
    assert listed(daemon, command_regex=str(job.script)) == trainers
    assert listed(daemon, job_ids=[JOB]) == trainers
    assert listed(daemon, job_ids=[JOB], job_step="3", ranks=[ANY_RANK]) == trainers
    assert listed(daemon, job_ids=[JOB], ranks=[1]) == {job.trainers[1]}
    assert listed(daemon, pids=[job.launcher], children=True) == trainers
    assert listed(daemon, pids=[job.trainers[0]], children=True) == {job.trainers[0]}
    assert listed(daemon, job_ids=[JOB], job_step="0") == set()


def test_launchers_and_workers_are_meant_when_asked_for(daemon: Daemon, job: Job) -> None:
    helpers = listed(daemon, job_ids=[JOB], helpers=True)
    assert helpers > job.all_but_the_tracker
    assert len(helpers) == len(job.all_but_the_tracker) + 1
    assert listed(daemon, pids=[job.launcher], children=True, helpers=True) == helpers
    assert listed(daemon, job_ids=[JOB], everything=True) == helpers
    assert listed(daemon, pids=[job.forked, job.launcher]) == {job.forked, job.launcher}


@pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)")
@pytest.mark.parametrize("by", ["command", "job", "children"])
def test_a_capture_takes_what_the_list_shows(daemon: Daemon, job: Job, by: str) -> None:
    selector = {
        "command": ("--command", str(job.script)),
        "job": ("--job-id", JOB),
        "children": ("--pid", str(job.launcher), "--children"),
    }[by]
    result = kinetoctl(daemon, "trace", *selector, "--duration", "200ms", "--no-fetch", "-o", "json")
    assert result.code == 0, result.stderr
    verdicts = {target["pid"]: target["verdict"] for target in result.json()["targets"]}
    assert verdicts == dict.fromkeys(job.trainers, "VERDICT_DONE")


@pytest.mark.slow
@pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)")
def test_a_worker_that_has_an_agent_is_still_a_worker(daemon: Daemon, job: Job) -> None:
    traced = sorted((job.forked, *job.trainers))
    pids = [word for pid in traced for word in ("--pid", str(pid))]
    result = kinetoctl(daemon, "trace", *pids, "--duration", "200ms", "--no-fetch", "-o", "json")
    assert sorted(target["pid"] for target in result.json()["targets"]) == traced, result.stderr
    assert job.forked in listed(daemon, helpers=True)
    assert listed(daemon, job_ids=[JOB]) == set(job.trainers)
    assert listed(daemon, job_ids=[JOB], ranks=[0]) == {job.trainers[0]}
    assert shown(daemon, job_ids=[JOB]) == set(job.trainers)
    assert shown(daemon, job_ids=[JOB], helpers=True) > job.all_but_the_tracker
    assert shown(daemon, everything=True, job_ids=[JOB]) > job.all_but_the_tracker


@pytest.mark.slow
def test_agents_in_all_processes_change_nothing(daemon: Daemon, tmp_path: Path) -> None:
    environ = {**daemon.client_environ(), "TORCHELASTIC_RUN_ID": f"run of {JOB}"}
    with running(tmp_path, environ, *cli.kinetoctl("--quiet", "run", "--")) as job:
        have_agents = {job.launcher, *job.trainers, job.spawned}
        until(lambda: ready_pids(daemon.stub()) >= have_agents, "the agents are connected")
        assert listed(daemon, job_ids=[environ["TORCHELASTIC_RUN_ID"]]) == set(job.trainers)
        assert listed(daemon, job_ids=[environ["TORCHELASTIC_RUN_ID"]], helpers=True) > have_agents
        assert listed(daemon) & {*have_agents, job.forked} == set(job.trainers)


@pytest.mark.slow
def test_where_processes_hold_gpus_only_these_are_meant(job: Job, tmp_path: Path) -> None:
    gpus = FakeGpus(tmp_path)
    gpus.say(*(f"process {gpu} {pid} 100 5" for gpu, pid in enumerate((job.trainers[1], job.spawned))))
    with running_daemon(environ=gpus.environ) as daemon:
        assert listed(daemon, job_ids=[JOB]) == {job.trainers[1], job.spawned}
        assert listed(daemon, pids=[job.launcher], children=True, gpus=[0]) == {job.trainers[1]}
        assert listed(daemon, job_ids=[JOB], gpus=[1]) == {job.spawned}
        result = kinetoctl(daemon, "ps", "--gpu", "1", "-o", "json")
        assert [(process["pid"], process["gpus"]) for process in result.json()] == [(job.spawned, [1])]


def test_where_nothing_meets_the_conditions_they_are_named(daemon: Daemon, job: Job) -> None:
    result = kinetoctl(daemon, "trace", "--pid", str(job.launcher), "--children", "--gpu", "0", "--rank", "7")
    assert result.code == 3
    assert f"matches pid {job.launcher} and all descendants, rank 7, GPU 0; " in result.stderr
