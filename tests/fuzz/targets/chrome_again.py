"""Chrome traces there and back: what loads is written as valid JSON, loads again, and is written to the same bytes."""

import io
import json
import random
from collections.abc import Iterator

from isal import igzip
from kineto_trace.errors import FileError
from kineto_trace.formats.chrome.chrome_reader import load_chrome
from support.counters.trace_samples import as_chrome, hostile_samples
from support.trace_files.chrome_files import written
from support.trace_files.h200 import recording
from support.trace_files.traces import trace

TOKENS = (
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\\u", b"\\ud800", b"NaN", b"N/A", b"nan", b"-inf",
    b"1e999", b"1e-99", b"-0.0", b"0.1", b"18446744073709551616", b"-9223372036854775809", b'"ts":1e18,', b'"dur":-5,',
    b'"args":{', b'"ph":"X",', b'"ph":"i",', b'"cat":"kernel",', b"null", b"\x01", b"\xff", b'{"ph":', b"[memory]",
    b'"External id":', b'"tid":"x",', b'"pid":-1,', b'"traceEvents":[', b'],"traceName":', b'"Python parent id":0,',
    b'"ph":"C",', b'"cat":"%,x,hardware_counter",', b'"cat":"hardware_counter_gap",', b'"args":{"":5},',
)  # fmt: skip
SEED_BYTES = 6000


def play(data: bytes) -> None:
    try:
        trace = load_chrome(io.BytesIO(data))
    except FileError:
        return
    once = written(trace)
    document = json.loads(once)
    count = sum(len(table) for table in trace.tables.values())
    assert len(document["traceEvents"]) == count, "another number of events was written"
    try:
        again = load_chrome(io.BytesIO(once))
    except FileError:
        assert not count
        return
    assert not again.losses.undecoded and not any("mended" in note for note in again.notes), again.notes
    assert written(again) == once, "written again it is something else"


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few changes: bytes, cuts, copies, tokens that JSON minds; sometimes compressed and then damaged."""
    text = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 5, 20))):
        at, length, to = rng.randrange(len(text) + 1), rng.randrange(200), rng.randrange(len(text) + 1)
        action = rng.randrange(6)
        if action == 0 and at < len(text):
            text[at] = rng.randrange(256)
        elif action == 1:
            del text[at : at + length]
        elif action == 2:
            text[to:to] = text[at : at + length]
        elif action == 3 and rng.random() < 0.2:
            del text[at:]
        else:
            text[at:at] = rng.choice(TOKENS)
    if rng.random() < 0.15:
        packed = bytearray(igzip.compress(bytes(text), 1))
        if rng.random() < 0.5:
            del packed[rng.randrange(len(packed)) :]
        else:
            packed[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
        return bytes(packed)
    return bytes(text)


def seeds() -> Iterator[bytes]:
    """Pieces of Kineto's traces from a GPU, and samples of its counters."""
    for name in ("mlp", "graph", "streams"):
        text = json.dumps(recording(f"{name}-cupti130001").kineto, indent=1).encode()
        first = text.index(b"[", text.index(b'"traceEvents"')) + 1
        yield text[:SEED_BYTES]
        middle = text.index(b"\n  {\n", first + len(text) // 3)
        yield text[:first] + text[middle : middle + SEED_BYTES]
    yield as_chrome(trace({"counter": hostile_samples()}))
