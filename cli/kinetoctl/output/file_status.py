"""Where the files of a capture are, whether retention may remove them, and what is wrong with them, as text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kinetoctl.client import enum_names
from kinetoctl.output import units

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

_STATES = {
    "WAITING": "to upload",
    "RUNNING": "uploading",
    "RETRYING": "upload failing",
    "UPLOADED": "uploaded",
}


def where(capture: "pb.Capture") -> str:
    """In a few words: `local`, `uploaded`, `local, uploading, pinned`."""
    here = not capture.HasField("local_bytes") or capture.local_bytes > 0
    parts = ["local"] if here and any(target.files for target in capture.targets) else []
    if capture.HasField("upload"):
        state = enum_names.upload_state(capture.upload.state)
        parts.append(_STATES.get(state, state))
    if capture.pinned:
        parts.append("pinned")
    if any(file.damage for target in capture.targets for file in target.files):
        parts.append("damaged")
    return ", ".join(parts) or "-"


def kept_lines(capture: "pb.Capture") -> Iterator[str]:
    """Lines about the files of an ended capture as a whole."""
    if capture.pinned:
        yield "pinned: retention does not remove it"
    upload = capture.upload
    state = enum_names.upload_state(upload.state)
    if state == "UPLOADED":
        local = "; its files are no longer on the host" if capture.local_bytes == 0 else ""
        verified = f"{units.size(upload.bytes)}, verified {units.moment(upload.uploaded_ns)}"
        yield f"uploaded to {upload.url} ({verified}){local}"
    elif state == "RUNNING":
        yield f"uploading to {upload.url}: {units.size(upload.bytes)} of {units.size(upload.total_bytes)}"
    elif state == "RETRYING":
        again = (
            f"; next attempt at {units.moment(upload.next_try_ns)}"
            if upload.next_try_ns
            else "; uploads are disabled now"
        )
        yield f"the upload to {upload.url} failed {units.count(upload.failures)} times: {upload.error}{again}"
    elif state == "WAITING":
        yield f"waiting for its upload to {upload.url}"


def damage(file: "pb.TraceFile") -> str:
    """What is damaged in a file; empty if nothing is known to be."""
    return f"{file.format} is damaged: it {file.damage}" if file.damage else ""
