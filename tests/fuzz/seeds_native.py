"""Seeds of the targets in C: small pieces of real recordings, and sequences that reach the far ends."""

import json
import random
import struct
from collections.abc import Callable, Iterator

from support.counters.trace_samples import as_chrome, as_perfetto, hostile_samples
from support.trace_files.h200 import recording
from support.trace_files.perfetto_traces.samples import SMALL, foreign, written
from support.trace_files.traces import trace

PIECE_BYTES = 3000
REQUEST = struct.Struct("<III")
MAGIC = 0x5152534B
CONFIG = struct.Struct("<4Q4I")
# Beginnings of functions: saved registers and a call; a branch around one; a tail jump.
CODE = (
    "554889e54157415641554154534883ec28e8100000004883c4285b415c415d415e415f5dc3",
    "4885ff740ae810000000c3",
    "f30f1efa31c04883ec08807f100075054883c408e9f0ffffff",
    "f30f1efa4155498975004154488b05d2040000c7452a01000000e800000000415c415dc3",
)


def chrome() -> Iterator[bytes]:
    """Kineto's own traces, cut to a few events of each kind; the last byte is the size of the pieces."""
    for number, name in enumerate(("mlp-cupti130001", "graph-cupti130001", "streams-cupti130001")):
        kineto = recording(name).kineto
        rows = {str(row.get("cat")): row for row in kineto["traceEvents"]}
        document = {**kineto, "traceEvents": [*list(rows.values())[:10], *kineto["traceEvents"][-3:]]}
        yield json.dumps(document, indent=number).encode()[: 2 * PIECE_BYTES] + bytes([number + 2])
    event = b'{"ph":"X","name":"\\ud83d\\ude00","pid":1,"tid":2,"ts":1.5,"dur":-2,"args":{"External id":5}}'
    yield b"[" + event + b"]\x00"
    strange = b'{"ph":"i","ts":NaN,"args":{"grid":[1,2,3],"Ev Idx":1e999}},{"ph":"s","id":1}'
    yield b'{"traceEvents":[' + strange + b'],"a":"\\u12"}\x01'
    yield as_chrome(trace({"counter": hostile_samples()}))[: 2 * PIECE_BYTES] + b"\x02"


def codec() -> Iterator[bytes]:
    """Eight bytes of sizes, then records as the GPU's library wrote them."""
    for name in ("streams-cupti130001", "mlp-cupti130001"):
        data = recording(name).buffers[0]
        for at in range(0, min(len(data), 3 * PIECE_BYTES), PIECE_BYTES):
            yield struct.pack("<4H", 60, 4000, 8, at) + data[at : at + PIECE_BYTES]


def drawn(count: int, size: int) -> Iterator[bytes]:
    """Random bytes, for targets that draw all they need."""
    for number in range(count):
        yield random.Random(number).randbytes(size)


def walk() -> Iterator[bytes]:
    """Framing and sizes of kinds, then records."""
    kinds = b"".join(bytes((1, size)) for size in (24, 32, 40, 8, 16, 64))
    yield b"\0" + kinds + struct.pack("<I20x", 1) + struct.pack("<I28x", 3) + b"\x09\0\0\0"
    yield b"\1" + kinds + struct.pack("<II8x", 7, 16) + struct.pack("<II", 1, 8) + struct.pack("<II", 1, 64)
    yield b"\2" + kinds + struct.pack("<QI4x", 12, 5) + struct.pack("<QI12x", 24, 6) + struct.pack("<QI", 1 << 40, 1)


def perfetto() -> Iterator[bytes]:
    """Our own file and one as others write it; the last two bytes are the pieces."""
    yield foreign()[: 2 * PIECE_BYTES] + b"\x01\x02"
    yield written(trace(SMALL))[: 2 * PIECE_BYTES] + b"\x03\x04"
    yield as_perfetto(trace({"counter": hostile_samples()}))[: 2 * PIECE_BYTES] + b"\x05\x06"


def call_site() -> Iterator[bytes]:
    """Machine code."""
    for code in CODE:
        yield bytes.fromhex(code)


def _packets(*requests: tuple[int, bytes]) -> bytes:
    found = b""
    for number, (command, argument) in enumerate(requests):
        packet = REQUEST.pack(MAGIC, command, number) + argument
        found += struct.pack("<H", len(packet)) + packet
    return found


def serve() -> Iterator[bytes]:
    """A capture as the daemon drives it, one out of order, and requests that are too short or too long."""
    config = CONFIG.pack(1 << 20, 1 << 16, 1 << 16, 0, 100, 104, 1, 0)
    two, wait = struct.pack("<2I", 10, 5), struct.pack("<I", 1)
    patterns = struct.pack("<I", 2) + b"cuda*\0cuMem*\0\0"
    yield _packets((1, b""), (2, b"cupti"), (3, config), (4, patterns), (5, b""), (8, two), (6, b""), (9, b""),
                   (10, wait), (11, wait), (16, b""), (12, b""), (15, b""))  # fmt: skip
    yield _packets((8, two), (3, config), (2, b"cupti"), (3, config), (3, config[:40]), (10, wait), (12, b""))
    yield _packets((13, struct.pack("<i", 39)), (14, struct.pack("<I3i", 0, 1, 2, 3)), (99, b""), (7, b""), (4, b"ab"))


NATIVE: dict[str, Callable[[], Iterator[bytes]]] = {
    "call_site": call_site,
    "chrome": chrome,
    "codec": codec,
    "nest": lambda: drawn(4, 1500),
    "paths": lambda: drawn(4, 200),
    "walk": walk,
    "perfetto": perfetto,
    "perfetto_write": lambda: drawn(4, 3000),
    "serve": serve,
    "spill": lambda: drawn(4, 400),
}
