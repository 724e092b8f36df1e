"""Files of hardware counters among a target's raw data: which device they are of, and what is said where none is."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace.decode.hardware_counters import counter_table, samples_per_row
from kineto_trace.errors import SpoolError
from kineto_trace.model.target_info import raw_bytes
from kineto_trace.model.trace import StringTable, Table
from kineto_trace.open import counter_files
from kineto_trace.open.counter_files import FoundCounters, counter_rows
from kineto_trace.spool.counter_samples import CounterHeader, SampledMetric, row_type, write_header, write_rows
from kineto_trace.spool.target_gpus import TargetGpus
from support.trace_files import traces

HAS_BOTH = [{"id": 0, "uuid": "GPU-1"}, {"id": 1, "uuid": "GPU-0"}]


def sampled(target_dir: Path, number: int, times: list[tuple[int, int]]) -> None:
    """A file of the host's GPU of this number."""
    header = CounterHeader(
        gpu_uuid=f"GPU-{number}", gpu_index=number, chip="GH100", interval_ns=10,
        metrics=(SampledMetric(name="dram", label="DRAM", unit="%"),), set="", backend="cupti", library_version="1",
    )  # fmt: skip
    rows = np.zeros(len(times), row_type(1))
    for row, (start, end) in zip(rows, times, strict=True):
        row["start_ns"], row["end_ns"], row["values"] = start, end, number
    (target_dir / "raw").mkdir(exist_ok=True)
    with (target_dir / "raw" / f"GPU-{number}.counters").open("wb") as file:
        write_header(file, header)
        write_rows(file, rows)


def found(target_dir: Path, devices: list[dict[str, Any]], *, used: tuple[int, ...] = ()) -> FoundCounters:
    strings = StringTable()
    work = [{"name": "gemm", "start": 100, "duration": 5, "device": device} for device in used]
    tables = {"kernel": traces.table("kernel", work, strings)}
    return counter_rows(target_dir, strings, devices=devices, tables=tables, window_ns=(100, 200))


def by_device(counters: FoundCounters) -> dict[int, list[float]]:
    table: Table | None = counters.table
    if table is None:
        return {}
    return {
        device: table["value"][table["device"] == device].tolist() for device in sorted(set(table["device"].tolist()))
    }


def test_a_file_is_of_the_device_with_its_uuid_and_within_the_window(tmp_path: Path) -> None:
    sampled(tmp_path, 0, [(90, 100), (100, 110)])
    sampled(tmp_path, 1, [(190, 200), (200, 210)])
    read = found(tmp_path, HAS_BOTH)
    assert (by_device(read), read.warnings) == ({0: [1.0], 1: [0.0]}, ())


def test_a_file_into_which_nothing_has_been_written_is_none(tmp_path: Path) -> None:
    sampled(tmp_path, 0, [(100, 110)])
    (tmp_path / "raw" / "GPU-0.power.counters").touch()
    read = found(tmp_path, HAS_BOTH)
    assert (by_device(read), read.warnings) == ({1: [0.0]}, ())


def test_without_uuids_the_only_gpu_of_the_process_is_the_only_device_at_work(tmp_path: Path) -> None:
    sampled(tmp_path, 3, [(100, 110)])
    TargetGpus(contexts=("GPU-3",)).write(tmp_path)
    assert by_device(found(tmp_path, [{"id": 0}, {"id": 1}], used=(1, 1))) == {1: [3.0]}
    assert by_device(found(tmp_path, [{"id": 0}])) == {0: [3.0]}


@pytest.mark.parametrize(
    ("contexts", "devices", "used"),
    [
        ((), [{"id": 0}], (0,)),  # the driver told nothing
        (("GPU-3", "GPU-4"), [{"id": 0}], (0,)),
        (("GPU-4",), [{"id": 0}], (0,)),
        (("GPU-3",), [{"id": 0}, {"id": 1}], ()),
        (("GPU-3",), [], (0, 1)),
        (("GPU-3",), [], ()),
    ],
)
def test_where_neither_tells_the_counters_are_left_out_and_a_warning_says_so(
    tmp_path: Path, contexts: tuple[str, ...], devices: list[dict[str, Any]], used: tuple[int, ...]
) -> None:
    sampled(tmp_path, 3, [(100, 110)])
    TargetGpus(contexts=contexts).write(tmp_path)
    read = found(tmp_path, devices, used=used)
    (warning,) = read.warnings
    assert (by_device(read), warning.partition(": ")[0]) == ({}, "hardware counters of GPU 3 (GPU-3) are left out")


ADDRESSES = {"GPU-0": "0000:c0:00.0", "GPU-1": "0000:c1:00.0"}
PLACED: list[dict[str, Any]] = [{"id": 0, "pci_bus_id": "0000:c1:00.0"}, {"id": 1, "pci_bus_id": "0000:c0:00.0"}]


def test_a_file_is_of_the_device_at_its_gpus_place_on_the_pci_bus(tmp_path: Path) -> None:
    for number in range(2):
        sampled(tmp_path, number, [(100, 110)])
    TargetGpus(contexts=tuple(ADDRESSES), addresses=ADDRESSES).write(tmp_path)
    read = found(tmp_path, PLACED, used=(0, 1))
    assert (by_device(read), read.warnings) == ({0: [1.0], 1: [0.0]}, ())


def test_a_gpu_at_another_place_and_partitions_without_one_are_told(tmp_path: Path) -> None:
    sampled(tmp_path, 0, [(100, 110)])
    TargetGpus(contexts=tuple(ADDRESSES), addresses=ADDRESSES).write(tmp_path)
    (elsewhere,) = found(tmp_path, PLACED[:1], used=(0,)).warnings
    assert elsewhere.endswith("it is none of the devices that the process sees")
    (partitions,) = found(tmp_path, [PLACED[0], {"id": 1}, {"id": 2}], used=(0, 1, 2)).warnings
    assert "does not say which of its devices that is" in partitions


def test_a_gpu_that_the_process_does_not_see_and_a_mig_instance_are_told(tmp_path: Path) -> None:
    sampled(tmp_path, 3, [(100, 110)])
    (unseen,) = found(tmp_path, HAS_BOTH).warnings
    assert unseen.endswith("it is none of the devices that the process sees")
    (mig,) = found(tmp_path, [{"id": 0, "uuid": "MIG-3"}]).warnings
    assert mig.endswith("the process uses a MIG instance, which has no counters of its own")


def test_damaged_and_disordered_files_are_told_and_do_not_hide_the_others(tmp_path: Path) -> None:
    sampled(tmp_path, 0, [(100, 110), (105, 120)])
    (tmp_path / "raw" / "x.counters").write_bytes(b"KCSAMP01\xff")
    (tmp_path / "raw" / "gpus.json").write_bytes(b"[")
    read = found(tmp_path, HAS_BOTH)
    assert by_device(read) == {1: [0.0]}
    assert ["gpus.json" in read.warnings[0], "1 sample had" in read.warnings[1], "x.counters" in read.warnings[2]] == [
        True
    ] * 3


def test_what_the_daemon_noted_is_kept_and_files_count_as_raw_data(tmp_path: Path) -> None:
    assert TargetGpus.read(tmp_path) == TargetGpus()
    sampled(tmp_path, 0, [(100, 110)])
    size = raw_bytes(tmp_path)
    TargetGpus(notes=("the counters end early",)).write(tmp_path)
    assert found(tmp_path, HAS_BOTH).notes == ("the counters end early",)
    assert size == (tmp_path / "raw" / "GPU-0.counters").stat().st_size
    (tmp_path / "raw" / "gpus.json").write_bytes(b"{}" + bytes(2 << 20))
    with pytest.raises(SpoolError, match=r"gpus\.json"):
        TargetGpus.read(tmp_path)


def test_samples_that_were_taken_together_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled(tmp_path, 0, [(100, 110), (110, 120), (120, 130)])
    for function in (counter_table, samples_per_row):
        monkeypatch.setattr(counter_files, function.__name__, partial(function, max_rows=2))
    read = found(tmp_path, HAS_BOTH)
    assert read.table is not None and read.table["duration"].tolist() == [20, 10]
    assert read.warnings == ("hardware counters: there are so many samples that 2 neighbours are one, their mean",)
