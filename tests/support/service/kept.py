"""Captures that have ended, put into a store as a daemon leaves them."""

import hashlib
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.store.capture_store import Store, key_of
from kinetod.store.path_guard import folder_bytes

HOST = "gpu-7"
FILE, SNAPSHOT = "trace.json.gz", "memory_snapshot.pickle"


def ended_capture(number: int, content: bytes, *, uid: int = 1000, name: str = "") -> pb.Capture:
    """A capture of one process with one file, created and ended at `number` ns. name: its id."""
    capture = pb.Capture(
        id=name or f"c{number}",
        created_ns=number,
        ended_ns=number,
        status=pb.CAPTURE_STATUS_DONE,
        host=HOST,
        owner_uid=uid,
    )
    capture.spec.duration_ns = 5
    target = capture.targets.add(pid=7, start_time_ns=70, state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_DONE)
    target.process.CopyFrom(pb.Process(pid=7, start_time_ns=70, uid=uid))
    target.files.add(format="chrome", name=FILE, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    return capture


def put_capture(
    store: Store, number: int, content: bytes = b"trace", *, uid: int = 1000, name: str = "", snapshot: bytes = b""
) -> pb.Capture:
    """Puts an ended capture into an open store, with its size measured. snapshot: of its memory, as a second file."""
    capture = ended_capture(number, content, uid=uid, name=name)
    if snapshot:
        digest = hashlib.sha256(snapshot).hexdigest()
        capture.targets[0].files.add(format="memory-snapshot", name=SNAPSHOT, size_bytes=len(snapshot), sha256=digest)
    store.insert(capture, key="", request_hash="h")
    file_path(store, capture).write_bytes(content)
    if snapshot:
        file_path(store, capture).with_name(SNAPSHOT).write_bytes(snapshot)
    store.set_local_bytes(capture.id, folder_bytes(store.capture_dir(capture.id)))
    return capture


def file_path(store: Store, capture: pb.Capture) -> Path:
    """Path of the capture's trace."""
    return store.target_dir(capture.id, key_of(capture.targets[0])) / FILE
