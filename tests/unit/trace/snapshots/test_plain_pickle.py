"""Pickles of plain values are read as Python does; whatever else they hold is refused."""

import os
import pickle
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.snapshots.plain_pickle import NotPlainPickle, load_plain
from support.targets.memory_snapshots import snapshot

SHARED = ["x" * 300, "ä" * 70_000]
VALUES: list[Any] = [
    None,
    [True, False, 0, 255, 256, 65_536, -1, 2**31, -(2**40), 2**3000, 1.5, "", "ä"],
    {"a": (), "b": (1,), "c": (1, 2), "d": (1, 2, 3), "e": (1, 2, 3, 4), 5: [[], {}]},
    [SHARED, SHARED, {"key": SHARED}] * 300,
    snapshot(),
]


MARKER = Path(tempfile.gettempdir()) / f"attacked-{os.getpid()}"


class Evil:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {MARKER}",)


class Outside(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return "outside" if obj == "x" else None


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", VALUES)
def test_plain_values_are_what_python_reads(value: Any, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol=protocol)) == value


def test_bytes_are_values() -> None:
    assert load_plain(pickle.dumps([b"x", b"y" * 300], protocol=4)) == [b"x", b"y" * 300]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("value", [Evil(), [1, {"a": Evil()}], os.system, {1, 2}, bytearray(b"x"), 1j, range(3)])
def test_what_imports_or_calls_is_refused_without_being_run(value: Any, protocol: int) -> None:
    with pytest.raises(NotPlainPickle, match=r"is not plain data: it .* at byte [0-9]+, so it was not read"):
        load_plain(pickle.dumps(value, protocol=protocol))
    assert not MARKER.exists()


def test_references_to_something_outside_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w+b") as file:
        Outside(file, protocol=4).dump(["x"])
        file.seek(0)
        with pytest.raises(NotPlainPickle, match="refers to something outside the file"):
            load_plain(file.read())


@pytest.mark.parametrize("protocol", [2, 4])
def test_every_truncation_is_an_error(protocol: int) -> None:
    data = pickle.dumps([snapshot(), 2**70, "text", 1.5, (1, 2)], protocol=protocol)
    for length in range(len(data)):
        with pytest.raises(NotPlainPickle):
            load_plain(data[:length])


def test_damaged_bytes_are_an_error_or_a_value() -> None:
    data = pickle.dumps(snapshot(), protocol=4)
    refused = 0
    for at in range(0, len(data), 7):
        for byte in (0x00, 0x28, 0x2E, 0x61, 0x65, 0x73, 0x75, 0x87, 0x94, 0xFF):
            try:
                load_plain(data[:at] + bytes([byte]) + data[at + 1 :])
            except NotPlainPickle:
                refused += 1
    assert refused > len(data) / 7


@pytest.mark.parametrize("data", [b"", b"\x80", b"{}", b"\x80\x00N.", b"\x80\x06N.", b"(lp0\n.", b"\x1f\x8b\x08\x00"])
def test_other_files_are_no_pickles_of_these_protocols(data: bytes) -> None:
    with pytest.raises(NotPlainPickle, match="not a pickle of protocol 2 to 5"):
        load_plain(data)


def test_a_far_place_of_the_memo_takes_no_memory() -> None:
    assert load_plain(b"\x80\x04]r\xff\xff\xff\xff.") == []


@pytest.mark.parametrize("code", [b"\x8e", b"\x8d"])
def test_a_length_beyond_the_file_takes_no_memory(code: bytes) -> None:
    with pytest.raises(NotPlainPickle, match="truncated"):
        load_plain(b"\x80\x04" + code + struct.pack("<Q", 2**62) + b"x.")


def test_deep_nesting_neither_recurses_nor_crashes() -> None:
    depth = sys.getrecursionlimit() * 50
    value = load_plain(b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b".")
    levels = 0
    while value:
        value, levels = value[0], levels + 1
    assert levels == depth - 1


def test_tuples_are_no_keys() -> None:
    depth = 100_000  # a hash of such a tuple ends the process
    with pytest.raises(NotPlainPickle, match="a dict has a key of type tuple"):
        load_plain(b"\x80\x04})" + b"\x85" * depth + b"Ns.")


def test_laughing_lists_are_shared_and_not_copied() -> None:
    value: list[Any] = []
    for _ in range(60):  # 10^60 items, were they copied
        value = [value] * 10
    read = load_plain(pickle.dumps(value, protocol=4))
    assert all(each is read[0] for each in read)


@pytest.mark.parametrize("part", [b"]", b"}", b"(", b")", b"N\x94"])
def test_the_number_of_parts_is_limited(part: bytes) -> None:
    with pytest.raises(NotPlainPickle, match="too many parts"):
        load_plain(b"\x80\x04" + part * 1001 + b".", most_values=1000)


def test_a_value_may_hold_itself() -> None:
    value: list[Any] = []
    value.append(value)
    read = load_plain(pickle.dumps(value, protocol=4))
    assert read[0] is read
