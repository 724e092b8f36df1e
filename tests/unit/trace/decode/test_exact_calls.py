"""Records of Python's calls to rows."""

from collections.abc import Sequence

from kineto_agent.protocol.records import (
    CALL_C_RETURN,
    CALL_CUT,
    CALL_RETURN,
    CALL_UNKNOWN,
    PYTHON_CALL,
    SPACE_PYTHON_CALL,
)
from kineto_trace.decode import exact_calls
from kineto_trace.decode.decoded import Decoded, DecodeWindow
from kineto_trace.model.trace import StringTable
from kineto_trace.spool.raw_records import Chunk, RawSource

OUTER, INNER, LEN, MODULE = 16, 18, 21, 22
NAMES = {
    OUTER: b"F/job/train.py\n7\nouter",
    INNER: b"F/usr/lib/python3/x/y.py\n1\ninner",
    LEN: b"C<built-in function len>",
    MODULE: b"MLinear\n3",
}
Record = tuple[int, int, int]  # time, thread, name
Row = tuple[str, int, int, int, int, int]  # name, start, duration, thread, depth, parent


def decoded(*records: Record, window_end_ns: int = 0, extra: bytes = b"") -> tuple[Decoded, Sequence[str]]:
    """What becomes of the records, and the texts of names."""
    data = b"".join(PYTHON_CALL.pack(*record) for record in records) + extra
    source = RawSource(
        source="python_calls", format=exact_calls.FORMAT, metadata={"prefixes": ["/usr/lib/python3/", "/usr/"]},
        record_bytes={}, records=len(records), dropped=0, data=memoryview(data),
        chunks=(Chunk(sequence=0, records=len(records), offset=0, size=len(data)),),
        strings={SPACE_PYTHON_CALL: NAMES}, torn=0,
    )  # fmt: skip
    strings = StringTable()
    return exact_calls.decode(source, strings, DecodeWindow(0, window_end_ns)), strings.strings


def rows(*records: Record, window_end_ns: int = 0) -> list[Row]:
    calls, text = decoded(*records, window_end_ns=window_end_ns)
    table = calls.tables["python_function"]
    columns = (table[name].tolist() for name in ("name", "start", "duration", "thread", "depth", "parent"))
    return [(text[name], *rest) for name, *rest in zip(*columns, strict=True)]


def test_a_return_belongs_to_the_last_call_of_its_depth() -> None:
    records = [(10, 1, OUTER), (11, 1, LEN), (12, 1, CALL_C_RETURN), (13, 1, INNER), (14, 1, LEN)]
    records += [(15, 1, CALL_C_RETURN), (16, 1, CALL_RETURN), (18, 1, CALL_RETURN)]
    assert rows(*records) == [
        ("/job/train.py(7): outer", 10, 8, 1, 0, -1),
        ("<built-in function len>", 11, 1, 1, 1, 0),
        ("x/y.py(1): inner", 13, 3, 1, 1, 0),
        ("<built-in function len>", 14, 1, 1, 2, 2),
    ]


def test_c_functions_that_call_python_enclose_it() -> None:
    records = [(1, 1, OUTER), (2, 1, LEN), (3, 1, INNER), (4, 1, CALL_RETURN), (5, 1, CALL_C_RETURN)]
    assert [row[1:] for row in rows(*records, window_end_ns=9)] == [(1, 8, 1, 0, -1), (2, 3, 1, 1, 0), (3, 1, 1, 2, 1)]


def test_threads_do_not_mix_and_rows_are_in_the_order_of_their_starts() -> None:
    records = [(1, 2, OUTER), (2, 1, INNER), (3, 2, INNER), (4, 1, CALL_RETURN), (5, 2, CALL_RETURN)]
    assert [row[1:] for row in rows(*records, (6, 2, CALL_RETURN))] == [
        (1, 5, 2, 0, -1),
        (2, 2, 1, 0, -1),
        (3, 2, 2, 1, 0),
    ]


def test_returns_of_calls_before_the_recording_are_left_out() -> None:
    records = [(1, 1, OUTER), (2, 1, CALL_C_RETURN), (3, 1, LEN), (4, 1, CALL_C_RETURN), (5, 1, CALL_RETURN)]
    assert [row[1:5] for row in rows(*records, (6, 1, CALL_RETURN))] == [(1, 4, 1, 0), (3, 1, 1, 1)]


def test_calls_that_do_not_return_end_with_the_window_or_where_their_thread_is_cut() -> None:
    records = [(1, 1, OUTER), (2, 1, INNER), (5, 1, CALL_CUT), (7, 1, OUTER), (8, 1, LEN)]
    found = [row[1:] for row in rows(*records, window_end_ns=20)]
    assert found == [(1, 4, 1, 0, -1), (2, 3, 1, 1, 0), (7, 13, 1, 0, -1), (8, 12, 1, 1, 2)]


def test_modules_have_their_number_and_unknown_names_are_told() -> None:
    calls, text = decoded((1, 1, MODULE), (2, 1, CALL_UNKNOWN), (3, 1, 99))
    table = calls.tables["python_function"]
    assert [text[name] for name in table["name"].tolist()] == ["nn.Module: Linear_3", "<unknown>", "<unknown>"]
    assert table["module"].tolist() == [3, -1, -1]


def test_cut_records_are_counted_and_nothing_is_no_row() -> None:
    assert decoded((1, 1, OUTER), extra=b"half")[0].undecoded == 1
    assert len(decoded()[0].tables["python_function"]) == 0
