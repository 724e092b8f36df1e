"""What the sandbox costs a decode, and how much memory one takes: `python tests/bench/sandbox.py [--megabytes 90,700]`.

The same records are decoded by the worker as the daemon starts it (a fork, the sandbox, and arrays in a file where the
records are many) and by the same code in one warm process without any of it, by turns in the same run. Told are the
processor seconds of a decode in the mean, which a busy machine disturbs less than others, their ratio, the best wall
times, and the peak of each one's resident memory.
"""

import argparse
import json
import os
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
from kineto_trace.raw import RawWriter
from kinetod import child
from support.h200 import recording, strings_of, target_of

PART_BUFFERS = 64

PLAIN = """
import os, sys
from kinetod.decode_worker import _ENVIRONMENT, _NICE
os.environ.update(_ENVIRONMENT)
os.nice(_NICE)
from kineto_trace import spill, worker
spill.begin = lambda target_dir: False
for line in sys.stdin:
    sys.stdout.write(worker.answer(line) + "\\n")
    sys.stdout.flush()
"""


def make_spool(folder: Path, megabytes: int) -> None:
    """So many bytes of real records, with times of their own, made in parts: 8 GiB need not fit into memory."""
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
    """A process that decodes, and the most memory that it, or the child that does its job, had resident."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.peak_mib = 0
        self.decode(Path("/nonexistent"))  # until it is warm

    def decode(self, folder: Path) -> tuple[float, str]:
        """Seconds, and the answer."""
        job = {"id": 1, "target_dir": str(folder), "formats": ["chrome"], "required": True}
        job |= {"memory_bytes": 1 << 30, "cpu_s": 10_000}
        assert self._process.stdin and self._process.stdout
        begin = time.perf_counter()
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        return time.perf_counter() - begin, answer

    def cpu_s(self) -> float:
        """Of itself and of the children that have ended."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def watched(self, work: Callable[[], object]) -> None:
        """Notes the peak meanwhile. It takes time, so it is none of the runs that count."""
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
                (peak,) = (line.split()[1] for line in text.splitlines() if line.startswith("VmHWM"))
            except (OSError, ValueError):
                continue
            self.peak_mib = max(self.peak_mib, int(peak) >> 10)

    def stop(self) -> None:
        """Ends it."""
        self._process.communicate()


def compare(megabytes: int, repeat: int) -> str:
    """One line of the report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "target"
        make_spool(folder, megabytes)
        workers = [Worker(child.python("kinetod.decode_worker")), Worker((sys.executable, "-P", "-c", PLAIN))]
        times: list[list[float]] = [[], []]
        before = [worker.cpu_s() for worker in workers]
        files = set()
        for _ in range(repeat):
            for worker, taken in zip(workers, times, strict=True):
                shutil.rmtree(folder / "columns", ignore_errors=True)
                seconds, answer = worker.decode(folder)
                taken.append(seconds)
                files.add(str(json.loads(answer)["conversion"]["files"]))
        ours, plain = ((worker.cpu_s() - begun) / repeat for worker, begun in zip(workers, before, strict=True))
        for worker in workers:
            worker.watched(lambda worker=worker: worker.decode(folder))  # type: ignore[misc]
            worker.stop()
    assert len(files) == 1, "the two wrote different files"
    told = (
        f"{name} {cpu:.3f} s, wall {min(wall):.3f} s, {worker.peak_mib} MiB"
        for name, cpu, wall, worker in zip(("confined", "plain"), (ours, plain), times, workers, strict=True)
    )
    return f"{megabytes} MB: {'; '.join(told)}; ratio {ours / plain:.3f}"


def main() -> int:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", default="20,90,200,700")
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    for megabytes in map(int, options.megabytes.split(",")):
        print(compare(megabytes, options.repeat), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
