"""What a check found, for `kinetoctl doctor`: about a process, about the host, or about an obstacle to an attach."""

from dataclasses import dataclass
from enum import StrEnum

from kinetod.attach.attach_types import AttachCode


class Status(StrEnum):
    """The names of pb.CheckStatus."""

    OK = "OK"
    NOTE = "NOTE"
    PROBLEM = "PROBLEM"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. code: for a PROBLEM, the code that an attach would fail with."""

    name: str
    status: Status
    detail: str
    advice: str = ""
    code: AttachCode = AttachCode.FAILED
