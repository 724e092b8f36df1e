"""Our export of recorded CUPTI buffers beside Kineto's own trace of the same workload."""

import json
from collections import Counter
from typing import Any

import pytest
from kineto_trace.conversion.target_conversion import convert_target
from support.trace_files.h200 import RECORDINGS, Recording, make_spool, recording

Rows = list[dict[str, Any]]
LAUNCH_ARGS = (
    "grid",
    "block",
    "registers per thread",
    "shared memory",
    "blocks per SM",
    "warps per SM",
    "est. achieved occupancy %",
)


@pytest.fixture(params=RECORDINGS, scope="module")
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Rows]:
    target_dir = make_spool(tmp_path_factory.mktemp("target"), request.param)
    convert_target(target_dir, formats=["chrome-json"])
    return recording(request.param), json.loads((target_dir / "trace.json").read_text())["traceEvents"]


def of(rows: Rows, *categories: str) -> Rows:
    return [row for row in rows if row["ph"] == "X" and row["cat"] in categories]


def test_gpu_activities_agree_in_kind_number_and_name(exported: tuple[Recording, Rows]) -> None:
    kineto, rows = exported
    gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    assert Counter((row["cat"], row["name"]) for row in of(rows, *gpu)) == Counter(
        (row["cat"], row["name"]) for row in kineto.kineto_rows(*gpu)
    )


@pytest.mark.parametrize("argument", LAUNCH_ARGS)
def test_launch_shapes_and_occupancy_agree(exported: tuple[Recording, Rows], argument: str) -> None:
    kineto, rows = exported
    assert Counter((row["name"], json.dumps(row["args"][argument])) for row in of(rows, "kernel")) == Counter(
        (row["name"], json.dumps(row["args"][argument])) for row in kineto.kineto_rows("kernel")
    )


def test_copies_and_sets_agree_in_bytes(exported: tuple[Recording, Rows]) -> None:
    kineto, rows = exported
    memory = ("gpu_memcpy", "gpu_memset")
    assert Counter((row["name"], row["args"]["bytes"]) for row in of(rows, *memory)) == Counter(
        (row["name"], row["args"]["bytes"]) for row in kineto.kineto_rows(*memory)
    )


def test_calls_agree_but_for_the_profilers_own_synchronize(exported: tuple[Recording, Rows]) -> None:
    kineto, rows = exported
    calls = ("cuda_runtime", "cuda_driver")
    theirs = Counter((row["cat"], row["name"], row["args"]["cbid"]) for row in kineto.kineto_rows(*calls))
    ours = Counter((row["cat"], row["name"], row["args"]["cbid"]) for row in of(rows, *calls))
    shown = Counter({key: count for key, count in ours.items() if key in theirs})
    assert theirs - shown == {("cuda_runtime", "cudaDeviceSynchronize", 165): 1}
    assert shown - theirs == {}


def test_flows_agree(exported: tuple[Recording, Rows]) -> None:
    kineto, rows = exported

    def starts(of_rows: Rows) -> int:
        return sum(1 for row in of_rows if row["ph"] == "s" and row["cat"] == "ac2g")

    def ends(of_rows: Rows) -> int:
        streams = {(row["pid"], row["tid"]) for row in of(of_rows, "kernel", "gpu_memcpy", "gpu_memset")}
        return sum(1 for row in of_rows if row["ph"] == "f" and (row["pid"], row["tid"]) in streams)

    assert starts(kineto.kineto["traceEvents"]) - starts(rows) == 1  # the profiler's own synchronize
    assert ends(rows) == ends(kineto.kineto["traceEvents"])


def test_streams_agree(exported: tuple[Recording, Rows]) -> None:
    kineto, rows = exported
    streams = Counter((row["pid"], row["tid"]) for row in of(rows, "kernel", "gpu_memcpy", "gpu_memset"))
    theirs = Counter((row["pid"], row["tid"]) for row in kineto.kineto_rows("kernel", "gpu_memcpy", "gpu_memset"))
    assert sorted(streams.values()) == sorted(theirs.values())


def test_every_kernel_lies_in_the_window(exported: tuple[Recording, Rows]) -> None:
    recorded, rows = exported
    base = 1790857026000000000
    start, end = ((time - base) / 1000 for time in recorded.window)
    assert all(start <= row["ts"] and row["ts"] + row["dur"] <= end for row in of(rows, "kernel"))
