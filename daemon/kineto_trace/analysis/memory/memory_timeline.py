"""Memory by what it is used for, from the raw timeline that torch.profiler writes.

Theory of operation
    `profiler.export_memory_timeline("x.raw.json.gz")` writes a list of [time, action, bytes, category]: at this time
    the category grew by so many bytes (negative: it shrank). Rows of one time that follow each other are one change.
    A time below 0 says that the memory was there before: it gets the first time of the others.

    Categories are torch's numbers of them, in torch's order. The result is the same as that of HTA's MemoryAnalysis.
"""

import gzip
import warnings
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kineto_trace.errors import FileError
from kineto_trace.view_api.result import Result, columns, make_result

CATEGORIES = (
    "parameter",
    "optimizer_state",
    "input",
    "temporary",
    "activation",
    "gradient",
    "autograd",
    "unknown",
)
VIEW = "memory_timeline"
COLUMNS = columns(
    ("time_ns", "int", "ns", "time, as the file counts it"),
    ("time_us", "float", "us", "the same since the first time"),
    *((f"{name}_bytes", "int", "bytes", f"memory of {name.replace('_', ' ')} from then on") for name in CATEGORIES),
    ("total_bytes", "int", "bytes", "all of it"),
)
_GZIP = b"\x1f\x8b"
_FIELDS = 4
_SYNTAX = b"[] \t\r\n"

Ints = npt.NDArray[np.int64]


def memory_timeline(path: Path | str) -> Result:
    """Bytes by category after every change.

    Raises FileError if the file is no such timeline, OSError if it cannot be read.
    """
    time, _, amount, category = _numbers(Path(path))
    if len(time) and not 0 <= category.min() <= category.max() < len(CATEGORIES):
        raise FileError(f"{path}: category {category.max()} of the memory timeline is unknown, the last one is 7")
    last = np.flatnonzero(np.append(time[1:] != time[:-1], len(time) > 0))
    known = time[time >= 0]
    time = np.where(time < 0, known.min() if len(known) else 0, time)
    values: dict[str, npt.NDArray[np.generic]] = {
        "time_ns": time[last],
        "time_us": (time[last] - (time[last].min() if len(last) else 0)) / 1000,
    }
    total = np.zeros(len(last), np.int64)
    for number, name in enumerate(CATEGORIES):
        held = np.cumsum(np.where(category == number, amount, 0))[last]
        values[f"{name}_bytes"] = held
        total += held
    return make_result(VIEW, COLUMNS, {**values, "total_bytes": total})


def _numbers(path: Path) -> Ints:
    """Its rows as four arrays."""
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if data.startswith(_GZIP) else data
    except (OSError, EOFError, zlib.error) as exc:
        raise FileError(f"{path}: the compressed file is damaged ({exc}); export it again") from exc
    flat = data.translate(None, _SYNTAX)
    numbers = np.empty(0, np.int64)
    if flat:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of what is no number
                numbers = np.fromstring(flat.decode("ascii"), np.int64, sep=",")
        except (ValueError, DeprecationWarning) as exc:
            raise _wrong(path) from exc
    if len(numbers) % _FIELDS or not data.lstrip().startswith(b"["):
        raise _wrong(path)
    return numbers.reshape(-1, _FIELDS).T


def _wrong(path: Path) -> FileError:
    advice = 'give the file of profiler.export_memory_timeline("NAME.raw.json.gz")'
    return FileError(f"{path} is no raw memory timeline, a list of [time, action, bytes, category]; {advice}")
