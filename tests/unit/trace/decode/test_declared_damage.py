"""What a hostile source can say, changed at random: nothing fails, what is missing is counted, files stay valid."""

import json
import random
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from fuzz import mutate
from kineto_agent.protocol.records import CLOCK_PAIR, SPACE_CLOCK_PAIR
from kineto_agent.protocol.schema import FRAMINGS, SCHEMA_KEY, SIZE_FIELD
from kineto_trace.decode.declared_records import decode
from kineto_trace.decode.decoded import Decoded, DecodeWindow
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import StringTable, Trace
from kineto_trace.open.raw_target import relate
from kineto_trace.spool.raw_records import RawSource
from kineto_trace.store.parquet_folder import load_columns, save_columns
from support.accelerators.npu import NAMES, NPU
from support.trace_files.declared import BASE, a_record_of_each_kind, sized, source_of

WINDOW = DecodeWindow(BASE, BASE + 10**9)
TARGET = TargetInfo(capture_id="c", host="h", pid=1, process_name="p")
CASES = 60


def hostile(framing: str, rng: random.Random) -> RawSource:
    """A source in which the schema, the clock samples, the sizes, the records or the texts are damaged."""
    plain = sized(NPU) if framing == SIZE_FIELD else NPU._replace(framing=framing)
    schema = plain._replace(clock=rng.choice(("realtime", "device", "boottime")))
    records, texts = a_record_of_each_kind(schema), {(NAMES, 1): b"_Z3addPf"}
    texts[SPACE_CLOCK_PAIR, BASE] = CLOCK_PAIR.pack(BASE - 7)
    if rng.random() < 0.7:
        records = mutate.damaged(records, rng)
    if rng.random() < 0.2:
        texts[SPACE_CLOCK_PAIR, mutate.number(rng) & (1 << 64) - 1] = CLOCK_PAIR.pack(rng.getrandbits(64))
        texts[NAMES, 1] = mutate.damaged(b"_Z3addPf", rng)
    sizes = {rng.randrange(10): mutate.number(rng) & 0xFFFFFFFF} if rng.random() < 0.3 else {}
    source = source_of(schema, [records[: len(records) // 2], records], strings=texts, record_bytes=sizes,
                       counts={1: 1 << 60}, clocks=[[BASE, BASE - 7]])  # fmt: skip
    metadata: Any = json.loads(json.dumps(source.metadata))
    if rng.random() < 0.4:
        metadata = mutate.changed(metadata, rng)
    source.metadata.clear()
    source.metadata.update(metadata if isinstance(metadata, dict) else {SCHEMA_KEY: metadata})
    return source


def check(found: Decoded, source: RawSource, strings: StringTable) -> None:
    assert sum(len(table) for table in found.tables.values()) <= found.records
    assert found.undecoded <= len(source.data) + len(source.chunks)
    assert bool(found.undecoded) <= bool(found.warnings)
    for table in found.tables.values():
        assert (table["start"] > 0).all()
        assert (table["duration"] >= 0).all()
        for column in table.schema:
            if column.text and len(table):
                assert -1 <= table[column.name].min() <= table[column.name].max() < len(strings.strings)


def is_valid(trace: Trace, folder: Path) -> None:
    save_columns(trace, folder)
    again = load_columns(folder)
    for kind, table in trace.tables.items():
        for name, column in table.columns.items():
            np.testing.assert_array_equal(again.tables[kind][name], column)
    with (folder / "chrome.json").open("wb") as file, TextSink(file) as sink:
        write_chrome(trace, sink, trace_name="t")
    json.loads((folder / "chrome.json").read_bytes(), parse_constant=no_constant)


def no_constant(text: str) -> NoReturn:
    raise AssertionError(f"the trace has {text}, which is no JSON")


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("window", [WINDOW, DecodeWindow()])
def test_damaged_sources_are_decoded_or_counted(tmp_path: Path, framing: str, window: DecodeWindow) -> None:
    decoded = 0
    for seed in range(CASES):
        source, strings = hostile(framing, random.Random(f"{framing} {seed}")), StringTable()
        found = decode(source, strings, window)
        check(found, source, strings)
        decoded += len(found.tables) > 0
        trace = Trace(target=TARGET, strings=tuple(strings.strings), tables=relate(found.tables, strings),
                      window_start_ns=BASE, window_end_ns=BASE + 10**9, categories=found.categories)  # fmt: skip
        if seed % 6 == 0:
            is_valid(trace, tmp_path)
    assert decoded > CASES // 2
