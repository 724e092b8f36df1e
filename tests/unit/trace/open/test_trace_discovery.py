import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.errors import FileError
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.open.trace_discovery import Source, find_traces, rank_notes
from kineto_trace.open.trace_source import origin_of
from kineto_trace.store.parquet_folder import save_columns
from support.trace_files.traces import target, trace


def chrome(path: Path, rank: int | None = None, **head: Any) -> Path:
    values: Mapping[str, Any] = {"schemaVersion": 1, **head}
    if rank is not None:
        values = {**values, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 8}}
    text = json.dumps({**values, "traceEvents": []}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def found(*paths: Path | str) -> list[tuple[str, int, str]]:
    return [(source.path.name, source.rank, source.rank_from) for source in find_traces(*paths)]


def test_the_rank_in_the_file_counts_first(tmp_path: Path) -> None:
    files = [chrome(tmp_path / "rank0.json.gz", 5), chrome(tmp_path / "rank1.json", 2)]
    assert found(*files) == [("rank1.json", 2, "trace"), ("rank0.json.gz", 5, "trace")]


def test_a_rank_at_the_end_of_a_file_is_found_too(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text('{"traceEvents": [' + " " * 400_000 + '], "distributedInfo": {"rank": 7}}')
    assert origin_of(file).rank == 7


def test_without_one_the_name_says_the_rank(tmp_path: Path) -> None:
    for name in ("run_rank10.json", "run_rank_9.json.gz", "Rank-3.json"):
        chrome(tmp_path / name)
    chrome(tmp_path / "rank_4" / "trace.json")
    assert found(tmp_path, tmp_path / "rank_4") == [
        ("Rank-3.json", 3, "name"),
        ("trace.json", 4, "name"),
        ("run_rank_9.json.gz", 9, "name"),
        ("run_rank10.json", 10, "name"),
    ]


def test_last_numbers_are_ranks_if_all_names_have_different_ones(tmp_path: Path) -> None:
    files = [chrome(tmp_path / name) for name in ("trace_3.json", "trace_1.json")]
    assert found(*files) == [("trace_1.json", 1, "number"), ("trace_3.json", 3, "number")]
    files.append(chrome(tmp_path / "other.json"))
    assert found(*files) == [("trace_3.json", 0, "order"), ("trace_1.json", 1, "order"), ("other.json", 2, "order")]


def test_else_the_order_gives_free_ranks(tmp_path: Path) -> None:
    for name, rank in (("a.json", None), ("b10.json", None), ("b9.json", None), ("c.json", 1)):
        chrome(tmp_path / name, rank)
    assert found(tmp_path) == [
        ("a.json", 0, "order"),
        ("c.json", 1, "trace"),
        ("b9.json", 2, "order"),
        ("b10.json", 3, "order"),
    ]


def test_a_rank_that_is_there_twice_is_said(tmp_path: Path) -> None:
    chrome(tmp_path / "a.json", 2)
    chrome(tmp_path / "b.json", 2)
    sources = find_traces(tmp_path)
    assert [source.rank for source in sources] == [2, 2]
    assert rank_notes(sources) == [
        f"rank 2 has 2 traces, and all of them are counted: {tmp_path}/a.json, {tmp_path}/b.json"
    ]
    assert rank_notes(sources[:1]) == []


def test_a_tensorboard_log_folder_has_workers_and_spans(tmp_path: Path) -> None:
    for name in ("h_1.200.pt.trace.json.gz", "h_1.100.pt.trace.json.gz", "h_2.150.pt.trace.json", "h_3.pt.trace.json"):
        chrome(tmp_path / "run" / name)
    chrome(tmp_path / "run" / "memory.json", 9)
    found = find_traces(tmp_path, captures="all")
    assert [(s.path.name, s.worker, s.span, s.rank) for s in found if s.worker] == [
        ("h_1.100.pt.trace.json.gz", "h_1", 1, 0),
        ("h_1.200.pt.trace.json.gz", "h_1", 2, 0),
        ("h_2.150.pt.trace.json", "h_2", 1, 1),
        ("h_3.pt.trace.json", "h_3", 1, 2),
    ]


def test_of_the_spans_of_a_worker_the_last_one_is_used(tmp_path: Path) -> None:
    for name in ("h_1.200.pt.trace.json.gz", "h_1.100.pt.trace.json.gz", "h_2.150.pt.trace.json"):
        chrome(tmp_path / name)
    sources = find_traces(tmp_path)
    assert [(source.path.name, source.rank) for source in sources] == [
        ("h_1.200.pt.trace.json.gz", 0),
        ("h_2.150.pt.trace.json", 1),
    ]
    assert rank_notes(sources) == [
        "there are 2 captures of rank 0: span 0002 is used; the others are span 0001 (choose one with captures=ID, or "
        "--captures ID)"
    ]


A, B, C = "20260101-101500-001-aaaaaa", "20260101-101700-001-bbbbbb", "20260101-102000-001-cccccc"


def captured(
    path: Path, pid: int, capture: str, *, rank: int | None = None, host: str = "gpu", fleet: str = ""
) -> Path:
    """A trace of kinetod: of this process, in this capture."""
    labels = {"kineto.fleet": fleet} if fleet else {}
    chrome(path, rank, host_name=host, kinetod={"capture_id": capture, "labels": labels})
    document = json.loads(path.read_bytes())
    document["traceEvents"] = [{"ph": "M", "ts": 1.0, "name": "process_name", "pid": pid, "tid": 0, "args": {}}]
    path.write_text(json.dumps(document))
    return path


def test_four_captures_of_one_process_are_one_rank_and_the_latest_is_used(tmp_path: Path) -> None:
    for number, capture in enumerate((A, B, C, "20260101-110000-001-dddddd")):
        captured(tmp_path / f"trace_{number}.json", 4711, capture)
    sources = find_traces(tmp_path)
    assert [(source.path.name, source.rank) for source in sources] == [("trace_3.json", 0)]
    assert rank_notes(sources) == [
        f"there are 4 captures of rank 0: 20260101-110000-001-dddddd is used; the others are {A}, {B}, {C} (choose one "
        "with captures=ID, or --captures ID)"
    ]
    assert [source.path.name for source in find_traces(tmp_path, captures=B)] == ["trace_1.json"]
    assert [source.rank for source in find_traces(tmp_path, captures="all")] == [0, 0, 0, 0]
    with pytest.raises(FileError, match=f"there is no capture x; expected latest, all, or one of: {A}"):
        find_traces(tmp_path, captures="x")


def test_of_a_job_the_capture_that_most_ranks_are_in_is_used_for_all_of_them(tmp_path: Path) -> None:
    for rank in range(3):
        for name, capture in (("a", A), ("b", B)):
            captured(tmp_path / f"{name}{rank}.json", 100 + rank, capture, rank=rank)
    captured(tmp_path / "c0.json", 100, C, rank=0)
    sources = find_traces(tmp_path)
    assert [source.path.name for source in sources] == ["b0.json", "b1.json", "b2.json"]
    assert rank_notes(sources) == [
        f"there are 3 captures of rank 0: {B} is used; the others are {A}, {C} (choose one with captures=ID, or "
        "--captures ID)",
        f"there are 2 captures of 2 ranks (1, 2): {B} is used; the others are {A} (choose one with captures=ID, or "
        "--captures ID)",
    ]


def test_captures_of_several_hosts_at_one_time_are_one(tmp_path: Path) -> None:
    for host, (first, second) in {"x": (A, C), "y": (B, "20260101-102001-001-eeeeee")}.items():
        captured(tmp_path / f"{host}1.json", 7, first, host=host, fleet="20260101-f1")
        captured(tmp_path / f"{host}2.json", 7, second, host=host, fleet="20260101-f2")
    sources = find_traces(tmp_path)
    assert [(source.path.name, source.rank) for source in sources] == [("x2.json", 0), ("y2.json", 1)]
    assert "there are 2 captures of 2 ranks (0, 1): 20260101-f2 is used" in rank_notes(sources)[0]


def test_processes_that_were_captured_apart_are_ranks_of_their_own(tmp_path: Path) -> None:
    captured(tmp_path / "a.json", 1, A)
    captured(tmp_path / "b.json", 2, B)
    captured(tmp_path / "c.json", 1, C, host="other")
    sources = find_traces(tmp_path)
    assert [(source.path.name, source.rank) for source in sources] == [("a.json", 0), ("b.json", 1), ("c.json", 2)]
    assert rank_notes(sources) == []


def test_stored_captures_of_one_process_are_one_rank(tmp_path: Path) -> None:
    for name, capture in (("one", A), ("two", B)):
        about = replace(target(rank=None), capture_id=capture)
        save_columns(trace({}, target=about), tmp_path / f"{name}.kineto")
    assert [source.path.name for source in find_traces(tmp_path)] == ["two.kineto"]


def test_perfetto_captures_of_one_process_are_one_rank(tmp_path: Path) -> None:
    for name, capture in (("one", A), ("two", B)):
        about = replace(target(rank=None), capture_id=capture)
        export_trace(
            trace({"kernel": [{"name": "k", "start": 0, "duration": 5}]}, target=about), tmp_path / f"{name}.pftrace"
        )
    assert [(source.path.name, source.capture) for source in find_traces(tmp_path)] == [("two.pftrace", B)]
    assert origin_of(tmp_path / "one.pftrace").process == "host 4242"


def test_the_targets_of_a_capture_are_traces(tmp_path: Path) -> None:
    for name, rank in (("11-1", 1), ("12-1", 0)):
        folder = tmp_path / "targets" / name
        folder.mkdir(parents=True)
        target(rank=rank).write(folder)
        chrome(folder / "trace.json.gz", rank)  # the same trace once more
        save_columns(trace({}, target=target(rank=rank)), folder / "columns")
    assert found(tmp_path) == [("12-1", 0, "trace"), ("11-1", 1, "trace")]


def test_stored_traces_lie_beside_files_and_other_json_is_left_out(tmp_path: Path) -> None:
    save_columns(trace({}, target=target(rank=3)), tmp_path / "a.kineto")
    chrome(tmp_path / "b.json", 1)
    (tmp_path / "settings.json").write_text('{"steps": 3}')
    (tmp_path / "cut.json.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "notes.txt").write_text("[]")
    assert found(tmp_path) == [("b.json", 1, "trace"), ("a.kineto", 3, "trace")]


def test_patterns_and_doubles(tmp_path: Path) -> None:
    for rank in range(3):
        chrome(tmp_path / f"rank{rank}.json", rank)
    assert [name for name, _, _ in found(f"{tmp_path}/rank[12].json", tmp_path / "rank1.json")] == [
        "rank1.json",
        "rank2.json",
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [("none.json", "does not exist"), ("none*.json", "no file matches"), ("empty", "is a folder without traces")],
)
def test_a_path_without_traces_is_an_error(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match=message):
        find_traces(tmp_path / path)


def test_a_file_named_outright_is_a_source_whatever_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "odd.txt").write_text("?")
    assert find_traces(tmp_path / "odd.txt") == [Source(path=tmp_path / "odd.txt", rank=0, rank_from="order")]
