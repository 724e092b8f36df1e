"""Traces in an object store: found by manifests, fetched as far as they are needed, compared with their checksums."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from kineto_trace.catalog.view_runner import run_view, text_bytes
from kineto_trace.errors import FileError, TraceError
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.open import remote_traces
from kineto_trace.open.remote_traces import fetch, open_remote
from kineto_trace.open.trace_discovery import find_traces
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.open.trace_source import RemoteFile, RemoteTrace, Source
from kineto_trace.store import object_stores, upload_manifest
from support.service.stored import store
from support.trace_files.ranks import document, launched
from support.trace_files.uploaded import upload


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    """A capture of four ranks on two hosts."""
    url = f"file://{tmp_path}/bucket"
    upload(f"{url}/h0/c0", tmp_path, {0: 10, 1: 20}, fleet="f1")
    upload(f"{url}/h1/c1", tmp_path, {2: 30, 3: 40}, fleet="f1", lost=[7])
    return url


def kernels(*paths: str, **options: str) -> tuple[list[tuple[int, float]], tuple[str, ...]]:
    result = run_view("kernels", find_traces(*paths, **options))
    return [(row["rank"], row["total_us"]) for row in result.rows()], result.notes


def test_the_ranks_of_uploaded_captures_are_found_and_read(bucket: str) -> None:
    found, notes = kernels(bucket)
    assert found == [(0, 20), (1, 40), (2, 60), (3, 80)]
    assert notes == (
        f"rank 7 is missing: {bucket}/h1/c1/107-7000000007: its capture ended as FAILED: the process ended",
    )


def test_a_pattern_chooses_captures_and_a_file_url_is_one_trace(bucket: str, tmp_path: Path) -> None:
    assert kernels(f"{bucket}/*/c0")[0] == [(0, 20), (1, 40)]
    file = tmp_path / "one.json.gz"
    events = launched("k", 1, 2, 5, 1)
    file.write_bytes(gzip.compress(json.dumps(document(events, rank=6)).encode()))
    assert kernels(f"file://{file}")[0] == [(6, 5)]


def test_captures_of_several_fleets_are_no_one_job(bucket: str, tmp_path: Path) -> None:
    upload(f"{bucket}/h0/c9", tmp_path, {0: 50}, fleet="f2")
    with pytest.raises(FileError, match=r"holds captures of 2 fleets; choose one with --fleet or a pattern \(f2, f1\)"):
        find_traces(bucket)
    assert kernels(bucket, fleet="f2")[0] == [(0, 100)]
    with pytest.raises(FileError, match=r"no capture has the label kineto.fleet=f3; labels found: f2, f1"):
        find_traces(bucket, fleet="f3")


def test_only_what_is_looked_at_is_fetched(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[str] = []
    copy = remote_traces._Fetcher._copy

    def noted(self: remote_traces._Fetcher, path: str, *rest: object) -> None:
        got.append(Path(path).name)
        copy(self, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(remote_traces._Fetcher, "_copy", noted)
    source = find_traces(bucket)[0]
    assert source.remote is not None
    with open_remote(source.remote) as trace:
        assert trace.target.rank == 0
        assert got == ["trace.json"]
        assert len(trace.table("kernel")["duration"]) == 2
        assert [trace.strings[number] for number in trace.table("kernel")["name"]] == ["gemm", "gemm"]
        trace.table("kernel")["start"]
    assert got == ["trace.json", "kernel.parquet", "strings.parquet"]


def test_what_was_fetched_is_gone_afterwards(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    kernels(bucket)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_missing_and_a_changed_object_are_named_and_the_rest_is_there(bucket: str, tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    (folder / "h0/c0/101-7000000001/columns/kernel.parquet").unlink()
    changed = folder / "h1/c1/102-7000000002/columns/kernel.parquet"
    changed.write_bytes(bytes(len(changed.read_bytes())))
    cut = folder / "h1/c1/103-7000000003/columns/kernel.parquet"
    cut.write_bytes(cut.read_bytes()[:-1])
    found, notes = kernels(bucket)
    assert found == [(0, 20)]
    assert [note.partition("bucket")[2] for note in notes[:3]] == [
        "/h0/c0/101-7000000001: columns/kernel.parquet is no longer there",
        "/h1/c1/102-7000000002: columns/kernel.parquet is not the file that was uploaded: its SHA-256 differs",
        "/h1/c1/103-7000000003: columns/kernel.parquet is shorter than when it was listed",
    ]


@pytest.mark.parametrize("key", ["..", ".", "", "a/..", "/etc", "a\x1b[2J"])
def test_a_manifest_that_names_a_folder_elsewhere_is_refused_and_nothing_is_written(tmp_path: Path, key: str) -> None:
    data = b"[]"
    stored = {"size_bytes": 2, "sha256": hashlib.sha256(data).hexdigest(), "blocks": ["0"]}
    capture = tmp_path / "bucket/host/capture"
    capture.mkdir(parents=True)
    (capture.parent / "trace.json").write_bytes(data)
    document = {"version": 1, "block_bytes": upload_manifest.BLOCK_BYTES, "capture": {}, "damaged": {}}
    (capture / "manifest.json").write_text(json.dumps({**document, "files": {f"{key}/trace.json": stored}}))
    with pytest.raises(FileError, match="is not a file in the capture's folder"):
        find_traces(f"file://{tmp_path}/bucket")


def test_a_trace_whose_url_ends_in_dots_is_not_fetched_one_folder_up(tmp_path: Path) -> None:
    (tmp_path / "bucket/x").mkdir(parents=True)
    (tmp_path / "bucket/trace.json").write_text("{}")
    trace = RemoteTrace(url=f"file://{tmp_path}/bucket/x/..", files=(RemoteFile(name="trace.json", size_bytes=2),))
    (tmp_path / "here/inner").mkdir(parents=True)
    with pytest.raises(FileError, match="its last part is not a valid folder name"):
        fetch(trace, tmp_path / "here/inner")
    assert list((tmp_path / "here").iterdir()) == [tmp_path / "here/inner"]


@pytest.mark.parametrize(
    "capture", [[], "x", {"targets": 5}, {"targets": [5]}, {"targets": [{"process": []}]}, {"spec": {"labels": 3}},
                {"targets": [{"process": {"rank": "x\x1b"}}]}],
)  # fmt: skip
def test_a_manifest_whose_capture_is_none_is_a_file_error(capture: object) -> None:
    document = {
        "version": 1,
        "block_bytes": upload_manifest.BLOCK_BYTES,
        "capture": capture,
        "damaged": {},
        "files": {},
    }
    with pytest.raises(FileError, match="the manifest cannot be read"):
        upload_manifest.from_bytes(json.dumps(document).encode())


@pytest.mark.parametrize("name", ["../evil.json", "columns/../../evil.json", "/tmp/evil.json"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "bucket/x").mkdir(parents=True)
    (tmp_path / "bucket/evil.json").write_text("{}")
    trace = RemoteTrace(url=f"file://{tmp_path}/bucket/x", files=(RemoteFile(name=name, size_bytes=2),))
    with pytest.raises(FileError, match="is not a valid file name"):
        remote_traces._Fetcher(trace, tmp_path / "here").get(name)
    assert not (tmp_path / "evil.json").exists()


def test_what_was_damaged_or_is_unfinished_is_said(bucket: str, tmp_path: Path) -> None:
    upload(f"{bucket}/h2/c2", tmp_path, {4: 1}, damaged=[4])
    upload(f"{bucket}/h3/c3", tmp_path, {5: 1})
    (tmp_path / "bucket/h3/c3/manifest.json").unlink()
    (tmp_path / "bucket/h3/c3/105-7000000005/target.json").write_bytes(b"{}")
    problems = {source.remote.url: source.remote.problem for source in find_traces(bucket) if source.remote}
    assert problems[f"{bucket}/h2/c2/104-7000000004"] == (
        "104-7000000004/columns/kernel.parquet was damaged before it could be uploaded (has another SHA-256)"
    )
    assert problems[f"{bucket}/h3/c3/105-7000000005"] == "there is no manifest, so its upload has not finished"


def test_other_files_that_are_traces_count_too(tmp_path: Path) -> None:
    store(tmp_path / "job/rank3.kineto", rank=3, kernel_us=7)
    with (tmp_path / "job/rank4.json").open("wb") as file, TextSink(file) as sink:
        write_chrome(open_trace(store(tmp_path / "other", rank=4)), sink, trace_name="rank4.json")
    (tmp_path / "job/config.json").write_text('{"lr": 1}')
    (tmp_path / "job/manifest.json").write_text('{"name": "somebody else\'s"}')
    found, notes = kernels(f"file://{tmp_path}/job")
    assert (found, notes) == ([(3, 14), (4, 60)], ())


def test_files_fetched_as_a_whole_can_be_opened(bucket: str, tmp_path: Path) -> None:
    first, *_, last = find_traces(bucket)
    assert first.remote is not None and last.remote is not None
    here = tmp_path / "here"
    here.mkdir()
    assert len(open_trace(fetch(first.remote, here)).table("kernel")["start"]) == 2
    with pytest.raises(FileError, match="its capture ended as FAILED"):
        fetch(last.remote, here)


def test_a_folder_that_was_removed_is_not_made_anew(bucket: str, tmp_path: Path) -> None:
    first, *_ = find_traces(bucket)
    assert first.remote is not None
    with pytest.raises(FileNotFoundError):
        fetch(first.remote, tmp_path / "here")
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("name", ["a::b", "a::memory:", "x::http:", "y::s3"])
def test_a_name_of_an_object_is_no_chain_of_file_systems(tmp_path: Path, name: str) -> None:
    store(tmp_path / f"job/{name}.kineto", rank=3, kernel_us=7)
    assert kernels(f"file://{tmp_path}/job")[0] == [(3, 14)]
    assert kernels(f"file://{tmp_path}/job/{name}.kineto")[0] == [(3, 14)]
    with pytest.raises(FileError, match="nothing found"):
        find_traces(f"file://{tmp_path}/job::http://127.0.0.1:1/")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("simplecache::file:///x", "traces can be read from s3://, .*, not from 'simplecache::file'"),
        ("zip://a::file:///x", "traces can be read from s3://, .*, not from 'zip'"),
        ("http://169.254.169.254/x", "traces can be read from s3://, .*, not from 'http'"),
        ("ftp://h/p", "traces can be read from s3://, gs://, az://, file:// and from this machine, not from 'ftp'"),
        ("file:///nonexistent/place", "nothing found"),
    ],
)
def test_other_urls_are_refused(url: str, problem: str) -> None:
    with pytest.raises(FileError, match=problem):
        find_traces(url)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(FileError, match=r"gcsfs is not installed: run \S+ -m pip install gcsfs"):
        find_traces("gs://bucket/x")


def test_a_store_that_fails_for_a_moment_is_asked_again(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.local import LocalFileSystem

    monkeypatch.setattr(object_stores, "PAUSE_S", 0.0)
    failures = [OSError("reset by peer"), OSError("timed out")]
    read = LocalFileSystem.cat_file

    def failing(self: LocalFileSystem, path: str, *arguments: object, **named: object) -> bytes:
        if failures and path.endswith("kernel.parquet"):
            raise failures.pop()
        data: bytes = read(self, path, *arguments, **named)
        return data

    monkeypatch.setattr(LocalFileSystem, "cat_file", failing)
    assert len(kernels(bucket)[0]) == 4
    assert failures == []


def test_the_size_of_the_work_is_told_by_what_there_is_to_fetch(bucket: str) -> None:
    source = find_traces(bucket)[0]
    assert text_bytes(source) > 1000
    nothing = Source(path=Path("x.json"), rank=0, remote=RemoteTrace(url="s3://x"))
    assert text_bytes(nothing) == 0


def test_a_problem_is_no_trace() -> None:
    with pytest.raises(TraceError, match="s3://x: no"), open_remote(RemoteTrace(url="s3://x", problem="no")):
        pass
