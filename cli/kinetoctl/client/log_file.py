"""File names as ACTIVITIES_LOG_FILE asks for them: Kineto's rule, on this side only. Pure."""

from dataclasses import dataclass
from pathlib import Path, PurePath

from kineto_trace.store.output_formats import STORED_SUFFIXES

_ENDINGS = {  # what a name may end in -> what stays in front of a format's suffix, and the format
    ".pt.trace.json.gz": (".pt.trace", "chrome"),
    ".pt.trace.json": (".pt.trace", "chrome-json"),
    ".json.gz": ("", "chrome"),
    ".json": ("", "chrome-json"),
    ".pftrace": ("", "perfetto"),
}


@dataclass(frozen=True, slots=True)
class LogFile:
    """Where one trace file per process goes: STEM_PIDINFIX and the suffix of its format.

    infix None: the name ends in nothing that is known. Such a name is kept as it is for the only trace, as Kineto does.
    """

    directory: Path
    stem: str
    infix: str | None
    format: str

    def name(self, pid: int, file_format: str, *, alone: bool) -> str:
        """Of a file of this process. alone: the capture has no other process."""
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
