"""The trace file that a process's own libkineto wrote on demand, among a target's raw data, and its request.

Theory of operation
    The file is copied unchanged, into a folder of `raw` of its own, next to the request: the number that libkineto has
    to repeat in the file, and its output path. The daemon writes the request first, so that a restarted daemon finds
    the file of a recording that it did not begin.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from kineto_trace.base.atomic_files import write_atomically
from kineto_trace.errors import SpoolError

FOLDER = Path("raw", "kineto")  # in a target's folder
_FILE_NAME = "kineto.json"
_REQUEST_NAME = "request.json"
_MOST_NUMBER = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemandRequest:
    """One request to a process's libkineto. Times are Unix ns.

    trace_id: number that the file repeats.
    folder: libkineto's output folder, as the process sees it.
    name: of the file there.
    sent_ns: when libkineto first received the request; 0 if not yet.
    until_ns: deadline for the file.
    """

    trace_id: int
    folder: str
    name: str
    sent_ns: int = 0
    until_ns: int = 0

    def write(self, target_dir: Path) -> None:
        """Writes the request into the target's folder, which is created. Raises OSError."""
        (target_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        write_atomically(target_dir / FOLDER / _REQUEST_NAME, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, target_dir: Path) -> Self:
        """Reads the request from the target's folder. Raises SpoolError."""
        try:
            values = json.loads((target_dir / FOLDER / _REQUEST_NAME).read_bytes())
            found = cls(**values)
        except (OSError, ValueError, TypeError, RecursionError) as exc:
            raise SpoolError(f"{target_dir / FOLDER / _REQUEST_NAME}: {exc}") from exc
        numbers = (found.trace_id, found.sent_ns, found.until_ns)
        texts = (found.folder, found.name)
        if not all(type(value) is int and 0 <= value < _MOST_NUMBER for value in numbers):
            raise SpoolError(f"{target_dir / FOLDER / _REQUEST_NAME}: invalid numbers {numbers!r:.80}")
        if not all(isinstance(value, str) for value in texts) or "/" in found.name:
            raise SpoolError(f"{target_dir / FOLDER / _REQUEST_NAME}: invalid paths {texts!r:.80}")
        return found


def has_request(target_dir: Path) -> bool:
    """Returns whether the target's own libkineto records, or was to record."""
    return (target_dir / FOLDER / _REQUEST_NAME).is_file()


def kineto_file(target_dir: Path) -> Path:
    """Returns the path of the copy of libkineto's file."""
    return target_dir / FOLDER / _FILE_NAME
