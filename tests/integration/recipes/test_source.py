"""docs/how-to-add.md followed: a source of the agent, here of a device that nobody has."""

from pathlib import Path

import pytest
from support.machine.source_tree import SourceTree, leads_to

pytestmark = pytest.mark.slow

FOLDER = "agent/kineto_agent/sources/npu"
SOURCE = '''"""Allocations on an NPU."""

import time

from kineto_agent.protocol.records import MEMORY_ALLOCATED, MEMORY_EVENT, MEMORY_EVENTS_FORMAT
from kineto_agent.sources.arena_writer import ArenaWriter
from kineto_agent.sources.interface import SourceOutcome


class NpuSource:
    name = "npu"
    on_request = frozenset()

    def activity_types(self):
        return ["npu_memory"]

    def would_yield(self, request):
        return False

    def prepare(self, request):
        return NpuSession(ArenaWriter(self.name, request.buffer_limit_bytes, 0, 1 << 16))


class NpuSession:
    format = MEMORY_EVENTS_FORMAT
    yields = False

    def __init__(self, writer):
        self.metadata = {}
        self.arena_fd = writer.fd
        self._writer = writer

    def start(self):
        pass

    def counts(self):
        return self._writer.counts()

    def stop(self):
        now_ns = time.time_ns()
        for ago_ns in range(0, 30_000_000_000, 50_000_000):  # some are in the window, however long ago it has ended
            self._writer.append(MEMORY_EVENT, now_ns - ago_ns, 64, 4096, 0, 0, MEMORY_ALLOCATED)
        self._writer.finish()
        return SourceOutcome(self.counts(), {}, [], detach_ns=0, cpu_ns=0)

    def give_way(self):
        pass

    def close(self):
        self._writer.close()
'''
USE = """
import subprocess, sys
from support.service.daemon import running_daemon

with running_daemon() as daemon:
    words = [sys.executable, "-c", "import sys; print('ready', flush=True); sys.stdin.read()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        program.stdout.readline()
        words = "--activities npu_memory --duration 100ms --output-dir out --pid".split()
        command = [sys.executable, "-m", "kinetoctl", "--address", daemon.address, "trace", *words, str(program.pid)]
        subprocess.run(command, check=True)
        program.stdin.close()
"""


def test_a_source_takes_a_folder_and_a_row_and_is_then_recorded_in_live_processes(tmp_path: Path) -> None:
    tree = SourceTree(tmp_path)
    tree.write(f"{FOLDER}/__init__.py", '"""Records allocations on NPUs."""\n')
    tree.write(f"{FOLDER}/npu_memory.py", SOURCE)
    tree.insert(
        "agent/kineto_agent/sources/registry.py",
        "SOURCES: Tuple[_Row, ...] = (\n",
        '    _Row("npu.npu_memory", "NpuSource", _everywhere),\n',
    )
    tree.python("-c", USE)
    traces = list((tmp_path / "out").rglob("*.json*"))
    assert traces, list((tmp_path / "out").rglob("*"))
    show = "import kineto_trace as kt; print(set(kt.open_trace(%r).table('cpu_instant_event')['bytes'].tolist()))"
    assert tree.python("-c", show % str(traces[0])) == "{4096}\n"
    assert all(leads_to("A source of the agent", path) for path in tree.edited)
