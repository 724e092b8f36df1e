"""docs/how-to-add.md followed: a kind of CUPTI activity with a table of its own, the GPU's decompression of memory."""

import json
from pathlib import Path

import pytest
from support.machine.source_tree import SourceTree, leads_to

pytestmark = pytest.mark.slow

MAX_EDITS = 4
TYPE = '    "gpu_decompress": (54,),\n'
RECORD = """    Record(
        name="MEM_DECOMPRESS",
        struct="MemDecompress",
        fields=_GPU | {"numberOfOperations": 4, "sourceBytes": 8, "channelID": 4, "channelType": 4},
    ),
"""
ROW = """    RecordKind(
        54,
        "MEM_DECOMPRESS",
        "gpu_decompress",
        _GPU
        | {"operations": "numberOfOperations", "bytes": "sourceBytes"}
        | {"channel": "channelID", "channel_type": "channelType"},
        name_of=lambda _: "Decompress",
    ),
"""
TABLE = """    ActivityTable(
        name="gpu_decompress",
        row=ViewerRow.GPU,
        meaning="Batches of memory that a GPU decompressed.",
        columns=(
            *GPU,
            Column("operations", "uint32", "in the batch"),
            Column("bytes", "uint64", "read"),
            *QUEUE,
        ),
        arguments=(*GPU_ARGUMENTS, Arg("operations", "operations", U32)),
        categories=("gpu_decompress",),
    ),
"""
# What the generator would write if it had the vendor's headers.
GENERATE = """
import sys

sys.path.insert(0, "daemon/native")
import generate_cupti_layouts as tool
from kineto_trace.decode.cupti_layouts import LAYOUTS

names = "deviceId contextId streamId channelID channelType correlationId numberOfOperations".split()
offsets = [(name, 4 + 4 * place) for place, name in enumerate(names)]
offsets += [("sourceBytes", 32), ("start", 48), ("end", 56)]
tables = {}
for version, known in LAYOUTS.items():
    tables[version] = {
        name: tool.Layout(struct=name, size=record.size, offsets=tuple(record.offsets.items()))
        for name, record in known.records.items()
    }
    if version >= 26:  # CUDA 12.8 brought it
        tables[version]["MEM_DECOMPRESS"] = tool.Layout(struct="MEM_DECOMPRESS", size=64, offsets=tuple(offsets))
text = tool.render_layouts(tables, {version: known.release for version, known in LAYOUTS.items()})
tool.LAYOUTS_FILE.write_text(text)
"""
USE = """
import json
from pathlib import Path

import kineto_trace as kt
from kineto_agent.sources.registry import ACTIVITY_TYPES
from kineto_trace.decode.cupti_layouts import LAYOUTS, WIDTHS
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.raw_records import RawWriter
from kineto_trace.sql import Database
from kineto_trace.sql.arrow_tables import SqlSource

VERSION, T = 26, 1_700_000_000_000_000_000


def record(kind, layout, **fields):
    known = LAYOUTS[VERSION].records[layout]
    raw = bytearray(known.size)
    raw[:4] = kind.to_bytes(4, "little")
    for name, value in fields.items():
        at, width = known.offsets[name], WIDTHS[layout][name]
        raw[at : at + width] = value.to_bytes(width, "little")
    return bytes(raw)


call = record(4, "API", cbid=7, start=T, end=T + 2000, threadId=9, correlationId=5)
work = record(
    54, "MEM_DECOMPRESS", deviceId=1, contextId=2, streamId=7, correlationId=5, start=T + 3000, end=T + 4500,
    numberOfOperations=3, sourceBytes=4096, channelID=6, channelType=2,
)
target = Path("target")
metadata = {"cupti_version": VERSION}
with RawWriter(target / "raw/cupti", source="cupti", format="cupti/1", metadata=metadata) as raw:
    raw.append_buffer(call + work, sequence=0, records=2)
    raw.finish(metadata={}, record_bytes={54: 64}, records=2, dropped=0)
TargetInfo(capture_id="c", host="h", pid=9, process_name="p").write(target)
trace = kt.open_trace(target)
kt.export_trace(trace, "trace.json")
kt.export_trace(trace, "trace.pftrace")
events = json.loads(Path("trace.json").read_text())["traceEvents"]


def columns(opened):
    table = opened.table("gpu_decompress")
    return {name: table[name].tolist() for name in table.columns if name not in ("start", "name")}


back = [kt.open_trace(name) for name in ("trace.json", "trace.pftrace")]
sources = [SqlSource(name="", context=kt.Context(trace))]
found = {
    "offered": "gpu_decompress" in ACTIVITY_TYPES,
    "columns": columns(trace),
    "back": [columns(opened) == columns(trace) for opened in back],
    "events": [event for event in events if event.get("cat") == "gpu_decompress"],
    "flows": [event["ph"] for event in events if event.get("cat") == "ac2g"],
    "lanes": [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 1],
    "sql": Database(sources).query("SELECT name, operations, launch_ns FROM gpu_decompress").rows(),
}
for opened in (trace, *back):
    for name, view in kt.views().items():
        for compat in (kt.Compat.NONE, *view.compat):
            try:
                kt.run_view(name, opened, compat=compat)
            except kt.TraceError:
                pass  # some views need more than this trace has
print(json.dumps(found))
"""
COLUMNS = {
    "duration": [1500], "device": [1], "context": [2], "stream": [7], "correlation": [5], "external_id": [0],
    "operations": [3], "bytes": [4096], "graph_id": [0], "graph_node_id": [0], "channel": [6], "channel_type": [2],
}  # fmt: skip
EVENT = {
    "ph": "X", "cat": "gpu_decompress", "name": "Decompress", "pid": 1, "tid": 7, "ts": 3813830000003.0, "dur": 1.5,
    "args": {
        "device": 1, "context": 2, "stream": 7, "correlation": 5, "graph id": 0, "graph node id": 0, "channel": 6,
        "channel_type": 2, "bytes": 4096, "operations": 3,
    },
}  # fmt: skip


def test_an_activity_type_takes_four_edits_and_then_has_its_table_its_rows_in_viewers_and_sql(tmp_path: Path) -> None:
    tree = SourceTree(tmp_path)
    tree.insert("agent/kineto_agent/sources/cupti/activity_kinds.py", '"gpu_memset": (2,),\n', TYPE)
    tree.insert("daemon/native/generate_cupti_layouts.py", '"memoryKind": 2} | _GRAPH),\n', RECORD)
    tree.insert("daemon/kineto_trace/decode/cupti_records.py", '"EXTERNAL_CORRELATION"),\n', ROW)
    tree.insert("daemon/kineto_trace/model/activity_tables.py", 'categories=("gpu_memset", "memset"),\n    ),\n', TABLE)
    tree.python("-c", GENERATE)
    assert "### gpu_decompress" in tree.python("docs/generate_views.py")
    assert json.loads(tree.python("-c", USE)) == {
        "offered": True,
        "columns": COLUMNS,
        "back": [True, True],
        "events": [EVENT],
        "flows": ["s", "f"],
        "lanes": ["stream 7 "],
        "sql": [{"name": "Decompress", "operations": 3, "launch_ns": 1_700_000_000_000_000_000}],
    }
    assert len(tree.edited) <= MAX_EDITS
    assert all(leads_to("An activity type", path) for path in tree.edited)
