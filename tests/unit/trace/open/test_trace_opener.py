import gzip
import io
import json
import os
import pickle
import sqlite3
import tarfile
from pathlib import Path

import kineto_trace as kt
import pytest
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.errors import FileError, SpoolError
from kineto_trace.open.trace_opener import Form, detect, open_trace
from kineto_trace.store.parquet_folder import load_columns, save_columns
from support.trace_files.h200 import make_spool
from support.trace_files.traces import target, trace
from support.xla.messages import PlaneMaker, begun_at, recorded, space

CHROME = b'{"schemaVersion": 1, "traceEvents": []}'


def packet(content: bytes) -> bytes:
    return b"\x0a" + bytes([len(content)]) + content


@pytest.mark.parametrize(
    ("data", "form"),
    [
        (CHROME, Form.CHROME),
        (b'[{"ph": "X"}]', Form.CHROME),
        (b"\n\n  " + CHROME, Form.CHROME),
        (b"\xef\xbb\xbf" + CHROME, Form.CHROME),
        (gzip.compress(CHROME, mtime=0), Form.CHROME),
        (packet(b"\x40\x05\x50\x01") * 2, Form.PERFETTO),
        (packet(b"\x40\x05"), Form.PERFETTO),
        (gzip.compress(packet(b"\x40\x05\x50\x01") * 2, mtime=0), Form.PERFETTO),
    ],
)
def test_a_file_is_what_is_in_it(tmp_path: Path, data: bytes, form: Form) -> None:
    file = tmp_path / "no-suffix"
    file.write_bytes(data)
    assert detect(file) is form


def sqlite_file(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("create table t (x)")
    connection.close()


def tar_file(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo("trace.json")
        entry.size = len(CHROME)
        archive.addfile(entry, io.BytesIO(CHROME))


def packed_tar(path: Path) -> None:
    tar_file(path)
    path.write_bytes(gzip.compress(path.read_bytes()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b""), "is empty: the profiler that wrote it has not finished"),
        (lambda path: path.write_bytes(gzip.compress(b"")), "contains nothing but a gzip header"),
        (lambda path: path.write_bytes(b"\x1f\x8bnot really"), "is damaged"),
        (sqlite_file, "is an SQLite database, not a trace"),
        (tar_file, "is a tar archive, not a trace: unpack it"),
        (packed_tar, "is a tar archive, not a trace: unpack it"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(90)), "is a zip archive"),
        (lambda path: path.write_bytes(pickle.dumps({"segments": []})), "is a pickle"),
        (lambda path: path.write_bytes(b"<html></html>"), "is HTML"),
        (lambda path: path.write_bytes(b"\nhello there, this is no trace"), "is not a trace: it begins with"),
        (lambda path: path.write_bytes(b"\n"), "is not a trace: it begins with"),
        (lambda path: path.write_bytes(b"step,loss\n"), "is not a trace: it begins with b'step,loss"),
        (lambda path: path.mkdir(), "is a folder without traces"),
        (os.mkfifo, "is neither a file nor a folder"),
        (lambda path: None, "cannot read .*: No such file or directory"),
    ],
)
def test_anything_else_is_an_error_that_says_what_it_is(tmp_path: Path, make: object, message: str) -> None:
    place = tmp_path / "thing.json"
    assert callable(make)
    make(place)
    with pytest.raises(FileError, match=message):
        open_trace(place)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(CHROME)
    file.chmod(0)
    with pytest.raises(FileError, match="Permission denied"):
        open_trace(file)


def test_a_folder_of_several_traces_names_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_bytes(CHROME)
    with pytest.raises(FileError, match=r"is a folder of 2 traces: name one of them \(.*a.json, .*b.json\)"):
        open_trace(tmp_path)


def test_a_stored_trace_opens(tmp_path: Path) -> None:
    save_columns(trace({"kernel": [{"name": "k"}]}), tmp_path)
    assert open_trace(str(tmp_path)).strings == ("k",)


def test_a_target_opens_raw_and_finished_with_the_same_rows(tmp_path: Path) -> None:
    folder = make_spool(tmp_path, "graph-cupti26")
    raw = open_trace(folder)
    convert_target(folder, formats=[])
    (folder / "raw").rename(tmp_path / "gone")
    finished = open_trace(folder)
    assert load_columns(folder / "columns").strings == finished.strings
    for kind, table in raw.tables.items():
        for name, column in table.columns.items():
            assert (finished.tables[kind][name] == column).all()


def test_what_a_raw_target_lost_is_in_the_notes(tmp_path: Path) -> None:
    folder = make_spool(tmp_path, "mlp-cupti130001")
    buffers = folder / "raw" / "cupti" / "buffers.bin"
    buffers.write_bytes(buffers.read_bytes()[:-100])
    assert open_trace(folder).notes == ("cupti: the end of the data is missing because the daemon ended",)


def test_a_target_without_records_says_so(tmp_path: Path) -> None:
    target().write(tmp_path)
    with pytest.raises(FileError, match="without recorded data"):
        open_trace(tmp_path)


def test_a_damaged_target_is_a_spool_error(tmp_path: Path) -> None:
    (tmp_path / "target.json").write_text(json.dumps([]))
    (tmp_path / "raw").mkdir()
    with pytest.raises(SpoolError):
        open_trace(tmp_path)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(recorded("jax-plain-xspace"))
    return path


def test_a_profile_of_an_h200_is_analysed(profile: Path) -> None:
    trace = kt.open_trace(profile)
    assert (trace.target.host, trace.target.pid, trace.notes) == ("vm", 838, ())
    rows = kt.run_view("hlo_ops", trace).rows()
    found = tuple(rows[0][key] for key in ("hlo_op", "hlo_module", "where"))
    assert found == ("cudnn-conv-bw-filter.1", "jit__lambda", "GPU")
    assert len(kt.run_view("profiler_steps", trace).rows()) == 10
    assert kt.run_view("kernels", trace).rows()[0]["calls"] == 86


def test_it_is_written_in_other_forms(profile: Path, tmp_path: Path) -> None:
    trace = kt.open_trace(profile)
    written = kt.export_trace(trace, tmp_path / "trace.json")
    again = kt.open_trace(written.path)
    assert len(again.table("kernel")) == len(trace.table("kernel")) == 871
    assert kt.run_view("hlo_ops", again).rows() == kt.run_view("hlo_ops", trace).rows()


def test_a_compressed_one_is_opened_too(profile: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(profile.read_bytes()))
    assert detect(packed) is Form.XPLANE
    assert len(kt.open_trace(packed).table("kernel")) == 871


def test_of_a_truncated_one_the_beginning_is_there_and_a_note_says_so(profile: Path) -> None:
    profile.write_bytes(profile.read_bytes()[:-2000])
    trace = kt.open_trace(profile)
    assert trace.remarks == (
        "1 XLA profile is truncated or damaged",
        "1 XLA profile has no known start time, so times are relative to the start",
    )
    assert not trace.target.complete


def test_a_profile_without_events_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.xplane.pb"
    path.write_bytes(space(PlaneMaker("/host:CPU"), begun_at(1_795_163_478_000_000_000)))
    with pytest.raises(FileError, match="without known events: record again, for longer"):
        kt.open_trace(path)


def test_damaged_gzip_is_said(tmp_path: Path) -> None:
    path = tmp_path / "cut.xplane.pb.gz"
    path.write_bytes(gzip.compress(recorded("jax-plain-xspace"))[:-100])
    with pytest.raises(FileError, match="is damaged"):
        kt.open_trace(path)
