"""Converts what an operator states about its collective from the agent's binary form to Kineto's JSON arguments.

kineto_agent/protocol/records.py defines the form of an entry; the names are those of PyTorch's saveNcclMeta.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any

from kineto_agent.protocol.records import COMMS_NUMBERS

from kineto_trace.decode.torch.torch_inputs import UnreadableInputs

SHOWN = 30  # items shown of a list of numbers, as in PyTorch's profiler
_TYPES = {  # C++ names -> at::ScalarType's names
    "unsigned char": "Byte",
    "signed char": "Char",
    "short int": "Short",
    "int": "Int",
    "long int": "Long",
    "float": "Float",
    "double": "Double",
    "bool": "Bool",
    "short unsigned int": "UInt16",
    "unsigned int": "UInt32",
    "long unsigned int": "UInt64",
    "c10::complex<c10::Half>": "ComplexHalf",
    "c10::complex<float>": "ComplexFloat",
    "c10::complex<double>": "ComplexDouble",
}


def comms_text(entry: bytes, sequence: int, dtypes: Sequence[str]) -> str:
    """Returns the arguments "Collective name", "dtype", "In msg nelems" and so on, as JSON members.

    sequence: the number in the process group; negative if unknown. dtypes: names of types by torch's numbers. Raises
    UnreadableInputs.
    """
    reader = _Reader(entry)
    rank, size, first, stride, elements_in, elements_out, dtype = reader.numbers()
    name, group, description = reader.text(), reader.text(), reader.text()
    arguments: dict[str, Any] = {
        "Collective name": name,
        "In msg nelems": elements_in,
        "Out msg nelems": elements_out,
        "Group size": size,
        "dtype": _type(dtypes[dtype]) if 0 <= dtype < len(dtypes) else "",
        "In split size": reader.list(),
        "Out split size": reader.list(),
        "Process Group Name": group,
        "Process Group Description": description,
        "Process Group Ranks": reader.list(),
        "Rank": rank,
    }
    reader.end()
    for key, number, least in (
        ("Global rank start", first, 0),
        ("Global rank stride", stride, 1),
        ("Seq", sequence, 0),
    ):
        if number >= least:
            arguments[key] = number
    return json.dumps({key: value for key, value in arguments.items() if value != ""})[1:-1]


def _type(name: str) -> str:
    return _TYPES.get(name, name.removeprefix("c10::"))


class _Reader:
    """Reads one entry from its beginning."""

    def __init__(self, entry: bytes) -> None:
        self._entry = entry
        self._at = 0

    def numbers(self) -> tuple[int, ...]:
        return COMMS_NUMBERS.unpack(self._take(COMMS_NUMBERS.size))

    def text(self) -> str:
        return self._take(self._take(1)[0]).decode("utf-8", "replace")

    def list(self) -> str:
        count = int.from_bytes(self._take(4), "little")
        kept = min(count, SHOWN)
        values = [str(number) for number in struct.unpack(f"<{kept}q", self._take(8 * kept))]
        if kept < count:
            values.insert(-1, "...")
        return f"[{', '.join(values)}]"

    def end(self) -> None:
        if self._at != len(self._entry):
            raise UnreadableInputs(f"{len(self._entry) - self._at} bytes too many")

    def _take(self, count: int) -> bytes:
        taken = self._entry[self._at : self._at + count]
        if len(taken) != count:
            raise UnreadableInputs(f"cut at byte {self._at}")
        self._at += count
        return taken
