import gzip
import io
import json
from typing import Any

import pytest
from kineto_trace.base import quantities
from kineto_trace.base.quantities import KEPT_FREE_BYTES
from kineto_trace.errors import FileError
from kineto_trace.formats.chrome.chrome_native_reader import PADDING
from kineto_trace.formats.chrome.chrome_reader import MAX_HEAD_BYTES, MEMBER_BYTES, PIECE_BYTES, load_chrome
from kineto_trace.model.trace import Trace
from support.trace_files.chrome_files import back, load, names

GOOD = '{"ph":"X","cat":"cpu_op","name":"good","pid":1,"tid":2,"ts":1.5,"dur":2,"args":{"External id":5}}'


def named(name: str) -> str:
    return GOOD.replace("good", name)


def read(*rows: str, end: str = "]}") -> Trace:
    return load('{"traceEvents":[' + ",\n".join(rows) + end)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"hello", "it begins with b'hello', not with a JSON object or list"),
        (b"{}", "it is an empty object"),
        (b'{"a":1,"b":[]}', "it has no traceEvents list; its members are a, b"),
        (b'{"traceEvents":null}', "it has no traceEvents list; its members are traceEvents"),
        (b"[1,2]", "items in the list of events that are not events are left out: 2, at bytes 1, 3"),
        (b'[{"a":1}]', "it is a list of objects that are not events"),
        (b'[{"ph":"X"', "the file is truncated in the middle of an event: 0 events were read"),
        (gzip.compress(b"[" + GOOD.encode(), mtime=0)[:40], "the compressed file is truncated"),
        (gzip.compress(b"[]", mtime=0)[:10] + b"\xff" * 8, "the compressed data is damaged before byte 18 of the file"),
    ],
)
def test_what_is_no_trace_is_named(data: bytes, says: str) -> None:
    with pytest.raises(FileError) as caught:
        load(data)
    assert str(caught.value).startswith("trace.json is not a trace: ")
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["[]", '{"traceEvents":[]}'])
def test_a_trace_without_events_is_one(text: str) -> None:
    trace = load(text)
    assert (dict(trace.tables), trace.notes, trace.window_end_ns) == ({}, (), 0)


def test_a_file_that_ends_in_an_event_says_so() -> None:
    trace = read(GOOD, GOOD, GOOD[:50], end="")
    assert trace.notes == ("the file is truncated in the middle of an event: 2 events were read",)
    assert trace.losses.undecoded == 1


@pytest.mark.parametrize("end", ["", ","])
def test_a_file_that_ends_between_events_says_so(end: str) -> None:
    trace = read(GOOD, end=end)
    assert trace.notes == ("the file is truncated inside its list of events: 1 event was read",)
    assert trace.losses.undecoded == 0


def test_a_file_that_ends_behind_its_events_says_so() -> None:
    assert read(GOOD, end="]").notes == ("the file is truncated after its events",)


def test_every_cut_of_a_file_gives_the_events_before_it() -> None:
    text = '{"traceEvents":[' + ",".join(named(f"op {n}") for n in range(3)) + "]}"
    for cut in range(text.index("{", 1) + len(GOOD) + 1, len(text)):
        trace = load(text[:cut])
        whole = (cut - text.index("{", 1) + 1) // (len(named("op 0")) + 1)
        assert names(trace, "cpu_op") == [f"op {n}" for n in range(whole)], cut
        assert trace.notes


def test_a_cut_compressed_file_gives_what_is_there() -> None:
    rows = ",\n".join(named(f"op {n * n}") for n in range(5000))
    trace = load(gzip.compress(f"[{rows}]".encode())[:-2000])
    assert 1000 < len(trace.table("cpu_op")) < 5000
    assert trace.notes[0] == "the compressed file is truncated"


def test_bytes_behind_the_trace_are_told_of() -> None:
    note = ("the data after the end of the trace was not read",)
    assert read(GOOD, end="]} more").notes == note
    packed = gzip.compress(f"[{GOOD}]".encode())
    assert load(packed + b"more").notes == ("the data after the end of the compressed data was not read",)
    assert load(packed + bytes(512)).notes == ()


def test_reading_goes_on_behind_an_event_that_cannot_be_read() -> None:
    for bad in (GOOD[:40], '{"ph":"X" @}', "{{{", GOOD[:-1], GOOD.replace("1.5", "1.5.5"), "@@@"):
        trace = read(named("a"), bad, named("b"), named("c"))
        assert names(trace, "cpu_op") == ["a", "b", "c"], bad
        at = len('{"traceEvents":[') + len(named("a")) + 2
        assert trace.notes[0].startswith(f"1 event at byte {at} could not be read: "), trace.notes
        assert trace.losses.undecoded == 1


def test_what_follows_damage_at_the_end_is_not_lost() -> None:
    trace = read(named("a"), GOOD[:60], end='],"traceName":"x.json"}')
    assert names(trace, "cpu_op") == ["a"]
    assert trace.head == {"traceName": '"x.json"'}


def test_an_event_whose_arguments_cannot_be_read_loses_only_these() -> None:
    trace = read(GOOD.replace('"External id":5', '"External id":5,"x":@@@'), named("b"))
    assert names(trace, "cpu_op") == ["good", "b"]
    assert trace.notes == (
        "1 event at byte 16 lost the arguments, which could not be read: there is no JSON value where one must be",
    )


def test_each_of_many_such_events_in_a_row_is_read() -> None:
    damaged = [named(text).replace('"External id":5', '"x":@@@') for text in "abc"]
    trace = read(*damaged, named("d"))
    assert names(trace, "cpu_op") == ["a", "b", "c", "d"]
    assert trace.notes[0].startswith("3 events at bytes ")


def test_items_that_are_no_events_are_counted() -> None:
    trace = read(GOOD, "null", "[1,2]")
    assert trace.notes == ("items in the list of events that are not events are left out: 2, at bytes 115, 121",)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ('say "hi"', 'say "hi"'),
        ('a", "b', 'a", "b'),
        ('5" disk', '5" disk'),
        ("C:\\Users\\x", "C:\\Users\\x"),
        ("C:\\dir\\", "C:\\dir\\"),
        ("tab\there\x01", "tab\there\x01"),
        ("line\nbreak", "line\nbreak"),
    ],
)
def test_names_that_are_no_json_are_mended(name: str, meant: str) -> None:
    trace = read(GOOD, named(name), GOOD)
    assert names(trace, "cpu_op") == ["good", meant, "good"]
    assert trace.notes == ("1 event is no valid JSON (quotes, escapes, words): mended",)
    assert trace.losses.undecoded == 0


def test_arguments_that_are_no_json_are_mended() -> None:
    args = '"x":N/A,"path":"C:\\Users\\x","n":nan,"deep":[{"a":-inf}],"Call stack":"f("a.py")"'
    found = back('{"traceEvents":[' + GOOD.replace('"External id":5', args) + "]}")["traceEvents"][0]["args"]
    assert repr(found["n"]) == "nan"
    del found["n"]
    assert found == {"x": "N/A", "path": "C:\\Users\\x", "deep": [{"a": float("-inf")}], "Call stack": 'f("a.py")'}


def test_heads_that_are_no_json_are_mended() -> None:
    trace = read(GOOD, end='],"traceName":"C:\\Users\\x","value":N/A}')
    assert {name: json.loads(text) for name, text in (trace.head or {}).items()} == {
        "traceName": "C:\\Users\\x",
        "value": "N/A",
    }
    assert trace.notes == ()


def test_a_damaged_head_does_not_hide_the_events() -> None:
    trace = load('{"a":1,"b" @ "c":2,"traceEvents":[' + GOOD + "]}")
    assert names(trace, "cpu_op") == ["good"]
    assert trace.notes == ("the part before the events could not be read from byte 7 on: a colon is missing",)


def test_a_damaged_tail_is_told_of() -> None:
    trace = read(GOOD, end='],"tail":@}')
    assert trace.notes[0].startswith("the part after the events could not be read from byte")


def test_bytes_that_are_no_utf8_become_replacement_characters() -> None:
    trace = load(b"[" + GOOD.replace("good", "caf?").encode().replace(b"?", b"\xe9") + b"]")
    assert names(trace, "cpu_op") == ["caf\ufffd"]


def test_an_odd_base_is_told_of() -> None:
    trace = read(GOOD, end='],"baseTimeNanoseconds":"soon"}')
    assert trace.notes == ("baseTimeNanoseconds is soon: times are as the events have them",)
    assert trace.table("cpu_op")["start"].tolist() == [1500]


def test_what_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineto_trace.formats.chrome.chrome_reader.PIECE_BYTES", 1 << 12)
    monkeypatch.setattr("kineto_trace.formats.chrome.chrome_reader.MAX_EVENT_BYTES", 1 << 14)

    class Endless(io.BytesIO):
        def readinto(self, view: Any) -> int:
            return super().readinto(memoryview(view)[:1000])

    text = "[" + GOOD + ',{"ph":"X","name":"' + "x" * 100_000 + '"},' + named("b") + "]"
    trace = load_chrome(Endless(text.encode()))
    assert names(trace, "cpu_op") == ["good", "b"]
    assert trace.losses.undecoded == 1


def test_a_head_of_very_many_members_is_given_up() -> None:
    members = "".join(f'"k{n}":0,' for n in range(MAX_HEAD_BYTES // MEMBER_BYTES + 1))
    with pytest.raises(FileError, match=r"is not a trace: too much of it is not events \(\d+ members\)"):
        load("{" + members + '"traceEvents":[' + GOOD + "]}")


def test_what_takes_more_memory_than_is_free_is_an_error_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = PIECE_BYTES + PADDING
    monkeypatch.setattr(quantities, "free_memory", lambda: KEPT_FREE_BYTES + piece)
    assert names(read(GOOD), "cpu_op") == ["good"]
    monkeypatch.setattr(quantities, "free_memory", lambda: KEPT_FREE_BYTES + piece - 1)
    with pytest.raises(MemoryError, match=r"trace\.json needs 4 MiB of memory more; 260 MiB are free"):
        read(GOOD)
