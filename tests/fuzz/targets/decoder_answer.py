"""The line that a decode worker answers, and a diagnosis' answer: a hostile target may have taken both processes."""

import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf import json_format
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.attach_helper import diagnosis
from kinetod.captures.result import decode_pool
from kinetod.captures.target.conversion import checked
from kinetod.supervise.child import Crashed

from fuzz import event_loop
from fuzz.parts import changed_json

CONVERSION = {
    "files": [["chrome", "trace.json.gz", 2, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"]],
    "traced": True, "summary": {"events": {"kernel": 3}}, "warnings": ["careful"], "cut": [], "records_dropped": 0,
    "records_undecoded": 1, "chunks_torn": 0,
}  # fmt: skip
FOUND = {"method": "pending-call", "findings": [{"name": "a", "status": "ok", "detail": "", "advice": "", "code": ""}]}
_folder = Path(tempfile.mkdtemp(prefix="fuzz-answer-"))
(_folder / "trace.json.gz").write_bytes(b"{}")


def play(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        diagnosis.decode(data)
    worker: Any = object.__new__(decode_pool._Worker)
    try:
        answered = decode_pool._conversion(event_loop.run(_asked(worker, data)), _folder)
        converted = checked(answered, _folder, ("chrome",), "host", 1)
    except (decode_pool.DecodeError, Crashed):
        return
    target = pb.Target()
    converted.apply(target)
    json_format.Parse(json_format.MessageToJson(target), pb.Target())


async def _asked(worker: "decode_pool._Worker", data: bytes) -> dict[str, Any]:
    stdout = asyncio.StreamReader(limit=1 << 20)
    stdout.feed_data(data + b"\n")
    stdout.feed_eof()
    process: Any = SimpleNamespace(stdin=SimpleNamespace(write=lambda _: None, drain=_nothing), stdout=stdout)
    worker.process = process
    return await worker.ask({"id": 1})


async def _nothing() -> None:
    pass


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Other values."""
    return changed_json(data, rng)


def seeds() -> Iterator[bytes]:
    """Good ones, refusals, and what a worker says of one that died."""
    yield json.dumps({"id": 1, "ok": True, "conversion": CONVERSION}).encode()
    yield json.dumps({"id": 1, "ok": True, "conversion": {**CONVERSION, "traced": False, "files": []}}).encode()
    yield json.dumps({"id": 1, "ok": False, "reason_code": "SPOOL_INVALID", "reason": "cut"}).encode()
    yield json.dumps({"id": 1, "died": "signal 9"}).encode()
    yield json.dumps(FOUND).encode()
