"""The files that a capture can leave. Imports nothing big, so that daemon and CLI can name formats without numpy."""

from typing import NamedTuple

# Chrome trace, compressed or plain; Perfetto's own format
SUFFIXES = {"chrome": ".json.gz", "chrome-json": ".json", "perfetto": ".pftrace"}
COLUMNS_DIRECTORY = "columns"  # of a target, where its trace is stored
DEFAULT_FORMAT = "chrome"
FILE_NAMES = {name: f"trace{suffix}" for name, suffix in SUFFIXES.items()}  # in a target's folder

# Files beside the trace, made by the target: what its activity type is called -> the format's name. No execution trace
# is taken any more; those in stored captures can be fetched.
ATTACHMENTS = {"memory_snapshot": "memory-snapshot", "execution_trace": "execution-trace"}
ATTACHMENT_SUFFIXES = {"memory-snapshot": ".memory_snapshot.pickle", "execution-trace": ".execution_trace.json"}

STORED_SUFFIXES = {**SUFFIXES, **ATTACHMENT_SUFFIXES}
STORED_NAMES = {**FILE_NAMES, **{name: suffix.lstrip(".") for name, suffix in ATTACHMENT_SUFFIXES.items()}}


class OutputFile(NamedTuple):
    """A file in the target's folder. It is a tuple, so that it becomes a list in a worker's answer."""

    format: str
    name: str
    size_bytes: int
    sha256: str
