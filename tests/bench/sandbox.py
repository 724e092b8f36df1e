"""Cost of the sandbox to a decode, and the memory of a decode: `python tests/bench/sandbox.py [--megabytes 90,700]`.

Four workers take turns to decode the same records in the same run: the one that the daemon starts (both); a confined
process for each job, with numpy's memory (sandbox); one warm process with the memory of `spill` (memory); and one
warm process with neither, as before the sandbox (neither). Printed are the mean processor seconds of a decode, which
a busy machine disturbs less than other figures, their ratio to those of neither, the best wall times, and the peaks
of resident memory: all of it (VmHWM), and without pages of files, which the kernel may reclaim (RssAnon).
`--megabytes 8590 --only both` measures the memory of 8 GiB; it takes 20 GB of disk.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.formats import RECORDING, make_source
from kineto_trace.spool.raw_records import RawWriter
from support.trace_files.h200 import recording, strings_of, target_of

PART_BUFFERS = 64

WORKER = """
import os, sys
from kinetod.captures.result import decode_worker
from kinetod.sandbox.confinement import ENVIRONMENT
os.environ.update(ENVIRONMENT)
from kineto_trace.arrays import spilled_memory
from kineto_trace.conversion import worker_job
if {plain_memory}:
    spilled_memory.begin = lambda target_dir: False
if {sandbox}:
    sys.exit(decode_worker.main())
os.nice(decode_worker._NICE)
worker_job.warm_up()
for line in sys.stdin:
    sys.stdout.write(worker_job.answer(line) + "\\n")
    sys.stdout.flush()
"""
VARIANTS = {
    "neither": WORKER.format(plain_memory=True, sandbox=False),
    "sandbox": WORKER.format(plain_memory=True, sandbox=True),
    "memory": WORKER.format(plain_memory=False, sandbox=False),
    "both": WORKER.format(plain_memory=False, sandbox=True),
}
ENOUGH_MEGABYTES = 200  # small sizes are decoded more often, until they are this much together


def make_spool(folder: Path, megabytes: int) -> None:
    """Makes a spool of real records with times of their own, in parts, because 8 GiB need not fit into memory."""
    source = make_source(1)
    count = max(1, megabytes * 1_000_000 // source.data.nbytes)
    with RawWriter(folder / "raw/cupti", source="cupti", format="cupti/1", metadata=source.metadata) as writer:
        writer.append_strings(strings_of(recording(RECORDING)))
        for first in range(0, count, PART_BUFFERS):
            part = make_source(-(-min(PART_BUFFERS, count - first) * source.data.nbytes // 1_000_000), first)
            for chunk in part.chunks:
                data = part.data[chunk.offset : chunk.offset + chunk.size]
                writer.append_buffer(data, sequence=first + chunk.sequence, records=0)
        writer.finish(metadata={}, record_bytes=source.record_bytes, records=0, dropped=0)
    target_of(recording(RECORDING), window_start_ns=0, window_end_ns=0).write(folder)


class Worker:
    """A process that decodes, and the peak of resident memory of it, or of the child that does its job."""

    def __init__(self, code: str, folder: Path) -> None:
        command = (sys.executable, "-P", "-c", code)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._folder = folder
        self.peak_mib: dict[str, int] = {"VmHWM": 0, "RssAnon": 0}
        self.wall_s: list[float] = []
        self.files: set[str] = set()  # what was written, each time

    def decode(self) -> None:
        """Runs one job."""
        shutil.rmtree(self._folder / "columns", ignore_errors=True)
        job = {"id": 1, "target_dir": str(self._folder), "formats": ["chrome"], "required": True}
        job |= {"memory_bytes": 1 << 30, "cpu_s": 10_000}
        assert self._process.stdin and self._process.stdout
        begin = time.perf_counter()
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        self.wall_s.append(time.perf_counter() - begin)
        assert answer["ok"], answer
        self.files.add(str(answer["conversion"]["files"]))

    def cpu_s(self) -> float:
        """CPU time of the process and of its children that have ended, in s."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def watched(self, work: Callable[[], object]) -> None:
        """Records the peak memory during a job. This takes time, so the job is not one of the timed runs."""
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(ended,))
        watcher.start()
        work()
        ended.set()
        watcher.join()

    def _watch(self, ended: threading.Event) -> None:
        pid = self._process.pid
        while not ended.wait(0.005):
            try:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                text = Path(f"/proc/{children[0] if children else pid}/status").read_text()
            except OSError:
                continue
            for name, kib in re.findall(r"^(VmHWM|RssAnon):\s+(\d+)", text, re.MULTILINE):
                self.peak_mib[name] = max(self.peak_mib[name], int(kib) >> 10)

    def stop(self) -> None:
        """Ends the process."""
        self._process.communicate()


def compare(megabytes: int, repeat: int, names: list[str], folder: Path) -> list[str]:
    """Lines of the report."""
    make_spool(folder, megabytes)
    workers = {name: Worker(VARIANTS[name], folder) for name in names}
    for worker in workers.values():
        worker.watched(worker.decode)
        worker.wall_s.clear()
    before = {name: worker.cpu_s() for name, worker in workers.items()}
    times = max(repeat, repeat * ENOUGH_MEGABYTES // megabytes)
    for turn in range(times):
        for worker in [*workers.values()][:: -1 if turn % 2 else 1]:
            worker.decode()
    taken = {name: (worker.cpu_s() - before[name]) / max(1, times) for name, worker in workers.items()}
    for worker in workers.values():
        worker.stop()
    files = {name: worker.files for name, worker in workers.items()}
    assert len(set().union(*files.values())) == 1, f"different files were written: {files}"
    told = []
    for name, worker in workers.items():
        peaks = ", ".join(f"{what} {mib} MiB" for what, mib in worker.peak_mib.items())
        if times:
            told.append(
                f"{megabytes} MB {name:8s} {taken[name]:.4f} s, ratio {taken[name] / taken[names[0]]:.3f}, "
                f"wall {min(worker.wall_s):.3f} s, {peaks}"
            )
        else:
            told.append(f"{megabytes} MB {name:8s} {peaks}")
    return told


def main() -> int:
    """Prints a line for each size and variant."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", default="4,20,90,200,700")
    parser.add_argument("--repeat", type=int, default=5, help="0: the memory alone")
    parser.add_argument("--only", default=",".join(VARIANTS))
    options = parser.parse_args()
    for megabytes in map(int, options.megabytes.split(",")):
        with tempfile.TemporaryDirectory() as name:
            for line in compare(megabytes, options.repeat, options.only.split(","), Path(name) / "target"):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
