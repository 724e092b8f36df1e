"""Several sources of one target put together."""

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_agent.protocol.records import (
    OP,
    PART_HEAD,
    SPACE_OP_NAME,
    SPACE_TORCH_THREAD,
    STEP_MARK,
    STEP_MARKS_FORMAT,
    XPLANE_FORMAT,
)
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.decode.hardware_counters import counter_table, samples_per_row
from kineto_trace.decode.pti_records import schema_of
from kineto_trace.errors import DamagedError, SpoolError
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.model.target_info import TargetInfo, raw_bytes
from kineto_trace.model.trace import OP_TABLES, StringTable, Table, Trace
from kineto_trace.open import raw_target
from kineto_trace.open.raw_target import FoundCounters, counter_rows, load_kineto_target, load_target
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.spool.counter_samples import (
    CounterHeader,
    SampledMetric,
    TargetGpus,
    row_type,
    write_header,
    write_rows,
)
from kineto_trace.spool.kineto_file import OnDemandRequest, kineto_file
from kineto_trace.spool.raw_records import RawWriter
from kineto_trace.store.parquet_folder import load_columns, save_columns
from kineto_trace.structure.activity_links import whole_steps
from support.peers.on_demand_kineto import trace_text
from support.trace_files import traces
from support.trace_files.declared import packed
from support.trace_files.h200 import make_spool, recording, string_entry, target_of
from support.xla.messages import PlaneMaker, begun_at, space

RECORDING = "mlp-cupti130001"
TRACE_ID = 42
INFO = TargetInfo(capture_id="c1", host="node7", pid=99, process_name="python", labels={"team": "vision"}, rank=3)
WHOLE = trace_text(TRACE_ID)
HAS_BOTH = [{"id": 0, "uuid": "GPU-1"}, {"id": 1, "uuid": "GPU-0"}]
ADDRESSES = {"GPU-0": "0000:c0:00.0", "GPU-1": "0000:c1:00.0"}
PLACED: list[dict[str, Any]] = [{"id": 0, "pci_bus_id": "0000:c1:00.0"}, {"id": 1, "pci_bus_id": "0000:c0:00.0"}]


def add_ops(target_dir: Path, records: list[bytes], source: str = "torch_ops") -> None:
    with RawWriter(target_dir / "raw" / source, source=source, format="torch_ops/1", metadata={}) as writer:
        writer.append_buffer(b"".join(records), sequence=0, records=len(records))
        writer.append_strings(string_entry(1, SPACE_OP_NAME, b"aten::mm") + string_entry(2, SPACE_OP_NAME, b"my range"))
        writer.append_strings(string_entry(7, SPACE_TORCH_THREAD, (1).to_bytes(8, "little")))
        writer.finish(metadata={}, record_bytes={}, records=len(records), dropped=0)


def op(start: int, end: int, thread: int, *, name: int = 1, scope: int = 0) -> bytes:
    return OP.pack(start, end, name, -1, 0, 0, thread, 0, 0, scope, 0, 0, 0)


def test_kernels_and_launches_belong_to_the_op_that_encloses_the_launch(tmp_path: Path) -> None:
    make_spool(tmp_path, RECORDING)
    bare = load_target(tmp_path).trace
    calls = bare.table("cuda_runtime")
    launch = int((calls["correlation"] == bare.table("kernel")["correlation"].max()).argmax())
    start, end, thread = (int(column[launch]) for column in (calls["start"], calls.end(), calls["thread"]))
    add_ops(
        tmp_path,
        [op(start - 5, end + 5, thread), op(start - 10, end + 10, thread, name=2, scope=7), op(start, end, thread + 1)],
    )
    trace = load_target(tmp_path).trace
    [annotation] = trace.table("user_annotation")["id"].tolist()
    [mine] = trace.table("cpu_op")["id"][trace.table("cpu_op")["thread"] == thread].tolist()
    assert trace.table("cuda_runtime")["external_id"][launch] == mine
    kernels = trace.table("kernel")
    linked = kernels["external_id"] == mine
    assert set(kernels["correlation"][linked].tolist()) == {int(calls["correlation"][launch])}
    image = trace.table("gpu_user_annotation")
    assert image["external_id"].tolist() == [annotation]
    assert image["start"][0] <= kernels["start"][linked].min()
    assert image.end()[0] >= kernels.end()[linked].max()


def test_work_on_an_intel_gpu_belongs_to_the_op_that_submitted_it_although_no_call_was_recorded(tmp_path: Path) -> None:
    start, _ = recording(RECORDING).window
    target_of(recording(RECORDING)).write(tmp_path)
    add_ops(tmp_path, [op(start + 100, start + 200, 7), op(start + 300, start + 400, 8)])
    schema = schema_of("1.1")
    kernels = [
        packed(schema, 1, start_timestamp=start + 900, end_timestamp=start + 950, append_timestamp=at, thread_id=thread)
        for at, thread in ((start + 350, 8), (start + 150, 7), (start + 150, 9))
    ]
    with RawWriter(tmp_path / "raw" / "pti", source="pti", format="pti/1", metadata={"pti_version": "1.1.0"}) as writer:
        writer.append_buffer(b"".join(b"\1\0\0\0" + kernel[4:] for kernel in kernels), sequence=0, records=3)
        writer.finish(metadata={}, record_bytes={1: 184}, records=3, dropped=0)
    trace = load_target(tmp_path).trace
    ids = dict(zip(trace.table("cpu_op")["thread"].tolist(), trace.table("cpu_op")["id"].tolist(), strict=True))
    assert trace.table("kernel")["external_id"].tolist() == [ids[8], ids[7], 0]


def test_iterations_are_annotations_and_everything_has_its_count(tmp_path: Path) -> None:
    start, end = recording(RECORDING).window
    middle = (start + end) // 2
    thread = recording(RECORDING).info["main_tid"]
    make_spool(tmp_path, RECORDING, iterations=[[4, start - 10], [5, middle], [6, end + 10]], iteration_thread=thread)
    add_ops(tmp_path, [op(middle + 5, middle + 10, thread), op(1, 2, thread)])
    conversion = convert_target(tmp_path, formats=[])
    assert conversion.summary["activities"]["user_annotation"] == 2
    assert conversion.summary["activities"]["cpu_op"] == 1
    assert conversion.summary["out_of_window"] == 1
    trace = load_target(tmp_path).trace
    names = [trace.strings[number] for number in trace.table("user_annotation")["name"].tolist()]
    assert names == ["ProfilerStep#4", "ProfilerStep#5"]


def test_ids_of_two_sources_differ(tmp_path: Path) -> None:
    start, _ = recording(RECORDING).window
    target_of(recording(RECORDING)).write(tmp_path)
    add_ops(tmp_path, [op(start + 1, start + 2, 7), op(start + 3, start + 4, 7)])
    add_ops(tmp_path, [op(start + 5, start + 6, 7)], source="torch_ops_2")
    assert load_target(tmp_path).trace.table("cpu_op")["id"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("records", [[], [b"cut"]])
def test_a_source_without_a_record_gives_an_empty_trace(tmp_path: Path, records: list[bytes]) -> None:
    target_of(recording(RECORDING)).write(tmp_path)
    add_ops(tmp_path, records)
    loaded = load_target(tmp_path)
    assert len(loaded.trace.table("cpu_op")) == 0
    assert loaded.trace.losses.undecoded == len(records)


def test_iterations_come_from_their_own_records_however_many_there_are(tmp_path: Path) -> None:
    count, step_ns = 5000, 20_000_000
    start = traces.START_NS
    make_spool(tmp_path, RECORDING, window_start_ns=start, window_end_ns=start + count * step_ns)
    records = b"".join(STEP_MARK.pack(start + n * step_ns, n + 7, 77, 0) for n in range(count + 1))
    with RawWriter(tmp_path / "raw" / "steps", source="steps", format=STEP_MARKS_FORMAT, metadata={}) as writer:
        writer.append_buffer(records, sequence=0, records=count + 1)
        writer.finish(metadata={}, record_bytes={}, records=count + 1, dropped=0)
    loaded = load_target(tmp_path)
    found = Context(loaded.trace).get(whole_steps)
    assert (len(found), found.number[0], found.number[-1]) == (count, 7, count + 6)
    assert loaded.warnings == ()


@pytest.mark.parametrize("counted", [True, False])
def test_iterations_of_jax_have_the_agents_count_or_a_warning_says_whose_numbers_they_have(
    tmp_path: Path, counted: bool
) -> None:
    start, step_ns = traces.START_NS, 1000
    marks = [[7, start], [8, start + step_ns], [9, start + 2 * step_ns]] if counted else []
    make_spool(
        tmp_path,
        RECORDING,
        window_start_ns=start,
        window_end_ns=start + 2 * step_ns,
        iterations=marks,
        iteration_thread=77,
    )
    host = PlaneMaker("/host:CPU")
    host.line("python", [("train", at * step_ns, 900, {"_r": 1, "step_num": 900 + at}) for at in range(2)], 0)
    profile = space(host, begun_at(start))
    metadata = {"threads": {"python": [77]}}
    with RawWriter(tmp_path / "raw" / "jax", source="jax", format=XPLANE_FORMAT, metadata=metadata) as writer:
        writer.append_buffer(PART_HEAD.pack(len(profile)) + profile, sequence=0, records=1)
        writer.finish(metadata={}, record_bytes={}, records=1, dropped=0)
    loaded = load_target(tmp_path)
    table = loaded.trace.table("user_annotation")
    names = [loaded.trace.strings[number] for number in table["name"].tolist()]
    if counted:
        assert (names, loaded.warnings) == (["train", "train", "ProfilerStep#7", "ProfilerStep#8"], ())
    else:
        assert names == ["ProfilerStep#900", "ProfilerStep#901"]
        said = "iteration numbers (step_num) come from the program; the agent did not count them"
        assert loaded.warnings == (said,)


def covered_ops(target_dir: Path, dropped: int = 0, **metadata: list[list[int]] | list[int]) -> None:
    with RawWriter(target_dir / "raw" / "torch_ops", source="torch_ops", format="torch_ops/1", metadata={}) as writer:
        writer.finish(metadata=metadata, record_bytes={}, records=0, dropped=dropped)


def again(trace: Trace, form: str, folder: Path) -> Trace:
    """The trace, written and read again."""
    if form == "stored":
        save_columns(trace, folder)
        return load_columns(folder)
    path = folder / form
    with path.open("wb") as file, TextSink(file) as sink:
        if form == "trace.json":
            write_chrome(trace, sink, trace_name=form)
        else:
            write_perfetto(trace, sink)
    return open_trace(path)


@pytest.mark.parametrize("form", ["stored", "trace.json", "trace.pftrace"])
def test_a_trace_knows_what_a_source_does_not_cover_of_its_window(tmp_path: Path, form: str) -> None:
    start, end = recording(RECORDING).window
    length = end - start
    make_spool(tmp_path, RECORDING)
    early, late = start + length // 4, end - length // 4
    losing = [[start + length // 2, start + length // 2 + 1000]]
    covered_ops(tmp_path, 12, covered_ns=[early, late], losing_ns=losing)
    loaded = load_target(tmp_path)
    parts = ((start, early), (losing[0][0], losing[0][1]), (late, end))
    wanted = SourceCoverage(source="torch_ops", kinds=OP_TABLES, missing=parts, dropped=12)
    assert loaded.trace.coverage == (wanted,)
    [warning] = loaded.warnings
    assert warning.startswith("torch_ops covers 50 % of the window of ")
    assert "(12 records were dropped: buffers were full); missing: 0 ns to " in warning
    assert again(loaded.trace, form, tmp_path).coverage == (wanted,)


def test_the_coverage_of_earlier_recordings_is_unknown(tmp_path: Path) -> None:
    make_spool(tmp_path, RECORDING)
    covered_ops(tmp_path)
    assert load_target(tmp_path).trace.coverage == ()


@pytest.mark.parametrize("covered", [[5, 4], [1], ["a", "b"], [-1, 2**70], 7, None])
def test_a_coverage_that_makes_no_sense_is_unknown(tmp_path: Path, covered: Any) -> None:
    make_spool(tmp_path, RECORDING)
    covered_ops(tmp_path, covered_ns=covered, losing_ns=covered)
    assert load_target(tmp_path).trace.coverage == ()


def target_with(folder: Path, text: str | bytes) -> Path:
    OnDemandRequest(trace_id=TRACE_ID, folder="/tmp", name="x_99.json").write(folder)
    INFO.write(folder)
    kineto_file(folder).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def test_the_file_is_joined_with_what_the_daemon_knows(tmp_path: Path) -> None:
    loaded = load_kineto_target(target_with(tmp_path, trace_text(TRACE_ID)))
    target = loaded.trace.target
    assert (target.capture_id, target.host, target.labels, target.rank) == ("c1", "node7", {"team": "vision"}, 3)
    assert (target.complete, target.window_start_ns) == (True, loaded.trace.window_start_ns)
    assert len(loaded.trace.table("cpu_op")) == 2
    assert loaded.warnings == ()


def test_a_target_that_was_not_converted_is_opened_by_its_file(tmp_path: Path) -> None:
    assert len(open_trace(target_with(tmp_path, trace_text(TRACE_ID))).table("cpu_op")) == 2


def test_a_file_without_activities_is_a_trace(tmp_path: Path) -> None:
    assert not len(load_kineto_target(target_with(tmp_path, trace_text(TRACE_ID, []))).trace.table("cpu_op"))


@pytest.mark.parametrize("tenths", range(11))
def test_a_file_that_ends_too_early_is_damaged_wherever_it_ends(tmp_path: Path, tenths: int) -> None:
    """Its length differs with the times in it, which no name of a test may: the workers must collect the same tests."""
    with pytest.raises(DamagedError):
        load_kineto_target(target_with(tmp_path, WHOLE[: (len(WHOLE) - 3) * tenths // 10]))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (trace_text(TRACE_ID + 1), "has the trace id '43', not 42"),
        (json.dumps({"traceEvents": []}), "has no trace id, so"),
        (gzip.compress(WHOLE.encode()), "does not begin like a libkineto trace"),
        (json.dumps({"a": 1}), "has no traceEvents list"),
    ],
)
def test_another_file_is_not_the_trace(tmp_path: Path, text: str | bytes, why: str) -> None:
    with pytest.raises(DamagedError, match=why):
        load_kineto_target(target_with(tmp_path, text))


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
    assert elsewhere.endswith("it is not one of the devices that the process sees")
    (partitions,) = found(tmp_path, [PLACED[0], {"id": 1}, {"id": 2}], used=(0, 1, 2)).warnings
    assert "does not show which of them this is" in partitions


def test_a_gpu_that_the_process_does_not_see_and_a_mig_instance_are_told(tmp_path: Path) -> None:
    sampled(tmp_path, 3, [(100, 110)])
    (unseen,) = found(tmp_path, HAS_BOTH).warnings
    assert unseen.endswith("it is not one of the devices that the process sees")
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
    TargetGpus(notes=("sampling ended early",)).write(tmp_path)
    assert found(tmp_path, HAS_BOTH).notes == ("sampling ended early",)
    assert size == (tmp_path / "raw" / "GPU-0.counters").stat().st_size
    (tmp_path / "raw" / "gpus.json").write_bytes(b"{}" + bytes(2 << 20))
    with pytest.raises(SpoolError, match=r"gpus\.json"):
        TargetGpus.read(tmp_path)


def test_samples_that_were_taken_together_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled(tmp_path, 0, [(100, 110), (110, 120), (120, 130)])
    for function in (counter_table, samples_per_row):
        monkeypatch.setattr(raw_target, function.__name__, partial(function, max_rows=2))
    read = found(tmp_path, HAS_BOTH)
    assert read.table is not None and read.table["duration"].tolist() == [20, 10]
    assert read.warnings == ("hardware counters: too many samples to keep, so each value is the mean of 2 samples",)
