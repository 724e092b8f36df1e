import json
import struct
from typing import Any

import pytest
from kineto_trace.decode.torch.torch_comms import comms_text
from kineto_trace.decode.torch.torch_inputs import UnreadableInputs

DTYPES = ("float", "c10::BFloat16", "c10::Float8_e5m2")
NONE = struct.pack("<I", 0)


def text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def numbers(*values: int, count: int | None = None) -> bytes:
    return struct.pack(f"<I{len(values)}q", len(values) if count is None else count, *values)


def entry(*, dtype: int = 1, stride: int = 1, ranks: bytes = NONE, group: str = "0") -> bytes:
    return (
        struct.pack("<iiiiqqb", 3, 8, 0, stride, 100, 800, dtype)
        + text("_allgather_base") + text(group) + text("default_pg") + NONE + numbers(2, 3) + ranks
    )  # fmt: skip


def read(data: bytes, sequence: int = 7) -> dict[str, Any]:
    found = json.loads("{" + comms_text(data, sequence, DTYPES) + "}")
    assert isinstance(found, dict)
    return found


def test_a_collective_has_kinetos_arguments() -> None:
    assert read(entry(ranks=numbers(0, 1))) == {
        "Collective name": "_allgather_base",
        "In msg nelems": 100,
        "Out msg nelems": 800,
        "Group size": 8,
        "dtype": "BFloat16",
        "In split size": "[]",
        "Out split size": "[2, 3]",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1]",
        "Rank": 3,
        "Global rank start": 0,
        "Global rank stride": 1,
        "Seq": 7,
    }


def test_what_is_not_known_is_left_out() -> None:
    missing = {"Seq", "Global rank stride", "dtype", "Process Group Name"}
    assert not missing & set(read(entry(stride=0, dtype=9, group=""), sequence=-1))


def test_long_lists_are_shown_as_their_beginning_and_their_end() -> None:
    shown = read(entry(ranks=numbers(*range(29), 63, count=64)))["Process Group Ranks"]
    assert shown.startswith("[0, 1, 2, ") and shown.endswith(", 28, ..., 63]")


@pytest.mark.parametrize("data", [b"", entry()[:-1], entry() + b"\0", entry(ranks=struct.pack("<I", 1 << 31))])
def test_an_entry_that_is_not_in_the_form_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableInputs):
        comms_text(data, 1, DTYPES)
