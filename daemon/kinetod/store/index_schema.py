"""The tables of the store's index, and the migrations from older versions."""

import sqlite3

VERSION = 5
_KUBERNETES_USERS = "CREATE TABLE kubernetes_users (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);"
_TABLES = (
    """
CREATE TABLE captures (
    id TEXT PRIMARY KEY, created_ns INTEGER NOT NULL, ended_ns INTEGER NOT NULL, status INTEGER NOT NULL,
    host TEXT NOT NULL, idempotency_key TEXT UNIQUE, request_hash TEXT NOT NULL, spec TEXT NOT NULL,
    pinned INTEGER NOT NULL DEFAULT 0, owner_uid INTEGER, local_bytes INTEGER, upload TEXT, start TEXT, counters TEXT
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
# By the version that they start from.
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
}


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
