"""What targets recorded: raw folders of every format, damaged, through the decode worker as the daemon uses it."""

import asyncio
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from google.protobuf import json_format
from kineto_agent.protocol.records import (
    GRAPH_HEAD,
    GRAPH_MAGIC,
    GRAPH_NODE,
    GRAPH_NONE,
    GRAPH_OP,
    KIND_OP_TENSORS,
    MEMORY_EVENT,
    OP,
    OP_TENSORS,
    SPACE_OP_INPUTS,
    SPACE_OP_NAME,
    SPACE_PYTHON_CODE,
    SPACE_STACK_NODE,
    SPACE_THREAD_NAME,
    SPACE_TORCH_THREAD,
    STACK_SAMPLE,
    STEP_MARK,
)
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.model.target_info import TARGET_FILE, TargetInfo
from kineto_trace.spool.raw_records import BUFFERS_FILE, CHUNK_HEADER, CHUNK_MAGIC, SOURCE_FILE, STRINGS_FILE
from kinetod.base.safe_text import clean
from kinetod.captures.result.decode_pool import DecodeError, WorkerPool
from kinetod.captures.target.conversion import checked
from kinetod.captures.target.target_description import checked_iterations
from support.agent import stack_records
from support.trace_files.h200 import RECORDINGS, metadata_of, recording, string_entry, strings_of, target_of
from support.waiting import scaled

from fuzz import mutate
from fuzz.doors.loop import Case, Failure

FORMATS = ("chrome", "chrome-json", "perfetto")
DEADLINE_S = 20.0
BUFFER_BYTES = 24_000  # of each recorded buffer: a case is decoded in milliseconds then
BUFFERS = 2
BASE_NS = 1_790_857_026_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One folder below raw/, before anything is damaged."""

    name: str
    format: str
    metadata: dict[str, Any]
    record_bytes: dict[int, int]
    buffers: tuple[bytes, ...]
    strings: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """The stored records of one target, before any damage."""

    info: dict[str, Any]
    sources: tuple[Source, ...]


def recorded(name: str) -> Original:
    """What a GPU recorded, with Kineto's own trace of the same and what a program's other sources add."""
    found = recording(name)
    info = json.loads(target_of(found).to_json())
    start = info["window_start_ns"]
    cupti = Source(
        name="cupti",
        format="cupti/1",
        metadata={**metadata_of(found), "clocks": [[start, 0, start], [start + 10**9, 0, start + 10**9]]},
        record_bytes=found.record_bytes,
        buffers=tuple(data[:BUFFER_BYTES] for data in found.buffers[:BUFFERS]),
        strings=strings_of(found),
    )
    return Original(info=info, sources=(cupti, *(make(start) for make in (stacks, ops, memory, marks, graphs))))


def stacks(start: int) -> Source:
    """Samples of Python stacks."""
    code = b"".join(
        string_entry(
            number,
            SPACE_PYTHON_CODE,
            stack_records.code(number, "train.py", f"f{number}", kind=9 + number % 3, table=bytes(range(0, 256, 5))),
        )
        for number in range(6)
    )
    nodes = b"".join(
        string_entry(number, SPACE_STACK_NODE, stack_records.node(number // 2, number % 6, 2 * number))
        for number in range(1, 12)
    )
    samples = b"".join(STACK_SAMPLE.pack(start + at * 1_000_000, 7 + at % 2, at % 12, at % 4, at) for at in range(150))
    names = string_entry(7, SPACE_THREAD_NAME, b"MainThread")
    return _source("python_stacks", "python_stacks/2", {"hz": 1000}, samples, code + nodes + names)


def ops(start: int) -> Source:
    """Operators with their tensors."""
    names = b"".join(
        string_entry(key, SPACE_OP_NAME, text)
        for key, text in ((1, b"aten::mm"), (2, b"MmBackward0"), (3, b"my step"), (4, b"aten::addmm"))
    )
    inputs = string_entry(5, SPACE_OP_INPUTS, bytes([1, 0, 1, 0, 0, 0]))
    threads = string_entry(7, SPACE_TORCH_THREAD, struct.pack("<Q", 1))
    records = b""
    for at in range(60):
        begin, scope = start + at * 10_000, (0, 1, 7, 0)[at % 4]
        records += OP.pack(begin, begin + 9_000, 1 + at % 4, at // 2, at % 2, 5 * (at % 2), 7, at, 0, scope, 0, 0, 0)
        records += OP_TENSORS.pack(4096 + at, 8192, 1, 2, 3, 4, 7, at, KIND_OP_TENSORS, 3, 0, 0, 0)
    metadata = {"dtypes": ["float", "double"], "activity_types": ["cpu_op", "user_annotation"]}
    return _source("torch_ops", "torch_ops/1", metadata, records, names + inputs + threads)


def memory(start: int) -> Source:
    """A recording of an allocator's actions."""
    events = b"".join(MEMORY_EVENT.pack(start + at * 1000, 4096 * at, 512, 0, 0, 1 + at % 5) for at in range(40))
    return _source("memory_events", "memory_events/1", {"totals": {"0": [10**6, 10**7]}}, events, b"")


def marks(start: int) -> Source:
    """When iterations began."""
    records = b"".join(STEP_MARK.pack(start + at * 10_000_000, 3 + at, 7, 0) for at in range(40))
    return _source("steps", "step_marks/1", {}, records, b"")


def graphs(_start: int) -> Source:
    """Two captured graphs: a kernel in an operator in an annotation, and a copy."""
    texts = b"".join(struct.pack("<I", len(text)) + text for text in (b"_Z4gemmv", b"forward", b"aten::mm"))
    nodes = GRAPH_NODE.pack(0, 1, 0, 8, 1, 1, 128, 1, 1) + GRAPH_NODE.pack(1, GRAPH_NONE, GRAPH_NONE, *[0] * 6)
    operators = GRAPH_OP.pack(GRAPH_NONE, 12, GRAPH_NONE, 7) + GRAPH_OP.pack(0, 23, GRAPH_NONE, 0)
    body = nodes + operators + texts
    one = GRAPH_HEAD.pack(GRAPH_MAGIC, GRAPH_HEAD.size + len(body), 2, 2, len(texts), 0) + body
    return _source("graphs", "graph_nodes/1", {"dtypes": ["float"], "left_out": {"no room": 3}}, one + one, b"")


def _source(name: str, format_: str, metadata: dict[str, Any], records: bytes, strings: bytes) -> Source:
    half = len(records) // 2
    buffers = (records[:half], records[half:])
    return Source(name=name, format=format_, metadata=metadata, record_bytes={}, buffers=buffers, strings=strings)


def documents() -> Original:
    """A trace as torch's profiler writes it, beside a file that is kept as it is."""
    found = recording(RECORDINGS[0])
    rows = found.kineto["traceEvents"]
    calls = [
        {
            "ph": "X", "cat": "python_function", "name": f"train.py({at}): f", "pid": 1, "tid": 7, "ts": 10.0 + at,
            "dur": 90 - at, "args": {"Python id": at, "Python parent id": at - 1, "Python module id": at % 3},
        }
        for at in range(40)
    ]  # fmt: skip
    whole = {**found.kineto, "traceEvents": rows[:60] + calls + rows[-20:]}
    text = json.dumps(whole, indent=2).encode()
    kineto = Source(
        name="torch_ops", format="kineto_json/1", metadata={"with_flops": True}, record_bytes={},
        buffers=tuple(text[at : at + 4000] for at in range(0, len(text), 4000)), strings=b"",
    )  # fmt: skip
    snapshot = _source("memory_snapshot", "file/1", {"file": "memory_snapshot", "size_bytes": 900}, bytes(900), b"")
    return Original(info=json.loads(target_of(found).to_json()), sources=(snapshot, kineto))


def _told(info: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """target.json after an agent's Result that may be anything that the link and `describe_target` let through."""
    start, end = info["window_start_ns"], info["window_end_ns"]
    starts = [[number, start + number * (end - start) // 5] for number in range(5)]
    if rng.random() < 0.3:
        starts = mutate.changed(starts, rng)
    if rng.random() < 0.15:
        start = max(-(2**63), min(2**63 - 1, mutate.number(rng)))
    if rng.random() < 0.15:
        end = max(-(2**63), min(2**63 - 1, mutate.number(rng)))
    return {
        **info,
        "window_start_ns": start,
        "window_end_ns": end,
        "iterations": checked_iterations({"starts": starts}),
        "iteration_thread": 7,
        "threads": {rng.choice((7, 0, 2**31, 2**62)): clean(mutate.text(rng), 64)},
    }


def chunked(buffers: list[bytes], sequences: list[int]) -> bytes:
    """The content of buffers.bin."""
    parts = []
    for data, sequence in zip(buffers, sequences, strict=True):
        parts += [CHUNK_HEADER.pack(CHUNK_MAGIC, 0, sequence, len(data) // 8, len(data)), data, bytes(-len(data) % 8)]
    return b"".join(parts)


class Records:
    """A pool of one decode worker."""

    name = "raw"

    def __init__(
        self, folder: Path, loop: asyncio.AbstractEventLoop, pool: WorkerPool, originals: Sequence[Original] = ()
    ) -> None:
        self._target_dir = folder / "target"
        self._loop, self._pool = loop, pool
        self._originals = [*(recorded(name) for name in RECORDINGS), documents(), *originals]

    def case(self, rng: random.Random) -> Case:
        """target.json, and source.json, buffers.bin and strings.bin of every source."""
        original = rng.choice(self._originals)
        chosen = [source for source in original.sources if rng.random() < 0.5] or [rng.choice(original.sources)]
        hurt = rng.choice(chosen).name
        parts = [json.dumps(_told(original.info, rng)).encode()]
        for source in chosen:
            parts += self._folder(source, rng) if source.name == hurt else self._folder(source, None)
        return parts

    def _folder(self, source: Source, rng: random.Random | None) -> list[bytes]:
        buffers, strings, metadata = list(source.buffers), source.strings, dict(source.metadata)
        sizes, sequences = dict(source.record_bytes), list(range(len(buffers)))
        chooses: Callable[[float], bool] = (lambda share: rng.random() < share) if rng else (lambda _: False)
        counts: dict[str, Any] = {"records": 10, "dropped": 0, "bytes": sum(map(len, buffers))}
        if rng and chooses(0.75):
            at = rng.randrange(len(buffers))
            buffers[at] = mutate.damaged(buffers[at], rng, 12)
        if rng and chooses(0.3):
            strings = mutate.damaged(strings, rng)
        if rng and chooses(0.3):
            metadata = mutate.changed(metadata, rng)
        if rng and chooses(0.1) and sizes:
            sizes[rng.choice(sorted(sizes))] = rng.choice((0, 1, 8, 47, 1 << 31, 2**32 - 1))
        if rng and chooses(0.1):
            rng.shuffle(sequences)
            sequences[0] = rng.choice((0, 1, 2**63 - 1))
        if rng and chooses(0.1):
            counts[rng.choice(("records", "dropped"))] = rng.choice((0, 1, 2**63 - 1))
        data = chunked(buffers, sequences)
        if rng and chooses(0.1):
            data = mutate.damaged(data, rng, 3)
        about = {
            "source": source.name,
            "format": source.format,
            "metadata": metadata if isinstance(metadata, dict) else {},
            "record_bytes": sizes,
            **counts,
        }
        return [json.dumps(about).encode(), data, strings]

    def play(self, case: Case) -> str:
        """Decoded, or refused by a code; files that are what they are called."""
        shutil.rmtree(self._target_dir, ignore_errors=True)
        self._target_dir.mkdir()
        info, *rest = case
        (self._target_dir / TARGET_FILE).write_bytes(info)
        for number, at in enumerate(range(0, len(rest) - 2, 3)):
            folder = self._target_dir / "raw" / f"s{number}"
            folder.mkdir(parents=True)
            for name, data in zip((SOURCE_FILE, BUFFERS_FILE, STRINGS_FILE), rest[at : at + 3], strict=True):
                (folder / name).write_bytes(data)
        return self._loop.run_until_complete(self._decode())

    async def _decode(self) -> str:
        try:
            answer = await self._pool.convert(self._target_dir, FORMATS, deadline_ns=round(scaled(DEADLINE_S) * 1e9))
            converted = checked(answer, self._target_dir, FORMATS, "host", 1)
        except DecodeError as exc:
            if exc.code not in ("SPOOL_INVALID", "CUPTI_UNKNOWN_VERSION", "UNKNOWN_LAYOUT"):
                raise Failure(f"{exc.code}: {exc.reason}") from exc
            return exc.code
        target = pb.Target()
        converted.apply(target)
        json_format.Parse(json_format.MessageToJson(target), pb.Target())
        if answer["traced"]:
            json.loads((self._target_dir / "trace.json").read_bytes(), parse_constant=_no_constant)
        lost = converted.unreadable or converted.cut
        return ("decoded with losses" if lost else "decoded") if answer["traced"] else "only files"

    def processes(self) -> dict[str, int]:
        """The process under test: the decode worker."""
        return dict.fromkeys(("decode worker",), next(iter(self._pool.pids())))

    def settle(self) -> None:
        """Writes a new description of the target; the worker has no other work."""
        TargetInfo(capture_id="", host="", pid=1, process_name="").write(self._target_dir)


def _no_constant(text: str) -> NoReturn:
    raise Failure(f"the trace has {text}, which is no JSON")


@contextmanager
def opened(folder: Path, originals: Sequence[Original] = ()) -> Iterator[Records]:
    """The door, opened with a decode worker. originals: more of what targets recorded."""
    loop = asyncio.new_event_loop()
    pool = WorkerPool(1)
    loop.run_until_complete(pool.start())
    try:
        yield Records(folder, loop, pool, originals)
    finally:
        loop.run_until_complete(pool.stop())
        loop.close()
