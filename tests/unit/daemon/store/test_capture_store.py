import asyncio
import contextlib
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.errors import Exhausted, Precondition, StartError
from kinetod.permissions.role_policy import Resource
from kinetod.store import capture_store
from kinetod.store.capture_store import MAX_TEXT, Store, key_of, read_into, store_error
from kinetod.store.path_guard import file_digest, folder_bytes

FIRST_SCHEMA = """
CREATE TABLE captures (id TEXT PRIMARY KEY, created_ns INTEGER NOT NULL, ended_ns INTEGER NOT NULL,
    status INTEGER NOT NULL, host TEXT NOT NULL, idempotency_key TEXT UNIQUE, request_hash TEXT NOT NULL,
    spec TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE targets (capture_id TEXT NOT NULL REFERENCES captures (id) ON DELETE CASCADE, number INTEGER NOT NULL,
    pid INTEGER NOT NULL, start_time_ns INTEGER NOT NULL, verdict INTEGER NOT NULL, target TEXT NOT NULL,
    PRIMARY KEY (capture_id, number)) WITHOUT ROWID;
CREATE TABLE labels (capture_id TEXT NOT NULL REFERENCES captures (id) ON DELETE CASCADE, key TEXT NOT NULL,
    value TEXT NOT NULL, PRIMARY KEY (capture_id, key)) WITHOUT ROWID;
INSERT INTO captures VALUES ('c1', 1, 2, 2, 'h', NULL, 'x', '{}');
INSERT INTO targets VALUES ('c1', 0, 5, 6, 1, '{"pid": 5, "process": {"uid": 7}}');
PRAGMA user_version=1;
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "state")
    yield opened
    opened.close()


def capture(number: int, **labels: str) -> pb.Capture:
    made = pb.Capture(id=f"c{number}", created_ns=number, status=pb.CAPTURE_STATUS_RUNNING, host="h")
    made.spec.duration_ns = 5
    made.spec.labels.update(labels)
    made.targets.add(pid=7, start_time_ns=70, state=pb.TARGET_STATE_PENDING)
    made.targets.add(pid=8, start_time_ns=80, state=pb.TARGET_STATE_PENDING)
    return made


def test_the_answer_about_a_capture_comes_back(store: Store) -> None:
    store.insert(capture(1), key="k", request_hash="h")
    answer = pb.CaptureAnswer(verdict="A step takes 2 ms.", cause="waits for the loader")
    store.save_answer("c1", answer)
    store.save_answer("of another one", answer)
    found = store.get("c1")
    assert found is not None and found.answer == answer


def test_a_capture_comes_back_as_it_was(store: Store) -> None:
    made = capture(1, run="1")
    store.insert(made, key="k", request_hash="h")
    assert store.get("c1") == made
    assert store.by_key("k") == ("c1", "h")
    folders = (store.captures_dir, store.state_dir / "trash", store.target_dir("c1", key_of(made.targets[0])))
    assert {stat.S_IMODE(each.stat().st_mode) for each in folders} == {0o700}
    assert store.get("other") is None
    assert store.by_key("other") is None


def test_ends_are_kept(store: Store) -> None:
    made = capture(1)
    store.insert(made, key="", request_hash="h")
    assert [each.id for each in store.unfinished()] == ["c1"]
    made.targets[1].verdict = pb.VERDICT_DONE
    made.targets[1].summary.activities["kernel"] = 3
    store.save_target("c1", 1, made.targets[1])
    made.ended_ns, made.status = 9, pb.CAPTURE_STATUS_PARTIAL
    store.save_end(made)
    assert store.get("c1") == made
    assert store.unfinished() == []


def test_what_became_of_the_counters_is_kept_with_the_end(store: Store) -> None:
    made = capture(1)
    store.insert(made, key="", request_hash="h")
    made.counters.add(gpu=pb.Gpu(index=1, uuid="GPU-1"), samples=5, reason_code="COUNTERS_BUSY", reason="by ncu")
    made.ended_ns, made.status = 9, pb.CAPTURE_STATUS_PARTIAL
    store.save_end(made)
    assert store.get("c1") == made


def test_the_start_of_an_armed_capture_is_kept(store: Store) -> None:
    made = capture(1)
    store.insert(made, key="", request_hash="h")
    assert store.start_of("c1") is None
    request = pb.StartCaptureRequest(id="c1", start_time_ns=5, clock=pb.ClockOffset(offset_ns=-7, uncertainty_ns=3))
    request.iterations.add(pid=7, start=12, warmup=1)
    store.save_start(request)
    assert store.start_of("c1") == request
    made.clock.CopyFrom(request.clock)
    assert store.get("c1") == made


def test_what_was_written_is_there_after_a_restart(store: Store, tmp_path: Path) -> None:
    store.insert(capture(1), key="", request_hash="h")
    again = Store(tmp_path / "state")  # as after kill -9: the first one was never closed
    assert again.get("c1") == capture(1)
    again.close()


def test_pages_are_newest_first_and_filtered(store: Store) -> None:
    for number in range(1, 6):
        store.insert(capture(number, parity=str(number % 2)), key="", request_hash="h")
    assert [each.id for each in store.page({}, size=2, before=None)] == ["c5", "c4"]
    assert [each.id for each in store.page({}, size=9, before=(4, "c4"))] == ["c3", "c2", "c1"]
    assert [each.id for each in store.page({"parity": "1"}, size=9, before=None)] == ["c5", "c3", "c1"]
    assert store.page({"parity": "1", "other": ""}, size=9, before=None) == []


def test_a_deleted_capture_leaves_nothing(store: Store) -> None:
    store.insert(capture(1, run="1"), key="k", request_hash="h")
    asyncio.run(store.remove("c1"))
    assert store.get("c1") is None
    assert store.by_key("k") is None
    assert list(store.captures_dir.iterdir()) == []
    store.insert(capture(1, run="1"), key="k", request_hash="h")


def test_an_uploaded_capture_whose_files_go_keeps_its_entry(store: Store) -> None:
    store.insert(capture(1), key="", request_hash="h")
    store.set_upload("c1", pb.Upload(state=pb.UPLOAD_STATE_UPLOADED, url="s3://b/c1"))
    asyncio.run(store.remove("c1"))
    left = store.get("c1")
    assert left is not None
    assert (left.local_bytes, left.upload.url) == (0, "s3://b/c1")
    assert not store.capture_dir("c1").exists()


def test_a_removal_that_a_crash_interrupted_is_ended_at_the_next_start(store: Store) -> None:
    for number, upload in ((1, None), (2, pb.Upload(state=pb.UPLOAD_STATE_UPLOADED))):
        store.insert(capture(number), key="", request_hash="h")
        store.set_upload(f"c{number}", upload)
        store.capture_dir(f"c{number}").rename(store.state_dir / "trash" / f"c{number}")
    store.clean_up()
    assert [(each.id, each.local_bytes) for each in store.holdings()] == [("c2", 0)]
    assert list((store.state_dir / "trash").iterdir()) == []


def test_what_is_found_at_a_file_is_noted_in_its_record(store: Store) -> None:
    made = capture(1)
    made.targets[1].files.add(format="chrome", sha256="1")
    made.targets[1].files.add(format="perfetto", sha256="2")
    store.insert(made, key="", request_hash="h")
    key = key_of(made.targets[1])
    store.note_check("c1", key, "perfetto", damage="", now_ns=5)
    store.note_check("c1", key, "chrome", damage="is gone", now_ns=6)
    found = store.get("c1")
    assert found is not None
    assert [(file.damage, file.verified_ns) for file in found.targets[1].files] == [("is gone", 0), ("", 5)]


def test_an_index_of_the_first_version_is_brought_forward(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with sqlite3.connect(state / "index.sqlite") as old:
        old.executescript(FIRST_SCHEMA)
    old.close()
    store = Store(state)
    store.insert(capture(2), key="", request_hash="h")
    first, second = store.holdings()
    store.close()
    assert (first.id, first.owner_uid, first.pinned, first.local_bytes, first.uploaded) == ("c1", 7, False, None, False)
    assert second.id == "c2"


def test_a_user_of_kubernetes_has_one_number_for_good_beyond_the_hosts_uids(tmp_path: Path) -> None:
    names = ("ada", "system:serviceaccount:ml:bob", "ada")
    for _ in range(2):
        store = Store(tmp_path / "state")
        assert [store.number_of(name) for name in names] == [1 << 31, (1 << 31) + 1, 1 << 31]
        store.close()


def test_a_failed_insert_leaves_no_folder(store: Store) -> None:
    store.insert(capture(1), key="k", request_hash="h")
    with pytest.raises(sqlite3.IntegrityError):
        store.insert(capture(2), key="k", request_hash="h")
    assert [folder.name for folder in store.captures_dir.iterdir()] == ["c1"]


def test_cleaning_up_removes_what_no_row_knows_and_what_is_half_written(store: Store) -> None:
    made = capture(1)
    store.insert(made, key="", request_hash="h")
    folder = store.target_dir("c1", key_of(made.targets[0]))
    (folder / ".trace.json.gz.tmp").write_bytes(b"half")
    (folder / "target.json").write_bytes(b"{}")
    (store.captures_dir / "orphan").mkdir()
    (store.state_dir / "trash" / "old").mkdir()
    (store.state_dir / "trash" / "old" / "file").write_bytes(b"")
    store.clean_up()
    assert [path.name for path in folder.iterdir()] == ["target.json"]
    assert [path.name for path in store.captures_dir.iterdir()] == ["c1"]
    assert list((store.state_dir / "trash").iterdir()) == []


def test_a_state_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StartError, match="cannot be opened"):
        Store(tmp_path / "file")


def test_errors_of_writing_are_told_apart() -> None:
    assert isinstance(store_error(OSError(28, "No space left on device"), Path("/s")), Exhausted)
    assert isinstance(store_error(OSError(30, "Read-only file system"), Path("/s")), Precondition)
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    assert isinstance(store_error(full, Path("/s")), Exhausted)


def test_files_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert file_digest(path) == (3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    assert folder_bytes(tmp_path) >= 3


def test_captures_have_owners(store: Store) -> None:
    for number, owner_uid in ((1, 1000), (2, 2000), (3, 1000)):
        made = capture(number)
        made.owner_uid = owner_uid
        store.insert(made, key="", request_hash="h")
        made.local_bytes = 10 * number
        store.save_end(made)
    assert store.owner("c2") == Resource(uid=2000)
    assert store.owner("c9") is None
    assert [each.id for each in store.page({}, size=9, before=None, only_uid=1000)] == ["c3", "c1"]
    assert [each.id for each in store.page({}, size=9, before=(3, "c3"), only_uid=1000)] == ["c1"]
    assert store.page({}, size=9, before=None, only_uid=-1) == []
    rows = {each.id: each.index_bytes for each in store.holdings()}
    stored = {use.owner_uid: use.stored_bytes for use in store.uses(False)}
    assert stored == {1000: 40 + rows["c1"] + rows["c3"], 2000: 20 + rows["c2"]}


def test_a_long_request_counts_for_its_user_until_only_the_uploaded_copy_is_left(store: Store) -> None:
    made = capture(1)
    made.owner_uid, made.local_bytes = 1000, 0
    made.spec.formats.extend(["chrome"] * 10_000)
    store.insert(made, key="", request_hash="h")
    store.save_end(made)
    ((use,), (holding,)) = store.uses(True), store.holdings()
    assert use.stored_bytes == holding.bytes > 100_000
    assert use.kept_bytes == 0  # there is no file that waits for its upload
    store.set_upload("c1", pb.Upload(state=pb.UPLOAD_STATE_UPLOADED))
    ((use,), (holding,)) = store.uses(True), store.holdings()
    assert use.stored_bytes == holding.bytes == 0


def test_old_captures_of_several_users_are_nobodys(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with contextlib.closing(sqlite3.connect(state / "index.sqlite")) as index:
        index.executescript(FIRST_SCHEMA)
        index.executescript(
            """INSERT INTO captures VALUES ('c2', 1, 2, 2, 'h', NULL, 'x', '{}');
            INSERT INTO targets VALUES ('c2', 0, 5, 6, 1, '{"pid": 5, "process": {"uid": 7}}');
            INSERT INTO targets VALUES ('c2', 1, 6, 6, 1, '{"pid": 6, "process": {}}');"""
        )
    opened = Store(state)
    assert (opened.owner("c1"), opened.owner("c2")) == (Resource(uid=7), Resource(uid=None))
    opened.close()


def test_a_store_that_was_removed_is_made_again(store: Store) -> None:
    store.insert(capture(1), key="k", request_hash="h")
    shutil.rmtree(store.state_dir)
    assert not store.is_here
    with pytest.raises(OSError, match="No such file"):
        store.check_writable()
    store.mend()
    assert store.is_here
    store.check_writable()
    assert store.get("c1") is None
    store.insert(capture(2), key="k", request_hash="h")
    assert [each.id for each in store.unfinished()] == ["c2"]


def test_folders_of_a_store_are_made_again_without_touching_the_index(store: Store) -> None:
    store.insert(capture(1), key="", request_hash="h")
    shutil.rmtree(store.captures_dir)
    store.mend()
    assert store.is_here
    assert [each.id for each in store.unfinished()] == ["c1"]


def test_the_end_of_a_capture_is_kept_though_the_store_was_removed_while_it_ran(store: Store) -> None:
    made = capture(1, run="1")
    store.insert(made, key="k", request_hash="h")
    shutil.rmtree(store.state_dir)
    for number, target in enumerate(made.targets):
        target.verdict = pb.VERDICT_FAILED
        store.save_target("c1", number, target)
    made.ended_ns, made.status, made.local_bytes = 5, pb.CAPTURE_STATUS_FAILED, 0
    store.save_end(made)
    assert store.get("c1") == made


def text(reason: str) -> str:
    return json_format.MessageToJson(pb.Target(reason=reason))


def test_a_message_is_read_once_and_each_copy_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    real = json_format.Parse

    def counted(*args: Any, **more: Any) -> Any:
        read.append(args[0])
        return real(*args, **more)

    monkeypatch.setattr(json_format, "Parse", counted)
    first, second = pb.Target(), pb.Target()
    for each in (first, second):
        read_into(each, text("kept once"))
    first.reason = "changed"
    assert (second.reason, len(read)) == ("kept once", 1)


def test_long_texts_are_not_kept() -> None:
    before = capture_store._kept.cache_info().currsize
    target = pb.Target()
    read_into(target, text("x" * MAX_TEXT))
    assert (len(target.reason), capture_store._kept.cache_info().currsize) == (MAX_TEXT, before)


def test_fields_of_other_versions_are_left_out() -> None:
    target = pb.Target()
    read_into(target, '{"reason": "known", "ofTomorrow": 3}')
    assert target == pb.Target(reason="known")
