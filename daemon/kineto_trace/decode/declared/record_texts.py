"""The texts that fields of declared records stand for: keys of string spaces, enumerations, bytes in the record."""

from typing import Any

import numpy as np
import numpy.typing as npt
from kineto_agent.protocol.schema import Texts

from kineto_trace.arrays.codec import Interner
from kineto_trace.decode.activity_names import demangle
from kineto_trace.model.trace import StringTable
from kineto_trace.spool.raw_records import RawSource

Numbers = npt.NDArray[np.int32]
MAX_OTHER_TEXTS = 4096  # of one field: further values that nothing stands for share one text
MAX_INLINE_TEXTS = 1 << 18  # of one field: further ones share one text
MAX_TEXT_BYTES = 16 * 1024
_MANY = "…"


def texts_of(values: npt.NDArray[Any], field: str, texts: Texts, source: RawSource, strings: StringTable) -> Numbers:
    """Returns for each value of a field the number of its text in `strings`."""
    if values.dtype.kind == "S":
        return _inline(values, strings)
    interner = Interner()
    codes = interner.intern(values.astype(np.int64).view(np.uint64) if values.dtype.kind == "i" else values)
    keys = interner.keys()
    wanted = (keys.view(np.int64) if values.dtype.kind == "i" else keys).tolist()
    table = source.strings.get(texts.space, {})
    found, others = [], 0
    for value, key in zip(wanted, keys.tolist(), strict=True):
        text = _decoded(table[key], texts) if key in table else texts.values.get(value)
        if text is None:
            text = _other(value if others < MAX_OTHER_TEXTS else _MANY, field, texts)
            others += 1
        found.append(strings.add(text))
    return np.array(found, np.int32).take(codes) if found else np.empty(0, np.int32)


def _decoded(text: bytes, texts: Texts) -> str:
    plain = text[:MAX_TEXT_BYTES].partition(b"\0")[0]
    return demangle(plain) if texts.demangle else plain.decode("utf-8", "replace")


def _other(value: object, field: str, texts: Texts) -> str:
    """The text of a value that nothing stands for."""
    return texts.otherwise.replace("{}", str(value)) if texts.otherwise else f"{field} {value}"


def _inline(values: npt.NDArray[np.bytes_], strings: StringTable) -> Numbers:
    known, codes = np.unique(values, return_inverse=True)
    found = [
        strings.add(text.partition(b"\0")[0].decode("utf-8", "replace")) for text in known[:MAX_INLINE_TEXTS].tolist()
    ]
    if len(known) > MAX_INLINE_TEXTS:
        found += [strings.add(_MANY)] * (len(known) - MAX_INLINE_TEXTS)
    return np.array(found, np.int32).take(codes) if found else np.empty(0, np.int32)
