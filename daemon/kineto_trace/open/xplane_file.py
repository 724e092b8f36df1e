"""A profile that XLA wrote itself (NAME.xplane.pb, of JAX, TensorFlow or torch_xla) to a Trace.

Theory of operation
    What the decoder of recorded profiles makes of the planes is the trace; its window is the extent of all rows, and
    its iterations have the program's own numbers. Host and process id are in the profile; system thread ids are not
    (decode/xplane/xplane.py), so that threads have numbers of their own. What follows a damaged place is left out, and
    a note says so.
"""

import gzip
import zlib
from pathlib import Path

from kineto_trace.decode.iterations import numbered_by_program
from kineto_trace.decode.time_window import whole_extent
from kineto_trace.decode.xplane.protobuf import BYTES, Damaged, fields
from kineto_trace.decode.xplane.xplane import Profiles
from kineto_trace.errors import FileError
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import StringTable, Trace
from kineto_trace.open.raw_target import relate

_GZIP = b"\x1f\x8b"
_HOSTNAMES = 4
_MOST_HOST = 255


def load_xplane(path: Path) -> Trace:
    """Reads the file, compressed by gzip or not. Raises OSError, and FileError if it is damaged."""
    data = path.read_bytes()
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error) as exc:
            raise FileError(f"{path} is damaged: {exc}") from exc
    strings = StringTable()
    profiles = Profiles(strings, {})
    damaged = 0
    try:
        profiles.read(data)
    except Damaged:
        damaged = 1
    decoded = profiles.decoded(damaged)
    if not decoded.records:
        raise FileError(f"{path} is a profile of XLA without an event that is known: record again, for longer")
    tables = relate(numbered_by_program(decoded.tables, strings) or decoded.tables, strings)
    start, end = whole_extent(tables)
    return Trace(
        target=TargetInfo(
            capture_id="",
            host=_host(data),
            pid=profiles.process_id,
            process_name="",
            framework="jax",
            threads=dict(decoded.threads),
            window_start_ns=start,
            window_end_ns=end,
            complete=not damaged,
        ),
        strings=tuple(strings.strings),
        tables=tables,
        window_start_ns=start,
        window_end_ns=end,
        notes=decoded.warnings,
    )


def _host(data: bytes) -> str:
    try:
        for number, kind, begin, end in fields(data, 0, len(data)):
            if number == _HOSTNAMES and kind == BYTES:
                return data[begin:end].decode("utf-8", "replace")[:_MOST_HOST]
    except Damaged:
        return ""
    return ""
