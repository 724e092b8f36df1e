"""What samples were inside of that is no Python function: callees by slice and line, and what those are called for.

A callee has the name that the source gives it (line_counts.py). The table tells what it is for by that name alone, so
it has only names that are hardly anything else: functions with their module's usual name, and methods that no other
well-known class has. What they do shows no Python function, unlike what is in the table of library_calls.py.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.model.line_counts import STATES, parse_callees
from kineto_trace.model.trace import Trace
from kineto_trace.structure.python.library_calls import CallKind

Ints = npt.NDArray[np.int64]

_TABLE: tuple[tuple[CallKind, str], ...] = (
    (CallKind.PICKLE, r"(?:c?[Pp]ickle|_pickle|marshal)\.(?:dump|load)s?"),
    (CallKind.JSON, r"(?:orjson|ujson|rapidjson|msgspec\.json)\.\w+|(?:.*\.)?(?:c_make_encoder|scan_once)"),
    (CallKind.ITEM, r".*\.(?:item|tolist)"),
    (CallKind.ARCHIVE, r"(?:zlib|gzip|bz2|lzma|zstd|zstandard|lz4(?:\.\w+)?|snappy|brotli)\.(?:de)?compress\w*"),
    (CallKind.HASH, r"(?:hashlib|_hashlib|xxhash|hmac)\.\w+|(?:zlib|binascii)\.(?:crc32|adler32)|.*\.hexdigest"),
    (CallKind.GARBAGE, r"gc\.collect"),
    (CallKind.SLEEP, r"time\.sleep"),
    (CallKind.LOGGING, r"print|sys\.std(?:out|err)\.(?:write|flush)"),
    (CallKind.SUBPROCESS, r"os\.(?:system|fork|posix_spawnp?|waitpid)"),
    (CallKind.FILE, r"open|os\.(?:open|p?read|p?write|fsync|fdatasync|listdir|scandir|l?stat|replace|rename|unlink)"),
    (CallKind.DATABASE, r"sqlite3\.\w+|.*\.(?:commit|execute|executemany|executescript|fetchall|fetchone|fetchmany)"),
    (CallKind.CONVERT, r"(?:np|numpy)\.(?:array|asarray|fromiter)|torch\.(?:tensor|as_tensor)"),
)
_KINDS = tuple((kind, re.compile(pattern)) for kind, pattern in _TABLE)


@dataclass(frozen=True, slots=True)
class CalleeSamples:
    """Self samples at calls, one value per slice, line and callee.

    row: of python_function. name: place in `names`. counts: by state.
    """

    names: list[str]
    row: Ints
    line: Ints
    name: Ints
    counts: npt.NDArray[np.int64]  # (…, 4)


def callee_samples(trace: Trace) -> CalleeSamples:
    """Returns all self samples of the trace whose callee is known."""
    table = trace.table("python_function")
    rows = np.flatnonzero((table["callees"] >= 0) & (table["self_samples"] > 0))
    parsed = {number: parse_callees(trace.strings[number]) for number in unique_values(table["callees"][rows]).tolist()}
    numbers: dict[str, int] = {}
    flat = [
        (row, entry.line, numbers.setdefault(entry.callee, len(numbers)), *entry.counts)
        for row, number in zip(rows.tolist(), table["callees"][rows].tolist(), strict=True)
        for entry in parsed[number]
    ]
    columns = np.array(flat, np.int64).reshape(-1, 3 + len(STATES))
    return CalleeSamples(list(numbers), columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3:])


def callee_kind(name: str) -> CallKind:
    """Returns what the callee of this name is called for; NONE if that is not known."""
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(name)), CallKind.NONE)
