"""The names of output formats, and parsing of callers' names for files and captures."""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

# Chrome trace, compressed or plain; Perfetto's own format
SUFFIXES = {"chrome": ".json.gz", "chrome-json": ".json", "perfetto": ".pftrace"}
COLUMNS_DIRECTORY = "columns"  # folder of a target in which its trace is stored
DEFAULT_FORMAT = "chrome"
FILE_NAMES = {name: f"trace{suffix}" for name, suffix in SUFFIXES.items()}  # in a target's folder
# Files beside the trace, made by the target: activity type -> name of the format. Execution traces are no longer
# recorded; those in stored captures can be fetched.
ATTACHMENTS = {"memory_snapshot": "memory-snapshot", "execution_trace": "execution-trace"}
ATTACHMENT_SUFFIXES = {"memory-snapshot": ".memory_snapshot.pickle", "execution-trace": ".execution_trace.json"}
STORED_SUFFIXES = {**SUFFIXES, **ATTACHMENT_SUFFIXES}
STORED_NAMES = {**FILE_NAMES, **{name: suffix.lstrip(".") for name, suffix in ATTACHMENT_SUFFIXES.items()}}
_ENDINGS = {  # suffix of the requested name -> (remaining part before a format's suffix, format)
    ".pt.trace.json.gz": (".pt.trace", "chrome"),
    ".pt.trace.json": (".pt.trace", "chrome-json"),
    ".json.gz": ("", "chrome"),
    ".json": ("", "chrome-json"),
    ".pftrace": ("", "perfetto"),
}


class OutputFile(NamedTuple):
    """A file in the target's folder. It is a tuple, so that it becomes a list in a worker's answer."""

    format: str
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class LogFile:
    """Names of one trace file per process: STEM_PIDINFIX and the suffix of its format.

    infix: None if the name has no known suffix. A single trace then gets exactly this name, as with Kineto.
    """

    directory: Path
    stem: str
    infix: str | None
    format: str

    def name(self, pid: int, file_format: str, *, alone: bool) -> str:
        """Returns the name of a file of this process. alone: whether the capture has no other process."""
        if self.infix is None and file_format == self.format:
            return self.stem if alone else f"{self.stem}_{pid}"
        return (
            f"{self.stem}_{pid}{self.infix or ''}{STORED_SUFFIXES.get(file_format, f'.{PurePath(file_format).name}')}"
        )


def parse_log_file(text: str) -> LogFile:
    """Returns the parts of a path like /tmp/trace.json. Raises ValueError."""
    path = PurePath(text)
    if text.endswith("/") or path.name in ("", "..") or "\0" in text:
        raise ValueError(f"expected a file path, got {text!r:.200}")
    for ending, (infix, file_format) in _ENDINGS.items():
        if path.name.endswith(ending) and path.name != ending:
            return LogFile(Path(path.parent), path.name.removesuffix(ending), infix, file_format)
    return LogFile(Path(path.parent), path.name, None, "chrome-json")
