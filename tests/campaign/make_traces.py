"""Writes our traces of the recorded H200 buffers, and Kineto's own of the same workloads, for read_traces.py.

It also writes Kineto's traces in our form: we read them into columns and relate their operators to their kernels.

usage: make_traces.py FOLDER      (in the project's environment)
"""

import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.shared.text_sinks import GzipSink
from support.trace_files.h200 import make_spool, recording
from support.trace_files.kinetos_columns import trace_of

WORKLOADS = ("mlp", "graph", "streams")


def main() -> int:
    """Writes FOLDER/{ours,kineto,merged}-WORKLOAD/trace.json.gz."""
    folder = Path(sys.argv[1])
    for workload in WORKLOADS:
        ours, kinetos, merged = (folder / f"{who}-{workload}" for who in ("ours", "kineto", "merged"))
        for made in (ours, kinetos, merged):
            made.mkdir(parents=True)
        name = f"{workload}-cupti130001"
        convert_target(make_spool(ours, name), formats=["chrome"])
        (kinetos / "trace.json.gz").write_bytes(gzip.compress(json.dumps(recording(name).kineto).encode()))
        with (merged / "trace.json.gz").open("wb", buffering=0) as file, GzipSink(file) as sink:
            write_chrome(trace_of(recording(name).kineto), sink, trace_name="trace.json.gz")
    return 0


if __name__ == "__main__":
    sys.exit(main())
