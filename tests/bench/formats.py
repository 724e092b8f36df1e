"""Speed of the trace library, compared with other tools that do the same work in the same run.

    python tests/bench/formats.py [--megabytes 100] [--repeat 5] [--skip-torch]

Decoding is compared with a memory copy of the same bytes. Writing is compared with plain Python that makes the same
events from the same columns with json.dumps (and gzip), and with Kineto's own writer on the same operators of a CPU
loop, whose file is read into columns for that. Figures are CPU seconds, the best of some repetitions, so that a busy
machine disturbs them less; what counts is the ratios. The input consists of the records of a real GPU in
tests/data/h200, without the calls that the collector does not record; each repetition has its own times and
correlations.
"""

import argparse
import gc
import gzip
import io
import json
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kineto_agent.protocol.records import SPACE_OP_NAME
from kineto_trace.decode import cupti_records
from kineto_trace.decode.cupti_layouts import LAYOUTS
from kineto_trace.decode.iterations import whole_extent
from kineto_trace.decode.torch import kineto_json, torch_ops
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.perfetto.perfetto_reader import load_perfetto
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.text_sinks import GzipSink, TextSink
from kineto_trace.model.trace import StringTable, Table, Trace
from kineto_trace.spool import raw_records
from kineto_trace.spool.raw_records import Chunk, RawSource
from kineto_trace.store.parquet_folder import save_columns
from support.trace_files import python_writer
from support.trace_files.h200 import metadata_of, recording, strings_of, target_of

RECORDING = "mlp-cupti130001"
BUFFER_BYTES = 4 << 20
PYTHON_EVENTS = 60_000  # activities that Python has to write; its time per event does not depend on the number
RUNTIME, DRIVER = 5, 4


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. goal: the wanted ratio; 0 for none."""

    what: str
    ours: str
    theirs: str
    ratio: float
    goal: float


def cpu_seconds(work: Callable[[], Any], repeat: int, before: Callable[[], Any] = gc.collect) -> float:
    """The best CPU time of some repetitions."""
    best = float("inf")
    for _ in range(repeat):
        before()
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


# ------------------------------------------------------------ input


def selected_records() -> bytes:
    """The recording without the calls that a trace does not show."""
    recorded = recording(RECORDING)
    shown = {(RUNTIME, row["args"]["cbid"]) for row in recorded.kineto_rows("cuda_runtime")}
    shown |= {(DRIVER, row["args"]["cbid"]) for row in recorded.kineto_rows("cuda_driver")}
    records = []
    for data in recorded.buffers:
        at = 0
        while at < len(data):
            kind, cbid = struct.unpack_from("<II", data, at)
            size = recorded.record_bytes[kind]
            if kind not in (RUNTIME, DRIVER) or (kind, cbid) in shown:
                records.append(data[at : at + size])
            at += size
    return b"".join(records)


def vary(data: Any, records: bytes, first: int = 0) -> Any:
    """Gives every repetition of the records its own times and correlations, and slightly different lengths.

    first: number of the first repetition, if others precede it.
    """
    layout = LAYOUTS[recording(RECORDING).info["cupti_version"]].records
    known = {kind.kind: layout[kind.layout] for kind in cupti_records.KINDS}
    places = []
    at = 0
    while at < len(records):
        record = known[struct.unpack_from("<I", records, at)[0]]
        start, end = record.offsets["start"], record.offsets["end"]
        places.append((at + start, at + end, at + record.offsets.get("correlationId", start)))
        at += record.size
    starts, ends, correlations = (np.array(column) for column in zip(*places, strict=True))
    repetitions = len(data) // len(records)
    times = data.view(np.uint64).reshape(repetitions, -1)
    step = np.arange(first, first + repetitions, dtype=np.uint64)[:, None]
    length = np.uint64(recording(RECORDING).window[1] - recording(RECORDING).window[0])
    times[:, starts // 8] += step * length
    noise = np.random.default_rng(1).integers(0, 900, (repetitions, len(ends)), dtype=np.uint64)
    times[:, ends // 8] += step * length + noise
    numbers = data.view(np.uint32).reshape(repetitions, -1)
    own = correlations != starts  # some records have no correlation
    numbers[:, correlations[own] // 4] += (step * np.uint64(10_000)).astype(np.uint32)
    return data


def make_source(megabytes: int, first_buffer: int = 0) -> RawSource:
    """Buffers of 4 MB in memory with the same records over and over. first_buffer: number of buffers before them."""
    recorded = recording(RECORDING)
    records = selected_records()
    per_buffer = BUFFER_BYTES // len(records)
    size = per_buffer * len(records)
    count = max(1, megabytes * 1_000_000 // size)
    data = vary(np.frombuffer(records * (per_buffer * count), np.uint8).copy(), records, first_buffer * per_buffer)
    strings, _ = raw_records.parse_strings(strings_of(recorded))
    return RawSource(
        source="cupti",
        format="cupti/1",
        metadata=metadata_of(recorded),
        record_bytes=recorded.record_bytes,
        records=0,
        dropped=0,
        data=data.data,
        chunks=tuple(Chunk(sequence=i, records=0, offset=i * size, size=size) for i in range(count)),
        strings=strings,
        torn=0,
    )


def make_trace(source: RawSource) -> Trace:
    strings = StringTable()
    tables = cupti_records.decode(source, strings).tables
    recorded = recording(RECORDING)
    start, _ = recorded.window
    end = max(int(table.end().max()) for table in tables.values() if len(table))
    return Trace(
        target=target_of(recorded),
        strings=tuple(strings.strings),
        tables=tables,
        window_start_ns=start,
        window_end_ns=end,
        devices=source.metadata["devices"],
    )


# ------------------------------------------------------------ measurements


def decoding(source: RawSource, repeat: int) -> list[Row]:
    """Measures records to columns: the native pass into warm memory, and everything from buffers to tables."""
    data = np.frombuffer(source.data, np.uint8)
    copy = data.copy()
    buffers = cupti_records.Buffers(source, LAYOUTS[source.metadata["cupti_version"]])
    records = buffers.read()[0]

    def native() -> None:
        buffers.rewind()
        buffers.read()

    def warm_copy() -> None:
        copy[:] = data

    best_native, best_copy = float("inf"), float("inf")
    for _ in range(2 * repeat):  # by turns: both see the same state of the machine
        best_native = min(best_native, cpu_seconds(native, 1))
        best_copy = min(best_copy, cpu_seconds(warm_copy, 1))
    whole = cpu_seconds(lambda: cupti_records.decode(source, StringTable()), repeat)
    fresh_copy = cpu_seconds(lambda: data.copy(), repeat)

    def line(what: str, ours: float, theirs: float, goal: float) -> Row:
        speed = f"{ours * 1e3:.1f} ms, {records / ours / 1e6:.0f} M records/s"
        return Row(what, speed, f"memcpy {theirs * 1e3:.1f} ms", theirs / ours, goal)

    return [
        line(f"decode {data.nbytes / 1e6:.0f} MB, {records:,} records (native pass)", best_native, best_copy, 0.5),
        line("the same with counting, fresh memory and names", whole, fresh_copy, 0),
    ]


def writing(trace: Trace, repeat: int, folder: Path) -> list[Row]:
    """Measures writing Chrome JSON from the columns, plain and compressed, and plain Python that does the same."""
    plain, packed, python = folder / "trace.json", folder / "trace.json.gz", folder / "python.json"

    def write(path: Path, sink_type: type[TextSink]) -> None:
        with path.open("wb", buffering=0) as file, sink_type(file) as sink:
            write_chrome(trace, sink, trace_name=path.name)

    ours = cpu_seconds(lambda: write(plain, TextSink), repeat, lambda: plain.unlink(missing_ok=True))
    ours_nowhere = cpu_seconds(lambda: write_nowhere(trace), repeat)
    begin = time.perf_counter()
    write(packed, GzipSink)
    wall = time.perf_counter() - begin
    ours_gzip = cpu_seconds(lambda: write(packed, GzipSink), repeat, lambda: packed.unlink(missing_ok=True))
    events = plain.read_bytes().count(b'\n{"ph":"')
    part = python_writer.part_of(trace, PYTHON_EVENTS)
    count = python_writer.write(part, io.StringIO())

    def in_python() -> None:
        with python.open("w") as file:
            python_writer.write(part, file)

    def in_python_gzip() -> None:
        with gzip.open(python, "wt") as file:
            python_writer.write(part, file)

    ready = list(python_writer.events(part))
    theirs = cpu_seconds(in_python, 3) / count
    dumps = cpu_seconds(lambda: [json.dumps(event) for event in ready], 3) / count
    theirs_gzip = cpu_seconds(in_python_gzip, 1) / count
    size, size_gzip = plain.stat().st_size, packed.stat().st_size

    def line(what: str, seconds: float, other: str, each: float, goal: float) -> Row:
        return Row(
            what,
            f"{seconds * 1e3:.0f} ms, {seconds / events * 1e9:.0f} ns an event",
            f"{other} {each * 1e9:.0f} ns",
            each / (seconds / events),
            goal,
        )

    return [
        line(f"Chrome JSON, {events:,} events, {size / 1e6:.0f} MB", ours, "dict + json.dumps", theirs, 25),
        line("the same, formatting alone", ours_nowhere, "json.dumps of ready dicts", dumps, 25),
        line(f".json.gz, {size_gzip / 1e6:.0f} MB ({wall:.2f} s wall)", ours_gzip, "with gzip", theirs_gzip, 40),
    ]


def perfetto(trace: Trace, repeat: int, folder: Path) -> list[Row]:
    """Measures Perfetto's own format beside the compressed Chrome trace of the same columns, and reading it back."""
    native, packed = folder / "trace.pftrace", folder / "trace.json.gz"

    def write(path: Path, sink_type: type[TextSink]) -> None:
        with path.open("wb", buffering=0) as file, sink_type(file) as sink:
            if path is native:
                write_perfetto(trace, sink)
            else:
                write_chrome(trace, sink, trace_name=path.name)

    ours, theirs = float("inf"), float("inf")
    for _ in range(repeat):  # by turns
        ours = min(ours, cpu_seconds(lambda: write(native, TextSink), 1, lambda: native.unlink(missing_ok=True)))
        theirs = min(theirs, cpu_seconds(lambda: write(packed, GzipSink), 1, lambda: packed.unlink(missing_ok=True)))
    events = sum(len(table) for table in trace.tables.values())
    read = cpu_seconds(lambda: load_perfetto(native), 1)
    what = f".pftrace, {events:,} activities, {native.stat().st_size / 1e6:.0f} MB"
    speed = f"{ours * 1e3:.0f} ms, {ours / events * 1e9:.0f} ns an activity"
    back = f"{read:.2f} s, {read / events * 1e5:.2f} s per 100k"
    return [
        Row(what, speed, f".json.gz {theirs * 1e3:.0f} ms", theirs / ours, 1),
        Row("the same read back", back, "", 0, 0),
    ]


def storing(trace: Trace, repeat: int, folder: Path) -> list[Row]:
    """Measures storing columns as Parquet."""
    activities = sum(len(table) for table in trace.tables.values())
    seconds = cpu_seconds(lambda: save_columns(trace, folder / "columns"), repeat)
    size = sum(path.stat().st_size for path in (folder / "columns").iterdir())
    speed = f"{seconds * 1e3:.0f} ms, {size / activities:.1f} bytes an activity"
    return [Row(f"Parquet columns, {activities:,} activities", speed, "", 0, 0)]


class Nowhere(io.RawIOBase):
    """A file that discards everything written to it."""

    def write(self, data: Any) -> int:
        return len(data)


def write_nowhere(trace: Trace) -> None:
    """Measures formatting without a file, as json.dumps does it."""
    with TextSink(Nowhere()) as sink:
        write_chrome(trace, sink, trace_name="trace.json")


def memory(source: RawSource) -> list[Row]:
    """Peak memory that writing needs in addition to the columns, for one size of trace and for a fourth of it."""
    quarter = len(source.chunks) // 4 or 1
    small = RawSource(**{**{n: getattr(source, n) for n in RawSource.__slots__}, "chunks": source.chunks[:quarter]})
    peaks = []
    for part in (small, source):
        trace = make_trace(part)
        tracemalloc.start()
        with GzipSink(Nowhere()) as sink:
            write_chrome(trace, sink, trace_name="trace.json.gz")
        peaks.append(tracemalloc.get_traced_memory()[1] / 1e6)
        tracemalloc.stop()
    return [Row("peak memory of writing .json.gz", f"{peaks[1]:.0f} MB", f"a fourth of it: {peaks[0]:.0f} MB", 0, 0)]


# ------------------------------------------------------------ Kineto


def operators(repeat: int, folder: Path) -> list[Row]:
    """Measures CPU operators with inputs and links, written by Kineto, json.dumps and us, and reading our records."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        train(1_000)
    path = folder / "kineto.json"
    kinetos = cpu_seconds(lambda: export_once(profiler, path), 1)
    kinetos_events = path.read_bytes().count(b'"ph": ')
    trace = trace_of_kinetos(path)
    ours_path = folder / "ours.json"

    def write() -> None:
        with ours_path.open("wb", buffering=0) as file, TextSink(file) as sink:
            write_chrome(trace, sink, trace_name="ours.json")

    ours = cpu_seconds(write, repeat)
    nowhere = cpu_seconds(lambda: write_nowhere(trace), repeat)
    rows = json.loads(ours_path.read_text())["traceEvents"]
    dumps = cpu_seconds(lambda: [json.dumps(row) for row in rows], 3) / len(rows)
    kinetos /= kinetos_events

    def line(what: str, seconds: float, other: str, each: float, goal: float) -> Row:
        mine = seconds / len(rows)
        return Row(what, f"{mine * 1e9:.0f} ns an event", f"{other} {each * 1e9:.0f} ns", each / mine, goal)

    return [
        line(f"operators with inputs, {len(rows):,} events", ours, "Kineto", kinetos, 5),
        line("the same, formatting alone", nowhere, "json.dumps of ready dicts", dumps, 25),
        reading_operators(trace.table("cpu_op"), repeat),
    ]


def train(steps: int) -> None:
    import torch

    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
    values = torch.randn(4, 16)
    for _ in range(steps):
        layers(values).sum().backward()


def trace_of_kinetos(path: Path) -> Trace:
    """Reads Kineto's file into our columns."""
    data = path.read_bytes()
    source = memory_source(kineto_json.FORMAT, data, {})
    strings = StringTable()
    tables = kineto_json.decode(source, strings).tables
    start, end = whole_extent(tables)
    return Trace(
        target=target_of(recording(RECORDING)),
        strings=tuple(strings.strings),
        tables=tables,
        window_start_ns=start,
        window_end_ns=end,
    )


def memory_source(format: str, data: bytes, strings: dict[int, dict[int, bytes]]) -> RawSource:
    """One buffer of a source, in memory."""
    chunk = Chunk(sequence=0, records=0, offset=0, size=len(data))
    return RawSource(
        source="torch_ops",
        format=format,
        metadata={},
        record_bytes={},
        records=0,
        dropped=0,
        data=memoryview(data),
        chunks=(chunk,),
        strings=strings,
        torn=0,
    )


def reading_operators(ops: Table, repeat: int) -> Row:
    """Measures reading the observer's records of these operators, in the order in which they end, into columns."""
    records = np.zeros(len(ops), torch_ops.RECORD)
    for name in ("start", "name", "sequence", "forward_thread", "thread", "scope"):
        records[name] = ops[name]
    records["end"], records["name"] = ops.end(), records["name"] + 1
    records = np.tile(records[np.argsort(ops.end(), kind="stable")], max(1, 1_000_000 // len(ops)))
    names = {SPACE_OP_NAME: {number: b"op %d" % number for number in np.unique(records["name"]).tolist()}}
    source = memory_source(torch_ops.FORMAT, records.tobytes(), names)
    seconds = cpu_seconds(lambda: torch_ops.decode(source, StringTable()), repeat)
    speed = f"{seconds * 1e3:.0f} ms, {len(records) / seconds / 1e6:.1f} M records/s"
    return Row(f"decode {len(records):,} records of operators", speed, "", 0, 0)


def export_once(profiler: Any, path: Path) -> None:
    profiler.export_chrome_trace(str(path))


# ------------------------------------------------------------ report


def report(rows: list[Row]) -> str:
    lines = ["| what | ours | beside | ratio | goal |", "|---|---|---|---|---|"]
    for row in rows:
        ratio = f"{row.ratio:.2f}" if 0 < row.ratio < 10 else f"{row.ratio:.0f}" if row.ratio else ""
        lines.append(f"| {row.what} | {row.ours} | {row.theirs} | {ratio} | {row.goal:g} |".replace("| 0 |", "| |"))
    return "\n".join(lines)


def main() -> int:
    """Prints the table. Exit status 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="raw records to decode")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--skip-torch", action="store_true", help="leave Kineto's writer out")
    parser.add_argument("--folder", type=Path, help="where files are written (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        source = make_source(options.megabytes)
        rows = decoding(source, options.repeat)
        trace = make_trace(source)
        rows += writing(trace, options.repeat, folder)
        rows += perfetto(trace, options.repeat, folder)
        rows += storing(trace, options.repeat, folder)
        rows += memory(source)
        if not options.skip_torch:
            rows += operators(options.repeat, folder)
    print(report(rows))
    return 1 if any(row.goal and row.ratio < row.goal for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
