"""What is made of the counters that a killed daemon left behind."""

from pathlib import Path

import numpy as np
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.spool.counter_samples import (
    CounterHeader,
    SampledMetric,
    TargetGpus,
    read_counter_samples,
    row_type,
    write_header,
    write_rows,
)
from kinetod.captures.counters.recovered_counters import recover_counters

ENDED = "the daemon ended before the sampling did (killed, crashed or stopped); samples since then are missing"


def left_behind(folder: Path, gpus: TargetGpus) -> Path:
    """A file with a sample of 100 ns to 110 ns, and so on to 200 ns."""
    (folder / "raw").mkdir()
    gpus.write(folder)
    header = CounterHeader(
        gpu_uuid="GPU-0", gpu_index=0, chip="GH100", interval_ns=10,
        metrics=(SampledMetric(name="dram", label="DRAM", unit="%"),), set="", backend="cupti", library_version="1",
    )  # fmt: skip
    rows = np.zeros(10, row_type(1))
    rows["start_ns"] = np.arange(100, 200, 10)
    rows["end_ns"] = rows["start_ns"] + 10
    path = folder / "raw" / "GPU-0.counters"
    with path.open("wb") as file:
        write_header(file, header)
        write_rows(file, rows)
    return path


def recovered(folder: Path) -> tuple[list[str], list[tuple[int, str]]]:
    """The target's warnings, and samples and reason of each GPU."""
    capture = pb.Capture(targets=[pb.Target(pid=1)])
    recover_counters(capture, lambda _: folder)
    return list(capture.targets[0].warnings), [(each.samples, each.reason) for each in capture.counters]


def test_samples_since_the_last_look_at_who_is_on_the_gpu_are_left_out(tmp_path: Path) -> None:
    path = left_behind(tmp_path, TargetGpus(contexts=("GPU-0",), permitted_ns={"GPU-0": 150}))
    why = f"{ENDED}; samples since the last look at who is on it are left out"
    assert recovered(tmp_path) == ([f"hardware counters of GPU 0: {why}"], [(5, why)])
    assert read_counter_samples(path).end_ns.tolist() == [110, 120, 130, 140, 150]


def test_all_samples_are_an_administrators(tmp_path: Path) -> None:
    path = left_behind(tmp_path, TargetGpus(contexts=("GPU-0",)))
    assert recovered(tmp_path) == ([f"hardware counters of GPU 0: {ENDED}"], [(10, ENDED)])
    assert len(read_counter_samples(path).end_ns) == 10


def test_where_it_is_not_known_whose_samples_they_are_nobody_has_them(tmp_path: Path) -> None:
    path = left_behind(tmp_path, TargetGpus())
    (tmp_path / "raw" / "gpus.json").write_text("[")
    warnings, gpus = recovered(tmp_path)
    assert (len(warnings), "gpus.json" in warnings[0], gpus, path.exists()) == (1, True, [], False)
