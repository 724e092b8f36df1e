"""A target's folder: target.json, and source.json, buffers.bin and strings.bin of two sources, through the decoder."""

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from kineto_agent.protocol.records import DECLARED_FORMAT
from kineto_agent.protocol.schema import HEADED, SCHEMA_KEY, to_json
from kineto_trace.conversion.worker_job import answer
from kineto_trace.model.target_info import TARGET_FILE
from kineto_trace.spool.raw_records import BUFFERS_FILE, SOURCE_FILE, STRINGS_FILE
from support.accelerators.npu import NAMES, NPU
from support.rocm import records as rocm
from support.trace_files.declared import a_record_of_each_kind
from support.trace_files.h200 import RECORDINGS, string_entry

from fuzz import mutate, records, xla_sources
from fuzz.parts import changed_json, joined, parted

SOURCES = 2
FORMATS = ("chrome-json", "perfetto")
EXPECTED = ("SPOOL_INVALID", "CUPTI_UNKNOWN_VERSION", "ROCPROFILER_UNKNOWN_VERSION", "UNKNOWN_LAYOUT")
SEED_BYTES = 1300  # of each buffer
_folder = Path(tempfile.mkdtemp(prefix="fuzz-spool-"))


def play(data: bytes) -> None:
    target = _folder / "target"
    shutil.rmtree(target, ignore_errors=True)
    info, *rest = parted(data, 1 + 3 * SOURCES)
    for number in range(SOURCES):
        parts = rest[3 * number : 3 * number + 3]
        if number and not any(parts):
            continue
        source = target / "raw" / f"s{number}"
        source.mkdir(parents=True)
        for name, content in zip((SOURCE_FILE, BUFFERS_FILE, STRINGS_FILE), parts, strict=True):
            (source / name).write_bytes(content)
    (target / TARGET_FILE).write_bytes(info)
    said = json.loads(_quiet_answer(json.dumps({"id": 1, "target_dir": str(target), "formats": FORMATS})))
    if not said["ok"]:
        assert said["reason_code"] in EXPECTED, said
    elif said["conversion"]["traced"]:
        json.loads((target / "trace.json").read_bytes(), parse_constant=_no_constant)


def _quiet_answer(line: str) -> str:
    said = answer(line)
    sys.stderr.flush()
    return said


def _no_constant(text: str) -> NoReturn:
    raise AssertionError(f"the trace has {text}, which is no JSON")


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One of the files: its values, or its bytes."""
    parts = parted(data, 1 + 3 * SOURCES)
    at = rng.randrange(len(parts))
    parts[at] = changed_json(parts[at], rng) if at in (0, 1, 4) else mutate.damaged(parts[at], rng, 12)
    return joined(*parts)


def seeds() -> Iterator[bytes]:
    """Every pair of sources that there is, small."""
    for original in (records.recorded(RECORDINGS[0]), records.documents(), xla_sources.profiled()):
        info = json.dumps(original.info).encode()
        for source in original.sources:
            yield joined(info, *_files(source), b"", b"", b"")
        yield joined(info, *_files(original.sources[0]), *_files(original.sources[1]))
    for schema in (NPU, NPU._replace(framing=HEADED, clock="device")):
        own = records.Source(
            name="npu", format=DECLARED_FORMAT, metadata={SCHEMA_KEY: to_json(schema)}, record_bytes={},
            buffers=(a_record_of_each_kind(schema),), strings=string_entry(1, NAMES, b"_Z3addPf"),
        )  # fmt: skip
        yield joined(info, *_files(own), b"", b"", b"")
    yield joined(info, *_files(rocm.fuzz_source()), b"", b"", b"")


def _files(source: records.Source) -> tuple[bytes, bytes, bytes]:
    about: dict[str, Any] = {"source": source.name, "format": source.format, "metadata": source.metadata}
    about |= {"record_bytes": source.record_bytes, "records": 10, "dropped": 0, "bytes": 1}
    buffers = [data[:SEED_BYTES] for data in source.buffers[:2]]
    return json.dumps(about).encode(), records.chunked(buffers, list(range(len(buffers)))), source.strings[:SEED_BYTES]
