"""Makes reports of many ranks from an object store, through a Dask cluster of two worker processes; with figures.

usage: reports.py [RANKS]      (in the project's environment; 256)

The traces are those of tests/data/h200/ddp4, stored as columns and uploaded as if by the daemons of RANKS / 4 hosts,
each rank with its own number. One rank's object is removed and one rank has failed: the report must name both and
have all others.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / "tests")]

import psutil  # noqa: E402
from kineto_trace.open.trace_opener import open_trace  # noqa: E402
from kineto_trace.store.parquet_folder import save_columns  # noqa: E402
from support.peers.s3 import BUCKET, S3, credentials, running_s3  # noqa: E402
from support.trace_files.uploaded import upload_folder  # noqa: E402

DDP = REPOSITORY / "tests/data/h200/ddp4"
PER_HOST = 4
VIEWS = ("ranks", "rank_waits", "step_spread", "collective_summary", "kernels")


class Peak:
    """The largest resident memory of processes, sampled ten times a second."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._ended = threading.Event()

    @contextmanager
    def of(self, processes: dict[str, psutil.Process]) -> Iterator[None]:
        """Samples while the block runs."""
        thread = threading.Thread(target=self._sample, args=(processes,))
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _sample(self, processes: dict[str, psutil.Process]) -> None:
        while not self._ended.wait(0.1):
            for name, process in processes.items():
                try:
                    self.bytes[name] = max(self.bytes.get(name, 0), process.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue


def put(s3: S3, folder: Path, ranks: int) -> str:
    """Uploads all traces; returns the URL below which they are stored."""
    url = f"s3://{BUCKET}/cluster"
    traces = [open_trace(path) for path in sorted(DDP.glob("*.json.gz"))]
    for host in range(ranks // PER_HOST):
        own, targets = folder / str(host), []
        for place, trace in enumerate(traces):
            rank = host * PER_HOST + place
            key = f"{100 + rank}-{7_000_000_000 + rank}"
            named = replace(trace, target=replace(trace.target, rank=rank, host=f"h{host}"))
            save_columns(named, own / "targets" / key / "columns")
            about = {"pid": 100 + rank, "start_time_ns": str(7_000_000_000 + rank), "process": {"rank": rank}}
            targets.append({**about, "verdict": "VERDICT_DONE"})
        if host == 0:
            failed = {"pid": 99, "start_time_ns": "1", "process": {"rank": ranks}, "verdict": "VERDICT_FAILED"}
            targets.append({**failed, "reason": "the process ended"})
        upload_folder(f"{url}/h{host}/c{host}", own, targets, fleet="f1", fs=s3.fs)
    s3.fs.rm(f"{BUCKET}/cluster/h0/c0/101-7000000001/columns/kernel.parquet")
    return url


def report(url: str, environ: dict[str, str], workers: list[int], *options: str) -> dict[str, Any]:
    """Runs the command; prints time and memory."""
    wanted = [argument for view in VIEWS for argument in ("--view", view)]
    command = [sys.executable, "-m", "kinetoctl", "report", url, *wanted, *options, "-o", "json"]
    began = time.monotonic()
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)
    peak = Peak()
    watched = {"kinetoctl": psutil.Process(process.pid)}
    with peak.of(watched | {f"worker {pid}": psutil.Process(pid) for pid in workers}):
        output, _ = process.communicate()
    used = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sorted(peak.bytes.items()))
    print(f"{' '.join(options) or 'alone'}: exit code {process.returncode}, {time.monotonic() - began:.1f} s; {used}")
    found: dict[str, Any] = json.loads(output)
    return found


def main() -> int:
    """Runs the campaign; returns 1 if a rank is missing that should be there, or the other way round."""
    from distributed import Client, LocalCluster

    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    with running_s3() as s3, tempfile.TemporaryDirectory() as folder:
        os.environ.update({**credentials(), "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.port}"})
        url = put(s3, Path(folder), ranks)
        size = sum(s3.fs.du(f"{BUCKET}/cluster", total=False).values())
        print(f"{ranks} ranks, {size / 2**20:.0f} MiB in the store")
        with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:  # type: ignore[no-untyped-call]
            with Client(cluster) as client:  # type: ignore[no-untyped-call]
                workers = list(client.run(os.getpid).values())
            found = report(url, dict(os.environ), workers, "--scheduler", cluster.scheduler_address)
    rows = found["ranks"]["rows"]
    missing = [note for note in found["ranks"]["notes"] if "is missing" in note]
    print("\n".join(missing))
    good = sorted(row["rank"] for row in rows) == [rank for rank in range(ranks) if rank != 1] and len(missing) == 2
    print("all there" if good else f"WRONG: {len(rows)} ranks")
    return not good


if __name__ == "__main__":
    sys.exit(main())
