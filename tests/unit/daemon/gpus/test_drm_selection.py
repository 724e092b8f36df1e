"""Processes on AMD's and Intel's GPUs as captures and lists select them: real processes, a made-up kernel."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.agents.agent_hub import AgentHub
from kinetod.gpus import gpu_reader
from kinetod.gpus.gpu_reader import ContextHolders, GpuReader
from kinetod.permissions.role_policy import Caller, Role, Via
from kinetod.processes import drm_gpus, process_info
from kinetod.processes.identity import ProcessFolder
from kinetod.selection import process_registry
from kinetod.selection.process_registry import Registry, checked_selector
from support.accelerators.drm_host import DrmHost, client
from support.waiting import scaled

CALLER = Caller(uid=os.getuid(), user="me", roles=frozenset({Role.ADMIN}), via=Via.UNIX)
READER = """
import sys
from pathlib import Path
from kinetod.gpus import reader_process
from kinetod.gpus.drm import DrmGpus
library = DrmGpus(Path(sys.argv[1]), Path(sys.argv[2]))
reader_process.libraries = lambda **_: [reader_process.OpenLibrary(library)]
sys.exit(reader_process.main())
"""
INTEL, AMD = "0000:29:00.0", "0000:c1:00.0"


@pytest.fixture
def workers() -> Iterator[tuple[int, int]]:
    """The pids of two Python processes."""
    command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as one,
        subprocess.Popen(command, stdin=subprocess.PIPE) as other,
    ):
        yield one.pid, other.pid


@pytest.fixture
def holders(tmp_path: Path, workers: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[ContextHolders]:
    """Both opened both GPUs; the first works on AMD's, the second on Intel's."""
    host = DrmHost(tmp_path)
    host.gpu("amdgpu", AMD, 128)
    host.gpu("xe", INTEL, 129)
    host.kfd_node(1, 777, 128)
    for pid, mib in zip(workers, (0, 64), strict=True):
        used = client(INTEL, pid, drm_resident_vram0=f"{mib} MiB")
        host.process(pid, {3: ("/dev/dri/renderD128", client(AMD, pid)), 4: ("/dev/dri/renderD129", used)})
    host.kfd_process(workers[0], vram={777: 1 << 30}, queues={0: 777})
    monkeypatch.setattr(gpu_reader, "HOLDERS_DEADLINE_S", scaled(30))
    reader = GpuReader(command=[sys.executable, "-c", READER, str(host.proc), str(host.sys)])
    yield ContextHolders(reader)
    reader.close()


def test_gpu_selects_the_processes_that_work_on_it(
    holders: ContextHolders, workers: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_registry, "foreign_pids", lambda _: set(workers))  # children of this one do not count

    async def scenario() -> list[list[tuple[int, list[int]]]]:
        assert await holders.now() == {workers[0]: {0}, workers[1]: {1}}
        found = Registry(AgentHub(), gpus=holders)
        answers = []
        for gpu in (0, 1, 2):
            match = checked_selector(pb.Selector(gpus=[gpu]))
            candidates = await found.selected(match, lambda _: True, attachable=True)
            answers.append([(each.key.pid, list(each.process.gpus)) for each in candidates])
        return answers

    assert asyncio.run(scenario()) == [[(workers[0], [0])], [(workers[1], [1])], []]


def test_a_process_has_open_the_gpus_whose_render_nodes_it_has_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_info, "numbers_by_node", lambda: {"/dev/dri/renderD129": 1, "/dev/dri/renderD130": 2})
    folder = tmp_path / "7" / "fd"
    folder.mkdir(parents=True)
    for number, path in enumerate(("/dev/dri/renderD130", "/dev/dri/renderD128", "/dev/dri/card1", "/dev/kfd")):
        (folder / str(number)).symlink_to(path)
    with ProcessFolder(7, tmp_path) as process:
        assert process_info.open_gpus(process) == (2,)


def test_the_numbers_of_this_hosts_gpus_are_those_of_their_render_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {f"/dev/dri/{gpu.render}": gpu.number for gpu in drm_gpus.drm_gpus()}
    assert drm_gpus.numbers_by_node() == expected
