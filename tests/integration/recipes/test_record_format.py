"""docs/how-to-add.md followed: a source of the agent whose records have a format of their own."""

import json
from pathlib import Path

import pytest
from support.machine.source_tree import SourceTree, leads_to

pytestmark = pytest.mark.slow

FOLDER = "agent/kineto_agent/sources/beats"
SOURCE = '''"""Records one beat."""

import time
from typing import Any, Dict, FrozenSet, List

from kineto_agent.protocol.records import BEAT, BEATS_FORMAT
from kineto_agent.sources.arena_writer import ArenaWriter
from kineto_agent.sources.interface import SourceCounts, SourceOutcome, SourceRequest


class BeatsSource:
    """One beat for each recording."""

    name = "beats"
    on_request: FrozenSet[str] = frozenset()

    def activity_types(self) -> List[str]:
        return ["beat"]

    def would_yield(self, request: SourceRequest) -> bool:
        return False

    def prepare(self, request: SourceRequest) -> "BeatsSession":
        return BeatsSession(ArenaWriter(self.name, request.buffer_limit_bytes, 0))


class BeatsSession:
    """One recording."""

    format = BEATS_FORMAT
    yields = False

    def __init__(self, writer: ArenaWriter) -> None:
        self.metadata: Dict[str, Any] = {}
        self.arena_fd = writer.fd
        self._writer = writer

    def start(self) -> None:
        self._writer.append(BEAT, time.time_ns(), 77)

    def counts(self) -> SourceCounts:
        return self._writer.counts()

    def stop(self) -> SourceOutcome:
        self._writer.finish()
        return SourceOutcome(self.counts(), {}, [], detach_ns=0, cpu_ns=0)

    def give_way(self) -> None:
        pass

    def close(self) -> None:
        self._writer.close()
'''
FIELDS = """
BEATS_FORMAT = "beats/1"
BEAT_FIELDS = {"time": "q", "thread": "I"}
BEAT = packed(BEAT_FIELDS)

"""
DECODER = '''"""Beats as Python functions of no length."""

import numpy as np
from kineto_agent.protocol.records import BEAT_FIELDS, BEATS_FORMAT

from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow, fixed_records, record_dtype
from kineto_trace.model.trace import NO_ROW, StringTable, make_table
from kineto_trace.spool.raw_records import RawSource

FORMAT = BEATS_FORMAT


def decode(source: RawSource, strings: StringTable, _window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all buffers of a source."""
    beats, cut = fixed_records(source, record_dtype(BEAT_FIELDS))
    columns = {"start": beats["time"], "thread": beats["thread"], "parent": np.full(len(beats), NO_ROW)}
    columns["name"] = np.full(len(beats), strings.add("beat"))
    table = make_table("python_function", len(beats), columns)
    return Decoded(tables={table.kind: table}, records=len(beats), undecoded=cut)
'''
# What the agent's thread and the daemon do with a source.
USE = """
import json
from pathlib import Path

import kineto_trace as kt
from kineto_agent.sources import registry
from kineto_agent.sources.interface import SourceRequest
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.raw_records import RawWriter
from support.agent.arenas import ArenaReader

(choice,) = registry.choose(registry.sources(), ["beat"]).choices
session = choice.source.prepare(SourceRequest(choice.activity_types, 1 << 20, {}))
session.start()
session.stop()
target = Path("target")
name = choice.source.name
with ArenaReader(session.arena_fd) as arena:
    with RawWriter(target / "raw" / name, source=name, format=session.format, metadata={}) as raw:
        for buffer in arena.ready():
            raw.append_buffer(buffer.data, sequence=buffer.sequence, records=buffer.records)
        raw.finish(metadata={}, record_bytes={}, records=session.counts().records, dropped=0)
session.close()
TargetInfo(capture_id="c", host="h", pid=9, process_name="p").write(target)
kt.export_trace(kt.open_trace(target), "trace.json")
events = json.loads(Path("trace.json").read_text())["traceEvents"]
print(json.dumps([(event["name"], event["tid"]) for event in events if event.get("cat") == "python_function"]))
"""


def test_a_source_takes_a_folder_and_a_row_and_its_format_a_module_and_a_row(tmp_path: Path) -> None:
    tree = SourceTree(tmp_path)
    tree.write(f"{FOLDER}/__init__.py", '"""Records beats."""\n')
    tree.write(f"{FOLDER}/beats.py", SOURCE)
    tree.insert(
        "agent/kineto_agent/sources/registry.py",
        '    _Row("cupti.gpu_activities", "CuptiSource", _has_nvidia),\n',
        '    _Row("beats.beats", "BeatsSource", _everywhere),\n',
    )
    tree.insert("agent/kineto_agent/protocol/records.py", "MEMORY_EVENT = packed(MEMORY_EVENT_FIELDS)\n", FIELDS)
    tree.write("daemon/kineto_trace/decode/beats.py", DECODER)
    raw_target = "daemon/kineto_trace/open/raw_target.py"
    tree.insert(raw_target, "DECODERS: Mapping[str, Decode] = {\n", "    beats.FORMAT: beats.decode,\n")
    tree.insert(
        raw_target, "from kineto_trace.arrays import spilled_memory\n", "from kineto_trace.decode import beats\n"
    )
    assert json.loads(tree.python("-c", USE)) == [["beat", 77]]
    assert len({path for path in tree.edited if "beats" not in path}) == 3
    assert all(leads_to("A source of the agent", path) for path in tree.edited)
