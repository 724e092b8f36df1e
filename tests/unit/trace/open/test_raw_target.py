"""Several sources of one target put together."""

from pathlib import Path
from typing import Any

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
from kineto_trace.decode.pti.pti_schemas import schema_of
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.shared.text_sinks import TextSink
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.model.trace import OP_TABLES, Trace
from kineto_trace.open.raw_target import load_target
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.spool.raw_records import RawWriter
from kineto_trace.store.parquet_folder import load_columns, save_columns
from kineto_trace.structure.activity_links import whole_steps
from support.trace_files import traces
from support.trace_files.declared import packed
from support.trace_files.h200 import make_spool, recording, string_entry, target_of
from support.xla.messages import PlaneMaker, begun_at, space

RECORDING = "mlp-cupti130001"


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
        said = "iterations have the program's own numbers (step_num): the agent has not counted them"
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
    assert "(12 records were dropped: buffers were full); missing: 0-" in warning
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
