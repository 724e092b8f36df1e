"""Recording from the fake ROCm in a child process: rocprofiler-sdk is configured once in the life of a process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.machine.native import ROOT
from support.rocm import fakes as rocm
from support.rocm.program import fake_environment
from support.waiting import scaled

# What the child's code may use. `answer` is what it says to the test.
_PRELUDE = """
import collections, ctypes, json, os, struct, sys
from kineto_agent.protocol.records import HEADED_RECORD, KIND_TEXT
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.rocprofiler.gpu_activities import RocprofilerSource
from hip_program import Hip, status
from support.agent.arenas import ArenaReader

FOLDER = sys.argv[1]
HIP = FOLDER + "/libamdhip64.so.7"
SDK = os.environ["KINETO_ROCPROFILER_LIBRARY"]
ALL = ("kernel", "gpu_memcpy", "cuda_runtime", "cuda_driver", "rocm_memory", "rocm_scratch")
answer = {}
source = RocprofilerSource()


def request(*types, **options):
    return SourceRequest(frozenset(types or ALL), 64 << 20, options)


def refused():
    try:
        source.prepare(request()).close()
    except SourceError as exc:
        return exc.reason_code, exc.reason
    return "", ""


def sdk():
    library = ctypes.CDLL(SDK)
    library.fake_rocprofiler_emitted.restype = library.fake_rocprofiler_misused.restype = ctypes.c_uint64
    return library


def recorded(action, *types, **options):
    session = source.prepare(request(*types, **options))
    with ArenaReader(session.arena_fd) as reader:
        session.start()
        action()
        outcome = session.stop()
        found = collections.Counter()
        for buffer in reader.ready():
            at = 0
            while at < len(buffer.data):
                kind, size = HEADED_RECORD.unpack_from(buffer.data, at)
                found[str(kind)] += kind != KIND_TEXT
                at += size
        texts = sorted(text for (space, _), text in reader.strings().items() if space in (16, 17))
    session.close()
    return {"kinds": {kind: count for kind, count in found.items() if count}, "texts": texts,
            "warnings": outcome.warnings, "incomplete": outcome.incomplete, "metadata": session.metadata,
            "dropped": outcome.counts.dropped}
"""


def run_child(folder: Path, code: str, *, bare: bool = False, **faults: int) -> Any:
    """Run code behind the prelude in a new process; gives what it put into `answer`. It must say nothing else."""
    rocm.installed(folder, bare=bare)
    script = folder / "child.py"
    script.write_text(_PRELUDE + code + "\nprint(json.dumps(answer))\n")
    paths = [str(ROOT / part) for part in ("agent", "tests", "tests/rocm")]
    done = subprocess.run(
        # Python warns of forks beside the vendor's threads, which are what some tests are about.
        [sys.executable, "-W", "ignore::DeprecationWarning", str(script), str(folder)],
        env={"PYTHONPATH": ":".join(paths), "PATH": "/usr/bin:/bin", **fake_environment(folder, **faults)},
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)
