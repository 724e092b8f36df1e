"""File names that ACTIVITIES_LOG_FILE requests, by Kineto's rule. Imports nothing big. Pure."""

from dataclasses import dataclass
from pathlib import Path, PurePath

from kineto_trace.store.output_formats import STORED_SUFFIXES

_ENDINGS = {  # suffix of the requested name -> (what stays before the suffix of a format, format)
    ".pt.trace.json.gz": (".pt.trace", "chrome"),
    ".pt.trace.json": (".pt.trace", "chrome-json"),
    ".json.gz": ("", "chrome"),
    ".json": ("", "chrome-json"),
    ".pftrace": ("", "perfetto"),
}


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
        """The name of a file of this process. alone: whether the capture has no other process."""
        if self.infix is None and file_format == self.format:
            return self.stem if alone else f"{self.stem}_{pid}"
        return (
            f"{self.stem}_{pid}{self.infix or ''}{STORED_SUFFIXES.get(file_format, f'.{PurePath(file_format).name}')}"
        )


def parse_log_file(text: str) -> LogFile:
    """The parts of a path like /tmp/trace.json. Raises ValueError."""
    path = PurePath(text)
    if text.endswith("/") or path.name in ("", "..") or "\0" in text:
        raise ValueError(f"expected the path of a file, got {text!r:.200}")
    for ending, (infix, file_format) in _ENDINGS.items():
        if path.name.endswith(ending) and path.name != ending:
            return LogFile(Path(path.parent), path.name.removesuffix(ending), infix, file_format)
    return LogFile(Path(path.parent), path.name, None, "chrome-json")
