"""Captures on disk: an index in SQLite and a folder per capture.

Theory of operation
    <state>/index.sqlite        captures, targets (proto-JSON), labels, idempotency keys; WAL, synchronous=FULL
    <state>/captures/<id>/targets/<pid>-<start time>/    what `kineto_trace` reads and writes
    <state>/trash/ folders being removed

    The index is authoritative; a folder is created before its row. So after a crash, a folder without a row is garbage,
    and a row that has not ended is a capture that the daemon did not finish: `recovery` gives it its verdict.

    Files are removed in three steps: the folder is renamed into the trash and emptied there, which frees the disk
    before anything is written; the row is deleted or, if an uploaded copy exists, updated to say that no files are here
    any more; the empty folder in the trash is removed. So a folder in the trash records, even after a crash, that its
    row has yet to be changed.

    Every method blocks except `run`, which executes one in the store's own thread, and `remove`.
"""

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.atomic_files import is_full, room

from kinetod.base.errors import Exhausted, KinetodError, Precondition, Reason, StartError
from kinetod.base.fair_slots import FairSlots
from kinetod.permissions.role_policy import Resource
from kinetod.processes.identity import ProcessKey
from kinetod.store.path_guard import empty

log = logging.getLogger(__name__)

LAST_UID = (1 << 31) - 1  # largest uid of a host; larger numbers represent users of Kubernetes

INDEX_FILE = "index.sqlite"
LOCK_FILE = "lock"
_BUSY_TIMEOUT_MS = 5000
P = ParamSpec("P")
T = TypeVar("T")
MAX_KEPT = 1024
MAX_TEXT = 16 << 10  # characters of a cached text
VERSION = 7
_KUBERNETES_USERS = "CREATE TABLE kubernetes_users (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);"
_TABLES = (
    """
CREATE TABLE captures (
    id TEXT PRIMARY KEY, created_ns INTEGER NOT NULL, ended_ns INTEGER NOT NULL, status INTEGER NOT NULL,
    host TEXT NOT NULL, idempotency_key TEXT UNIQUE, request_hash TEXT NOT NULL, spec TEXT NOT NULL,
    pinned INTEGER NOT NULL DEFAULT 0, owner_uid INTEGER, local_bytes INTEGER, upload TEXT, start TEXT, counters TEXT,
    index_bytes INTEGER NOT NULL DEFAULT 0, answer TEXT
) WITHOUT ROWID;
CREATE INDEX captures_by_time ON captures (created_ns, id);
CREATE TABLE targets (
    capture_id TEXT NOT NULL REFERENCES captures (id) ON DELETE CASCADE, number INTEGER NOT NULL,
    pid INTEGER NOT NULL, start_time_ns INTEGER NOT NULL, verdict INTEGER NOT NULL, target TEXT NOT NULL,
    PRIMARY KEY (capture_id, number)
) WITHOUT ROWID;
CREATE TABLE labels (
    capture_id TEXT NOT NULL REFERENCES captures (id) ON DELETE CASCADE, key TEXT NOT NULL, value TEXT NOT NULL,
    PRIMARY KEY (capture_id, key)
) WITHOUT ROWID;
CREATE INDEX labels_by_key ON labels (key, value);
"""
    + _KUBERNETES_USERS
)
# By the version from which they start.
_STEPS = {
    1: """
ALTER TABLE captures ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
ALTER TABLE captures ADD COLUMN owner_uid INTEGER;
ALTER TABLE captures ADD COLUMN local_bytes INTEGER;
ALTER TABLE captures ADD COLUMN upload TEXT;
UPDATE captures SET owner_uid = (
    SELECT CASE WHEN min(uid) = max(uid) THEN min(uid) END
    FROM (SELECT coalesce(json_extract(target, '$.process.uid'), 0) AS uid FROM targets WHERE capture_id = id)
);
""",
    2: "ALTER TABLE captures ADD COLUMN start TEXT;",
    3: _KUBERNETES_USERS,
    4: "ALTER TABLE captures ADD COLUMN counters TEXT;",
    5: "ALTER TABLE captures ADD COLUMN index_bytes INTEGER NOT NULL DEFAULT 0;",
    6: "ALTER TABLE captures ADD COLUMN answer TEXT;",
}


def store_error(exc: OSError | sqlite3.Error, state_dir: Path) -> KinetodError:
    """Translates a failed write into an error for the caller."""
    full = is_full(exc) if isinstance(exc, OSError) else exc.sqlite_errorcode == sqlite3.SQLITE_FULL
    if full:
        left = ""
        with contextlib.suppress(OSError):
            left = f" ({room(state_dir)})"
        return Exhausted(Reason.LOW_DISK, f"the disk of {state_dir} is full{left}; delete captures or free space on it")
    return Precondition(
        Reason.STORE_NOT_WRITABLE,
        f"the store {state_dir} cannot be written to ({exc}); check its permissions and its mount, "
        "or give the daemon another --state-dir",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One capture in the store. Bytes are on this disk; None means not measured, or owner unknown.

    index_bytes: size of its rows, which is large for a long request or one with very many processes.
    """

    id: str
    created_ns: int
    ended_ns: int  # 0: not ended
    pinned: bool
    owner_uid: int | None
    local_bytes: int | None
    uploaded: bool
    index_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes freed by removing it; entries that are only in the object store are not removed for space."""
        return 0 if self.uploaded and not self.local_bytes else (self.local_bytes or 0) + self.index_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Disk usage of one user's ended captures. kept: bytes that retention may not remove."""

    owner_uid: int | None
    stored_bytes: int = 0
    pinned_bytes: int = 0
    kept_bytes: int = 0


class Store:
    """One state folder. The caller holds its lock."""

    def __init__(self, state_dir: Path) -> None:
        """Opens or creates the store. Raises StartError."""
        self.state_dir = state_dir
        self.captures_dir = state_dir / "captures"
        self._trash = state_dir / "trash"
        self._executor = ThreadPoolExecutor(1, "store")
        self._turns = FairSlots(1)
        self.reading = FairSlots(2, spare=1)  # turns at reading stored files
        try:
            self._db = self._open()
            self._prepare()
        except (OSError, sqlite3.Error) as exc:
            raise StartError(
                f"the store {state_dir} cannot be opened: {exc}; check its permissions or give another --state-dir"
            ) from exc

    def _open(self) -> sqlite3.Connection:
        for folder in (self.captures_dir, self._trash):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return sqlite3.connect(self.state_dir / INDEX_FILE, check_same_thread=False, isolation_level=None)

    @property
    def is_here(self) -> bool:
        """Whether index and folders still exist; SQLite would keep writing to a removed file."""
        return (self.state_dir / INDEX_FILE).exists() and self.captures_dir.is_dir() and self._trash.is_dir()

    def mend(self) -> None:
        """Recreates removed parts of the store. Waits for its thread. Raises OSError, sqlite3.Error."""
        if not self.is_here:
            self._executor.submit(self._mend).result()

    def _mend(self) -> None:
        if self.is_here:
            return
        log.error("the store %s was removed together with its captures; it has been recreated empty", self.state_dir)
        if (self.state_dir / INDEX_FILE).exists():
            self._open().close()
            return
        self._db.close()
        self._db = self._open()
        self._prepare()

    def _prepare(self) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={_BUSY_TIMEOUT_MS}"):
            self._db.execute(f"PRAGMA {pragma}")
        found = prepare(self._db)
        if not is_known(found):
            self._db.close()
            raise StartError(
                f"the store {self.state_dir} was written by another version of kinetod (schema {found}, this one "
                f"supports {VERSION}); use that version or another --state-dir"
            )
        if 0 < found < VERSION:
            log.info("the index of %s was migrated from version %d to %d", self.state_dir, found, VERSION)

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Executes a method in the store's thread; write errors become KinetodError."""
        call = functools.partial(function, *args, **kwargs)
        try:
            async with self._turns.turn():
                return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        except (OSError, sqlite3.Error) as exc:
            raise store_error(exc, self.state_dir) from exc

    def close(self) -> None:
        """Waits for operations in progress and closes the index."""
        self._executor.shutdown()
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._mend()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")  # fails on a full disk; its data must not be visible then
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back itself
                self._db.execute("ROLLBACK")
            raise

    # writing

    def insert(self, capture: pb.Capture, *, key: str, request_hash: str) -> None:
        """Creates the folders, then the rows, of a new capture."""
        for target in capture.targets:
            self.target_dir(capture.id, key_of(target)).mkdir(mode=0o700, parents=True)
        try:
            with self._transaction():
                self._insert_rows(capture, key=key, request_hash=request_hash)
        except BaseException:
            self._remove_folder(self.captures_dir / capture.id)
            raise

    def _insert_rows(self, capture: pb.Capture, *, key: str = "", request_hash: str = "") -> None:
        spec = json_format.MessageToJson(capture.spec, indent=None)
        row = (capture.id, capture.created_ns, capture.ended_ns, int(capture.status), capture.host, key or None)
        owner_uid = capture.owner_uid if capture.HasField("owner_uid") else None
        self._db.execute(_INSERT, (*row, request_hash, spec, owner_uid))
        self._db.executemany(
            "INSERT INTO labels VALUES (?, ?, ?)",
            [(capture.id, name, value) for name, value in capture.spec.labels.items()],
        )
        for number, target in enumerate(capture.targets):
            self._db.execute(
                "INSERT INTO targets VALUES (?, ?, ?, ?, ?, ?)",
                (capture.id, number, target.pid, target.start_time_ns, int(target.verdict), _json(target)),
            )

    def save_target(self, capture_id: str, number: int, target: pb.Target) -> None:
        """Replaces the record of one target."""
        with self._transaction():
            self._db.execute(
                "UPDATE targets SET verdict = ?, target = ? WHERE capture_id = ? AND number = ?",
                (int(target.verdict), _json(target), capture_id, number),
            )

    def save_end(self, capture: pb.Capture) -> None:
        """Stores the end of a capture, recreating its rows if the store was removed while it ran."""
        local_bytes = capture.local_bytes if capture.HasField("local_bytes") else None
        with self._transaction():
            if not self._db.execute("SELECT 1 FROM captures WHERE id = ?", (capture.id,)).fetchone():
                self._insert_rows(capture)
            self._db.execute(
                _END,
                (capture.ended_ns, int(capture.status), local_bytes, _counters(capture), capture.id),
            )

    def save_answer(self, capture_id: str, answer: pb.CaptureAnswer) -> None:
        """Stores where the time of a capture went."""
        with self._transaction():
            self._db.execute("UPDATE captures SET answer = ? WHERE id = ?", (_json(answer), capture_id))

    def save_start(self, request: pb.StartCaptureRequest) -> None:
        """Stores the request that started an armed capture."""
        with self._transaction():
            self._db.execute("UPDATE captures SET start = ? WHERE id = ?", (_json(request), request.id))

    def start_of(self, capture_id: str) -> pb.StartCaptureRequest | None:
        """The request that started an armed capture; None if it was not started."""
        row = self._db.execute("SELECT start FROM captures WHERE id = ?", (capture_id,)).fetchone()
        return None if row is None or row[0] is None else _start(row[0])

    def set_pinned(self, capture_id: str, pinned: bool) -> None:
        """Sets whether the capture is kept until it is unpinned."""
        with self._transaction():
            self._db.execute("UPDATE captures SET pinned = ? WHERE id = ?", (int(pinned), capture_id))

    def set_local_bytes(self, capture_id: str, size: int) -> None:
        """Sets how many bytes the capture takes on this disk."""
        with self._transaction():
            self._db.execute("UPDATE captures SET local_bytes = ? WHERE id = ?", (size, capture_id))

    def set_upload(self, capture_id: str, upload: pb.Upload | None) -> None:
        """Sets the facts about the uploaded copy."""
        text = None if upload is None else _json(upload)
        with self._transaction():
            self._db.execute("UPDATE captures SET upload = ? WHERE id = ?", (text, capture_id))

    def note_check(self, capture_id: str, key: ProcessKey, format_: str, *, damage: str, now_ns: int) -> None:
        """Records the result of checking a file: its `damage`, or "" if it is intact."""
        with self._transaction():
            row = self._db.execute(
                "SELECT number, target FROM targets WHERE capture_id = ? AND pid = ? AND start_time_ns = ?",
                (capture_id, key.pid, key.start_time_ns),
            ).fetchone()
            if row is None:
                return
            target = json_format.Parse(row[1], pb.Target(), ignore_unknown_fields=True)
            for file in target.files:
                if file.format == format_:
                    file.damage = damage
                    file.verified_ns = file.verified_ns if damage else now_ns
            self._db.execute(
                "UPDATE targets SET target = ? WHERE capture_id = ? AND number = ?", (_json(target), capture_id, row[0])
            )

    # removing

    async def remove(self, capture_id: str) -> None:
        """Removes the files of a capture, and its entry unless that locates an uploaded copy."""
        trash = await self.run(self._take_out, capture_id)
        await asyncio.to_thread(empty, trash)  # large files: not in the store's thread
        await self.run(self._settle, trash)

    def _take_out(self, capture_id: str) -> Path:
        trash = self._trash / capture_id
        empty(trash)
        with contextlib.suppress(FileNotFoundError):
            (self.captures_dir / capture_id).rename(trash)  # replaces an empty folder, if there is one
        trash.mkdir(mode=0o700, exist_ok=True)
        return trash

    def _settle(self, trash: Path) -> None:
        """Updates the row of an emptied folder in the trash, then removes the folder."""
        capture_id = trash.name
        if not (self.captures_dir / capture_id).exists():
            with self._transaction():
                row = self._db.execute("SELECT upload FROM captures WHERE id = ?", (capture_id,)).fetchone()
                if row is not None and _is_uploaded(row[0]):
                    self._db.execute("UPDATE captures SET local_bytes = 0 WHERE id = ?", (capture_id,))
                else:
                    self._db.execute("DELETE FROM captures WHERE id = ?", (capture_id,))
        shutil.rmtree(trash, ignore_errors=True)

    def _remove_folder(self, folder: Path) -> None:
        """Removes the folder of a capture that has no row."""
        trash = self._trash / folder.name
        empty(trash)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

    # reading

    def get(self, capture_id: str) -> pb.Capture | None:
        """One capture; None if it does not exist."""
        row = self._db.execute(_SELECT + " WHERE id = ?", (capture_id,)).fetchone()
        return None if row is None else self._capture(row)

    def by_key(self, key: str) -> tuple[str, str] | None:
        """Id and request hash of the capture created with this idempotency key."""
        row: tuple[str, str] | None = self._db.execute(
            "SELECT id, request_hash FROM captures WHERE idempotency_key = ?", (key,)
        ).fetchone()
        return row

    def owner(self, capture_id: str) -> Resource | None:
        """The facts about a capture for access decisions; None if it does not exist."""
        row = self._db.execute("SELECT owner_uid FROM captures WHERE id = ?", (capture_id,)).fetchone()
        return None if row is None else Resource(uid=row[0])

    def number_of(self, user: str) -> int:
        """The permanent number that represents a Kubernetes user instead of a uid; beyond the uids of Linux."""
        query = "SELECT number FROM kubernetes_users WHERE name = ?"
        if (row := self._db.execute(query, (user,)).fetchone()) is None:
            with self._transaction():
                insert = "INSERT INTO kubernetes_users SELECT coalesce(max(number), ?) + 1, ? FROM kubernetes_users"
                self._db.execute(insert, (LAST_UID, user))
            row = self._db.execute(query, (user,)).fetchone()
        return int(row[0])

    def uses(self, until_uploaded: bool) -> list[Use]:
        """The disk usage of each user. until_uploaded: captures not yet uploaded count as kept."""
        return [
            Use(owner_uid=row[0], stored_bytes=row[1], pinned_bytes=row[2], kept_bytes=row[3])
            for row in self._db.execute(_USES, (until_uploaded,)).fetchall()
        ]

    def page(
        self,
        labels: Mapping[str, str],
        *,
        size: int,
        before: tuple[int, str] | None,
        only_uid: int | None = None,
    ) -> list[pb.Capture]:
        """One page, newest first. before: (created_ns, id) of the last one shown; only_uid: one owner."""
        conditions, values = ["1"], list[str | int]()
        if only_uid is not None:
            conditions.append("owner_uid = ?")
            values.append(only_uid)
        if before is not None:
            conditions.append("(created_ns, id) < (?, ?)")
            values += before
        for name, value in labels.items():
            conditions.append("id IN (SELECT capture_id FROM labels WHERE key = ? AND value = ?)")
            values += (name, value)
        # Only constants of this module are part of the statement; values are bound.
        query = " ".join((_SELECT, "WHERE", " AND ".join(conditions), "ORDER BY created_ns DESC, id DESC LIMIT ?"))
        return [self._capture(row) for row in self._db.execute(query, (*values, size)).fetchall()]

    def unfinished(self) -> list[pb.Capture]:
        """Captures that the previous daemon did not end."""
        rows = self._db.execute(_SELECT + " WHERE ended_ns = 0 ORDER BY created_ns").fetchall()
        return [self._capture(row) for row in rows]

    def holdings(self) -> list[Holding]:
        """Every capture with the facts that retention uses, oldest first."""
        rows = self._db.execute(
            "SELECT id, created_ns, ended_ns, pinned, owner_uid, local_bytes, upload, index_bytes FROM captures "
            "ORDER BY created_ns, id"
        ).fetchall()
        return [
            Holding(
                id=row[0],
                created_ns=row[1],
                ended_ns=row[2],
                pinned=bool(row[3]),
                owner_uid=row[4],
                local_bytes=row[5],
                uploaded=_is_uploaded(row[6]),
                index_bytes=row[7],
            )
            for row in rows
        ]

    def _capture(self, row: tuple[Any, ...]) -> pb.Capture:
        status = pb.CaptureStatus.Name(row[3])
        capture = pb.Capture(id=row[0], created_ns=row[1], ended_ns=row[2], status=status, host=row[4])
        read_into(capture.spec, row[5])
        capture.pinned = bool(row[6])
        if row[7] is not None:
            capture.owner_uid = row[7]
        if row[8] is not None:
            capture.local_bytes = row[8]
        if row[9] is not None:
            read_into(capture.upload, row[9])
        if row[10] is not None and (start := _start(row[10])).HasField("clock"):
            capture.clock.CopyFrom(start.clock)
        if row[11] is not None:
            sampled = pb.Capture()
            read_into(sampled, row[11])
            capture.counters.extend(sampled.counters)
        if row[12] is not None:
            read_into(capture.answer, row[12])
        targets = self._db.execute("SELECT target FROM targets WHERE capture_id = ? ORDER BY number", (row[0],))
        for (text,) in targets.fetchall():
            read_into(capture.targets.add(), text)
        return capture

    # files

    def capture_dir(self, capture_id: str) -> Path:
        """The folder of one capture."""
        return self.captures_dir / capture_id

    def target_dir(self, capture_id: str, key: ProcessKey) -> Path:
        """The folder of one target."""
        return self.captures_dir / capture_id / "targets" / str(key)

    def free_bytes(self) -> int:
        """Bytes that an unprivileged process can still write to the disk."""
        status = os.statvfs(self.state_dir)
        return status.f_bavail * status.f_frsize

    def disk_bytes(self) -> int:
        """Bytes that an unprivileged process could write to the disk if it were empty."""
        status = os.statvfs(self.state_dir)
        return (status.f_blocks - status.f_bfree + status.f_bavail) * status.f_frsize

    def check_writable(self) -> None:
        """Writes a small file as a test. Raises OSError."""
        with tempfile.TemporaryFile(dir=self.state_dir) as probe:  # concurrent calls each need their own file
            probe.write(b"x")

    def clean_up(self) -> None:
        """Cleans up after a crash: finishes removals and removes folders without a row and half-written files."""
        for trash in self._trash.iterdir():
            empty(trash)
            self._settle(trash)
        known = {row[0] for row in self._db.execute("SELECT id FROM captures").fetchall()}
        for folder in self.captures_dir.iterdir():
            if folder.name not in known:
                log.warning("removing %s, a capture that was never recorded in the index", folder)
                self._remove_folder(folder)
        for capture in self.unfinished():
            for leftover in (self.captures_dir / capture.id).rglob("*.tmp"):
                leftover.unlink(missing_ok=True)


_SELECT = (
    "SELECT id, created_ns, ended_ns, status, host, spec, pinned, owner_uid, local_bytes, upload, start, "
    "counters, answer FROM captures"
)
_USES = (  # bytes as in Holding
    "SELECT owner_uid, sum(bytes), sum(bytes * (pinned != 0)), sum(bytes * (pinned != 0 OR "
    "(? AND NOT uploaded AND local_bytes > 0))) FROM "
    "(SELECT *, local_bytes + index_bytes * (local_bytes > 0 OR NOT uploaded) AS bytes FROM "
    "(SELECT *, coalesce(json_extract(upload, '$.state'), '') = 'UPLOAD_STATE_UPLOADED' AS uploaded FROM captures)) "
    "WHERE local_bytes IS NOT NULL GROUP BY owner_uid"
)
_END = (
    "UPDATE captures SET ended_ns = ?, status = ?, local_bytes = ?, counters = ?, "
    "index_bytes = length(CAST(spec AS BLOB)) + "
    "(SELECT coalesce(sum(length(CAST(target AS BLOB))), 0) FROM targets WHERE capture_id = id) WHERE id = ?"
)
_INSERT = (
    "INSERT INTO captures (id, created_ns, ended_ns, status, host, idempotency_key, request_hash, spec, owner_uid) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def _json(message: pb.Target | pb.Upload | pb.StartCaptureRequest | pb.CaptureAnswer) -> str:
    return json_format.MessageToJson(message, indent=None)


def _counters(capture: pb.Capture) -> str | None:
    """A Capture with only these fields; None: it has none."""
    return json_format.MessageToJson(pb.Capture(counters=capture.counters), indent=None) if capture.counters else None


def _start(text: str) -> pb.StartCaptureRequest:
    return json_format.Parse(text, pb.StartCaptureRequest(), ignore_unknown_fields=True)


def _is_uploaded(text: str | None) -> bool:
    if text is None:
        return False
    upload = json_format.Parse(text, pb.Upload(), ignore_unknown_fields=True)
    return upload.state == pb.UPLOAD_STATE_UPLOADED


def key_of(target: pb.Target) -> ProcessKey:
    """The process of a target."""
    return ProcessKey(target.pid, target.start_time_ns)


# Caches messages that the index stores as JSON. A list of captures has hundreds, which are the same at the next
# request: parsing them takes about 50 times as long as copying them. So the latest ones are kept, unless they are long.
def read_into(message: Message, text: str) -> None:
    """Parses the text into an empty message; unknown fields are left out. Raises json_format.ParseError."""
    name = message.DESCRIPTOR.name
    message.CopyFrom(_kept(name, text) if len(text) <= MAX_TEXT else _read(name, text))


def _read(name: str, text: str) -> Message:
    found: Message = json_format.Parse(text, getattr(pb, name)(), ignore_unknown_fields=True)
    return found


@lru_cache(MAX_KEPT)
def _kept(name: str, text: str) -> Message:
    """The cached message, which callers must not change."""
    return _read(name, text)


def prepare(db: sqlite3.Connection) -> int:
    """Creates or migrates the tables in one transaction. Returns the version found (0 for an empty file).

    Leaves an unknown version unchanged. Raises sqlite3.Error.
    """
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found == 0:
        db.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version={VERSION}; COMMIT;")
    elif found in _STEPS:
        steps = "".join(_STEPS[version] for version in range(found, VERSION))
        db.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version={VERSION}; COMMIT;")
    return int(found)


def is_known(version: int) -> bool:
    """Whether this kinetod can use an index of this version."""
    return version in (0, VERSION, *_STEPS)
