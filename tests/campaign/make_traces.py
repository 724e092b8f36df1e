"""Writes our traces of the recorded H200 buffers, and Kineto's own of the same workloads, for read_traces.py.

It also writes Kineto's traces in our form: we read them into columns and relate their operators to their kernels.
If KINETO_PUBLIC_TRACES names a folder of traces that are not ours, it writes each of them as it is, and as it comes
back from a Perfetto trace of ours.

usage: make_traces.py FOLDER      (in the project's environment)
"""

import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.errors import FileError
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.text_sinks import GzipSink
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.open.trace_opener import open_trace
from support.trace_files.h200 import make_spool, recording
from support.trace_files.kinetos_columns import trace_of
from support.trace_files.public_traces import public_paths

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
    for source in public_paths():
        write_public(source, folder)
    return 0


def write_public(source: Path, folder: Path) -> None:
    """Writes FOLDER/{public,back}-NAME/trace.json.gz of a trace that is not ours."""
    try:
        trace = open_trace(source)
    except FileError as exc:
        print(exc)
        return
    public, back = (folder / f"{what}-{source.name.split('.')[0]}" for what in ("public", "back"))
    for made in (public, back):
        made.mkdir(parents=True, exist_ok=True)
    content = source.read_bytes()
    (public / "trace.json.gz").write_bytes(content if source.suffix == ".gz" else gzip.compress(content))
    export_trace(trace, back / "trace.pftrace")
    export_trace(open_trace(back / "trace.pftrace"), back / "trace.json.gz")


if __name__ == "__main__":
    sys.exit(main())
