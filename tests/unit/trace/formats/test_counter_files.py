"""Files with hardware counters: what viewers get, and what is read back."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.conversion.time_cut import cut
from kineto_trace.model.trace import StringTable, Trace
from support.counters.trace_samples import (
    LAST_DEVICE,
    LAST_NS,
    NAN,
    ODD_TEXTS,
    ODD_VALUES,
    WAYS,
    as_chrome,
    readable,
    sample,
    through,
)
from support.trace_files.chrome_files import document, load, load_events, written
from support.trace_files.traces import BASE_NS, START_NS, table, trace

READ = {"name": "PCIe read", "metric": "pcie__read_bytes.sum.per_second", "unit": "B/s"}
KERNEL = {"name": "k", "start": 0, "duration": 100, "stream": 7}
ROUTES = [("chrome",), ("perfetto",), ("chrome", "perfetto"), ("perfetto", "chrome"), ("chrome", "chrome")]
SAMPLED = {"ph": "C", "cat": "%,dram__x,hardware_counter", "name": "DRAM %", "pid": 0, "tid": 0}
GAP = {**SAMPLED, "cat": "hardware_counter_gap", "args": {"": 0}}


def made() -> Trace:
    samples = [sample(0, 1000, 12.5), sample(1000, 2000, NAN), sample(2000, 3500, 0.1), sample(4000, 5000, 99)]
    samples += [sample(0, 1000, 5e9, **READ), sample(100, 300, 1, device=1, name="Throttled by heat", unit="")]
    return trace({"kernel": [KERNEL], "counter": samples})


def counters(data: bytes) -> list[tuple[Any, ...]]:
    """The rows of counters in a Chrome trace, with ns since START_NS."""
    return [
        (event["pid"], event["name"], round((event["ts"] * 1000) - (START_NS - BASE_NS)), event["args"][""])
        for event in json.loads(data)["traceEvents"]
        if event["ph"] == "C"
    ]


def test_a_viewer_gets_a_track_with_unit_for_each_device_and_metric_that_is_0_where_nothing_is_known() -> None:
    assert counters(as_chrome(made())) == [
        (0, "DRAM %", 0, 12.5),
        (0, "DRAM %", 1000, 0.0),
        (0, "DRAM %", 2000, 0.1),
        (0, "DRAM %", 3500, 0.0),
        (0, "DRAM %", 4000, 99.0),
        (0, "DRAM %", 5000, 0.0),
        (0, "PCIe read B/s", 0, 5e9),
        (0, "PCIe read B/s", 1000, 0.0),
        (1, "Throttled by heat", 100, 1.0),
        (1, "Throttled by heat", 300, 0.0),
    ]


def test_a_gpu_that_only_has_counters_is_named() -> None:
    rows = json.loads(as_chrome(made()))["traceEvents"]
    labels = {row["pid"]: row["args"]["labels"] for row in rows if row["name"] == "process_labels"}
    assert labels == {4242: "CPU", 0: "GPU 0", 1: "GPU 1"}


@pytest.mark.parametrize("ways", ROUTES)
def test_files_that_we_wrote_have_the_same_samples(ways: tuple[str, ...]) -> None:
    written_one = made()
    found = through(written_one, ways)
    rounded = [(*row[:-1], float(np.float32(row[-1])) if row[-1] != "" else "") for row in readable(written_one)]
    assert readable(found) == rounded
    assert found.notes == ()


@pytest.mark.parametrize("way", WAYS)
def test_samples_do_not_stretch_the_recorded_time(way: str) -> None:
    whole = trace({"kernel": [KERNEL], "counter": [sample(-5000, 9000, 1)]})
    found = through(whole, [way])
    assert (found.window_start_ns, found.window_end_ns) == (whole.window_start_ns, whole.window_end_ns)


def test_a_chrome_trace_is_written_back_as_it_was() -> None:
    data = as_chrome(made())
    own, again = json.loads(data), json.loads(written(load(data)))
    assert again["traceEvents"] == own["traceEvents"]


def test_two_metrics_with_one_label_have_tracks_of_their_own() -> None:
    whole = trace({"counter": [sample(0, 10, 1), sample(0, 10, 2, metric="fbpa__x")]})
    assert [row[1] for row in counters(as_chrome(whole))][::2] == ["DRAM %", "DRAM % (fbpa__x)"]
    assert readable(through(whole, ["perfetto", "chrome"])) == readable(whole)


def test_rows_of_other_programs_stay_in_the_table_other() -> None:
    event = {"ph": "C", "pid": "GPU 0 Counters", "tid": 0, "name": "sm__x", "ts": 1, "args": {"": 5}}
    complete = {**SAMPLED, "ph": "X", "ts": 1, "dur": 2}
    found = load_events(event, {**event, "cat": "anything"}, complete)
    assert not len(found.table("counter")) and len(found.table("other")) == 3


def test_the_last_sample_of_a_track_whose_end_is_not_in_the_file_is_as_long_as_the_one_before() -> None:
    found = load_events(*({**SAMPLED, "ts": at, "args": {"": at}} for at in (1, 3)))
    assert found.table("counter")["duration"].tolist() == [2000, 2000]
    alone = load_events({**SAMPLED, "ts": 1, "args": {"": 1}})
    assert alone.table("counter")["duration"].tolist() == [0]


@pytest.mark.parametrize("args", [{}, {"": None}, {"": "x"}, {"": 1e300}, {"other": 1}])
def test_a_row_without_a_usable_number_has_no_value_and_is_written_back(args: dict[str, Any]) -> None:
    text = document({**SAMPLED, "ts": 1, "args": args}, {**GAP, "ts": 2})
    found = load(text)
    assert np.isnan(found.table("counter")["value"]).all()
    assert json.loads(written(found))["traceEvents"] == json.loads(text)["traceEvents"]


@pytest.mark.parametrize("tid", [-1, 2**40, "seven", None])
def test_a_thread_that_is_no_number_of_a_device_is_taken_for_device_0(tid: Any) -> None:
    found = load_events({**SAMPLED, "tid": tid, "ts": 1, "args": {"": 1}})
    assert found.table("counter")["device"].tolist() == [0]


def test_a_part_keeps_whole_samples_and_their_ends() -> None:
    whole = through(made(), ["chrome"])
    part = cut(whole, START_NS + 2500, START_NS + 3000)
    (row,) = readable(part)
    assert row[4:] == (START_NS + 2000, START_NS + 3500, float(np.float32(0.1)))
    assert counters(written(part)) == [(0, "DRAM %", 2000, 0.1), (0, "DRAM %", 3500, 0.0)]


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=False)
STEPS = st.lists(st.tuples(st.sampled_from([0, 0, 1000, 7]), st.integers(1, 10**6), FLOATS), min_size=1, max_size=12)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="(),"), min_size=1, max_size=8).map(str.strip)
ABOUT = st.fixed_dictionaries({
    "name": WORDS.filter(bool), "metric": WORDS, "unit": st.sampled_from(["", "%", "B/s", "°C"]),
    "device": st.integers(0, 3),
})  # fmt: skip


@given(st.lists(st.tuples(ABOUT, STEPS), max_size=4), st.sampled_from(ROUTES))
def test_any_samples_are_read_back_as_they_were(
    series: list[tuple[dict[str, Any], list[tuple[int, int, float]]]], ways: tuple[str, ...]
) -> None:
    rows, seen = [], set()
    for about, steps in series:
        if (about["device"], about["metric"]) in seen:
            continue
        seen.add((about["device"], about["metric"]))
        at = 0
        for gap, length, value in steps:
            rows.append({**about, "start": at + gap, "duration": length, "value": value})
            at += gap + length
    whole = trace({"kernel": [KERNEL], "counter": rows} if rows else {"kernel": [KERNEL]})
    assert readable(through(whole, ways)) == readable(whole)


def ending_in_time(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "duration": min(row["duration"], LAST_NS - START_NS - row["start"])}


ODD = st.fixed_dictionaries({
    "start": st.one_of(st.integers(0, 2000), st.sampled_from([-START_NS, LAST_NS - START_NS, LAST_NS // 2 - START_NS])),
    "duration": st.sampled_from([0, 1, 1000, 10**9, LAST_NS // 2]),
    "value": st.one_of(st.sampled_from(ODD_VALUES), FLOATS),
    "name": st.sampled_from(ODD_TEXTS), "metric": st.sampled_from(ODD_TEXTS), "unit": st.sampled_from(ODD_TEXTS),
    "device": st.sampled_from([0, 1, LAST_DEVICE]),
}).map(ending_in_time)  # fmt: skip


@given(st.lists(ODD, max_size=12), st.sampled_from(ROUTES))
def test_odd_samples_are_written_as_valid_files_that_are_the_same_once_more(
    rows: list[dict[str, Any]], ways: tuple[str, ...]
) -> None:
    """Overlapping ones, of any value, time and text, which may not be read back as they were."""
    whole = trace({"kernel": [KERNEL], "counter": rows})
    json.loads(as_chrome(whole))
    once = through(whole, ways)
    assert len(once.table("counter")) == len(rows)
    again = through(once, ways)
    assert json.dumps(readable(again)) == json.dumps(readable(once))


ALIKE: list[list[dict[str, Any]]] = [
    [{"name": "\ud800", "metric": "", "unit": "%"}, {"name": "\udfff", "metric": "", "unit": ""}],
    [{"name": "", "metric": "", "unit": unit} for unit in ("", "%", "bytes")],
    [{"name": "\ud800", "metric": "\ud800"}, {"name": "\udfff", "metric": "\udfff"}],
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("series", ALIKE)
def test_series_that_a_file_cannot_name_apart_are_the_same_once_more(way: str, series: list[dict[str, Any]]) -> None:
    rows = [sample(0, 10 - at, 1.0, **about) for at, about in enumerate(series)]
    once = through(trace({"kernel": [KERNEL], "counter": rows}), [way])
    assert len(once.table("counter")) == len(series)
    assert readable(through(once, [way])) == readable(once)


def test_thousands_of_metrics_are_read_back() -> None:
    rows = [sample(0, 10, at, name=f"{at}", metric=f"m{at}", device=at % 3) for at in range(5000)]
    whole = trace({"counter": rows})
    assert readable(through(whole, ["chrome", "perfetto"])) == readable(whole)


KERNEL_ROW = {"ph": "X", "cat": "kernel", "name": "k", "pid": "GPU 0", "tid": 7, "ts": 1, "dur": 2}
FILE = [{**KERNEL_ROW, "args": {"device": 0, "odd": 1}}]


def beside() -> Trace:
    """A file's trace with samples that were recorded beside it, on a GPU that it has and one that it has not."""
    found = load_events(*FILE)
    strings = StringTable()
    strings.add_all(found.strings)
    samples = table("counter", [sample(0, 10, 5), sample(0, 10, 7, device=1)], strings)
    return replace(found, tables={**found.tables, "counter": samples}, strings=tuple(strings.strings))


@pytest.mark.parametrize("ways", ROUTES)
def test_samples_beside_a_file_leave_its_rows_as_they_were(ways: tuple[str, ...]) -> None:
    measured = beside()
    assert readable(through(measured, ways)) == readable(measured)
    rows = json.loads(as_chrome(through(measured, ways)))["traceEvents"]
    assert [row for row in rows if row["ph"] == "X"] == FILE
    assert {row["pid"] for row in rows if row["ph"] == "C"} == {"GPU 0", 1}


def test_samples_beside_a_file_without_rows_leave_a_valid_file() -> None:
    strings = StringTable()
    samples = table("counter", [sample(0, 10, 5)], strings)
    empty = replace(load_events(), tables={"counter": samples}, strings=tuple(strings.strings))
    assert json.loads(as_chrome(empty))["traceEvents"] == []
