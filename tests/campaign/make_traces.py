"""Writes our traces of the recorded H200 buffers, and Kineto's own of the same workloads, for read_traces.py.

usage: make_traces.py FOLDER      (in the project's environment)
"""

import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kineto_trace.convert import convert_target
from support.h200 import make_spool, recording

WORKLOADS = ("mlp", "graph", "streams")


def main() -> int:
    """FOLDER/{ours,kineto}-WORKLOAD/trace.json.gz"""
    folder = Path(sys.argv[1])
    for workload in WORKLOADS:
        ours, kinetos = folder / f"ours-{workload}", folder / f"kineto-{workload}"
        for made in (ours, kinetos):
            made.mkdir(parents=True)
        name = f"{workload}-cupti130001"
        convert_target(make_spool(ours, name), formats=["chrome"])
        (kinetos / "trace.json.gz").write_bytes(gzip.compress(json.dumps(recording(name).kineto).encode()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
