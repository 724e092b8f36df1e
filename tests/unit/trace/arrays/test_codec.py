import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace.arrays import codec
from kineto_trace.arrays.codec import ColumnPlan, Decoder, Field, Interner, KindPlan, PreparedTexts, RowWriter, lanes
from kineto_trace.errors import CodecError


def test_numbers_keys_in_the_order_of_appearance() -> None:
    interner = Interner()
    assert interner.intern(np.array([9, 0, 9, 2**64 - 1], np.uint64)).tolist() == [0, 1, 0, 2]
    assert interner.intern(np.array([2**64 - 1, 5], np.uint64)).tolist() == [2, 3]
    assert interner.keys().tolist() == [9, 0, 2**64 - 1, 5]
    assert len(interner) == 4


def test_an_interner_grows() -> None:
    keys = np.random.default_rng(1).permutation(200_000).astype(np.uint64) << np.uint64(20)
    numbers = Interner().intern(np.concatenate([keys, keys]))
    assert numbers.tolist() == list(range(200_000)) * 2


RECORD = np.dtype([("kind", "<u4"), ("small", "<u2"), ("pad", "<u2"), ("start", "<u8"), ("end", "<u8")])


def plans(rows: int) -> tuple[list[KindPlan], dict[str, Any], Interner]:
    interner = Interner()
    out: dict[str, Any] = {
        "start": np.zeros(rows, np.int64),
        "duration": np.zeros(rows, np.int64),
        "small": np.zeros(rows, np.uint16),
        "number": np.zeros(rows, np.uint32),
    }
    columns = [
        ColumnPlan(codec.SPAN, 8, 8, out["start"], 16, out["duration"]),
        ColumnPlan(codec.COPY, 2, 4, out["small"]),
        ColumnPlan(codec.INTERN, 8, 8, out["number"], interner=interner),
    ]
    return [KindPlan(7, 24, rows, columns), KindPlan(9, 16, 0, ())], out, interner


def record(small: int, start: int, end: int) -> bytes:
    return np.array([(7, small, 0, start, end)], RECORD).tobytes()


def decode(decoder: Decoder, data: bytes) -> codec.BufferResult:
    return decoder.decode(np.frombuffer(data, np.uint8))


def test_decodes_columns_and_steps_over_unwanted_kinds() -> None:
    kinds, out, interner = plans(4)
    decoder = Decoder(kinds)
    skipped = np.array([9, 0, 0, 0], np.uint32).tobytes()
    result = decode(decoder, record(1, 100, 130) + skipped + record(2, 50, 40))
    assert result == (64, 3, codec.OK, 0)
    assert decode(decoder, record(3, 100, 101)).status == codec.OK
    assert decoder.rows() == {7: 3, 9: 1}
    assert out["start"].tolist() == [100, 50, 100, 0]
    assert out["duration"].tolist() == [30, 0, 1, 0]  # an end before its start is no time at all
    assert out["small"].tolist() == [1, 2, 3, 0]
    assert out["number"].tolist() == [0, 1, 0, 0]
    assert interner.keys().tolist() == [100, 50]


def test_stops_at_a_cut_record() -> None:
    decoder = Decoder(plans(4)[0])
    assert decode(decoder, record(1, 2, 3) + record(1, 2, 3)[:20])[:3] == (24, 1, codec.TORN)
    assert decode(decoder, record(1, 2, 3)[:5])[:3] == (0, 0, codec.TORN)
    assert decoder.rows()[7] == 1


@pytest.mark.parametrize("kind", [0, 8, 63, 64, 2**32 - 1])
def test_stops_at_an_unknown_kind(kind: int) -> None:
    unknown = np.array([kind, 0, 0, 0], np.uint32).tobytes()
    decoder = Decoder(plans(4)[0])
    assert decode(decoder, record(1, 2, 3) + unknown) == (24, 1, codec.UNKNOWN_KIND, kind)


def test_never_writes_more_rows_than_there_is_room() -> None:
    kinds, out, _ = plans(300)
    decoder = Decoder([kinds[0]._replace(capacity=256), kinds[1]])
    assert decode(decoder, record(1, 2, 3) * 300).status == codec.FULL
    assert decoder.rows()[7] <= 256
    assert not out["small"][256:].any()


@pytest.mark.parametrize(
    "column",
    [
        ColumnPlan(codec.COPY, 8, 20, np.zeros(4, np.uint64)),
        ColumnPlan(codec.COPY, 4, 4, np.zeros(3, np.uint32)),
        ColumnPlan(codec.COPY, 2, 4, np.zeros(4, np.uint32)),
        ColumnPlan(codec.SPAN, 8, 8, np.zeros(4, np.int64), 20, np.zeros(4, np.int64)),
        ColumnPlan(codec.SPAN, 8, 8, np.zeros(4, np.int64)),
        ColumnPlan(codec.INTERN, 8, 8, np.zeros(4, np.uint32)),
        ColumnPlan(codec.COPY, 2, 4, np.zeros(8, np.uint16)[::2]),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(column: ColumnPlan) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Decoder([KindPlan(7, 24, 4, [column])])


def rows(fields: list[Field], count: int, capacity: int = 4096) -> bytes:
    out = np.zeros(capacity, np.uint8)
    written, size = RowWriter(fields).write(out, 0, count)
    assert written == count
    return out[:size].tobytes()


@pytest.mark.parametrize(
    ("operation", "values", "expected"),
    [
        (codec.UNSIGNED, np.array([0, 7, 10, 99, 100, 2**64 - 1], np.uint64), [0, 7, 10, 99, 100, 2**64 - 1]),
        (codec.UNSIGNED, np.array([65535, 1], np.uint16), [65535, 1]),
        (codec.UNSIGNED, np.array([255], np.uint8), [255]),
        (codec.SIGNED, np.array([-1, 0, -(2**63), 2**63 - 1], np.int64), [-1, 0, -(2**63), 2**63 - 1]),
        (codec.SIGNED, np.array([-128], np.int8), [-128]),
        (codec.SIGNED, np.array([-32768], np.int16), [-32768]),
        (codec.SIGNED, np.array([-5], np.int32), [-5]),
        (codec.DECIMAL, np.array([0.5, 1.0, 2.0000004, -3.25, 1234.567891]), [0.5, 1, 2, -3.25, 1234.567891]),
        (codec.DECIMAL, np.array([np.nan, np.inf, -np.inf, 1e300]), [0, 0, 0, 0]),
    ],
)
def test_writes_numbers_as_json_does(operation: int, values: Any, expected: list[float]) -> None:
    text = rows([Field(b",", operation, values)], len(values))
    assert json.loads(b"[" + text[1:] + b"]") == expected


def test_writes_microseconds_with_three_decimals() -> None:
    times = np.array([1_000_000, 1_000_001, 2_234_567, 999_999, -(2**62)], np.int64)
    text = rows([Field(b" ", codec.MICROSECONDS, times, base=1_000_000)], 5)
    assert text == b" 0.000 0.001 1234.567 0.000 0.000"


def test_writes_texts_by_number_and_nothing_for_unknown_numbers() -> None:
    texts = PreparedTexts([b"a", b"", b"x" * 100])
    text = rows([Field(b"<", codec.TEXT, np.array([2, 0, 1, 3], np.int32), texts), Field(b">")], 4)
    assert text == b"<" + b"x" * 100 + b"><a><><>"


def test_an_optional_value_is_left_out_with_its_literal() -> None:
    values = np.array([3, -1, 0, -2], np.int64)
    text = rows([Field(b"<"), Field(b"n=", codec.OPTIONAL, values, base=-1), Field(b">")], 4)
    assert text == b"<n=3><><n=0><n=-2>"


def test_writes_only_whole_rows() -> None:
    writer = RowWriter([Field(b"0123456789", codec.UNSIGNED, np.arange(9, dtype=np.uint8)), Field(b"\n")])
    out = np.full(64 + 16, 0x55, np.uint8)
    written, size = writer.write(out[:64], 0, 9)
    assert 0 < written < 9
    assert size == 12 * written
    assert (out[64:] == 0x55).all()
    assert writer.write(out[:5], 0, 9) == (0, 0)


def test_rows_that_do_not_exist_are_refused() -> None:
    writer = RowWriter([Field(b"", codec.UNSIGNED, np.arange(9, dtype=np.uint8))])
    with pytest.raises(IndexError):
        writer.write(np.zeros(99, np.uint8), 5, 5)


def test_overlapping_events_of_a_track_get_lanes_of_their_own() -> None:
    track = np.array([1, 1, 1, 1, 2], np.uint32)
    start = np.array([0, 5, 6, 10, 0], np.int64)
    end = np.array([10, 8, 12, 11, 1], np.int64)
    assert lanes(track, start, end, 16).tolist() == [0, 1, 2, 0, 0]
    assert lanes(track, start, end, 2).tolist() == [0, 1, 1, 0, 0]


def test_a_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(CodecError, match=r"build_hook\.py"):
        codec.load(tmp_path / "none.so")


SERVICE = Path(__file__).parents[4] / "daemon"
LIBRARY = SERVICE / "kineto_trace" / "_native" / "libkineto_codec.so"


@pytest.mark.parametrize("path", sorted((SERVICE / "native").rglob("*.c")), ids=lambda path: path.name)
def test_a_c_file_says_which_threads_run_it_and_where_it_blocks(path: Path) -> None:
    comment = path.read_text().split("*/")[0]
    assert comment.startswith("/*") and "\n * Threads: " in comment and "\n * Blocks: " in comment


def test_what_is_exported_has_one_prefix() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split()[-1] for line in listing.splitlines()]
    assert names and all(name.startswith("kc_") for name in names)
