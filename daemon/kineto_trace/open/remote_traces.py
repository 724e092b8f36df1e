"""Traces in object stores: finds those below a URL, and opens one by fetching only the necessary files.

Theory of operation
    The daemon uploads captures as PREFIX/HOST/CAPTURE/TARGET/… with PREFIX/HOST/CAPTURE/manifest.json, which is written
    last and has the size and SHA-256 of every file. Everything below a URL is listed once; manifests are read, and the
    beginnings of other files that may be Chrome traces. A target without a trace, or one whose upload has not finished,
    is found too, with the reason why it cannot be read.

    An opened trace has a temporary folder. The files of a folder of columns are fetched when a table is accessed; all
    other forms are fetched at once. Files with a checksum are verified. Reading is in pieces, so that memory does not
    grow with the files.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from kineto_trace.errors import FileError
from kineto_trace.model.target_info import TARGET_FILE
from kineto_trace.model.trace import Trace
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.open.trace_source import PACKED_HEAD_BYTES, RemoteFile, RemoteTrace, process_name
from kineto_trace.store import upload_manifest
from kineto_trace.store.object_stores import checked_store, list_url, with_retries
from kineto_trace.store.output_formats import COLUMNS_DIRECTORY
from kineto_trace.store.upload_manifest import FLEET_LABEL, MANIFEST, Manifest, is_below

PIECE_BYTES = 16 << 20
MAX_LISTED = 5
_COLUMNS_FILES = ("trace.json", "strings.parquet")
_MAGIC = frozenset("*?[")
_FOLDER_PREFIX = "kineto-remote-"


class TraceCandidate(NamedTuple):
    """A file that may be a trace: its location without the scheme, and its first bytes as stored."""

    trace: RemoteTrace
    place: PurePosixPath
    head: bytes


class FoundTraces(NamedTuple):
    """The traces below a URL. targets: captured targets and folders of columns; files: files that may be traces."""

    targets: list[tuple[PurePosixPath, RemoteTrace]]
    files: list[TraceCandidate]


def list_traces(url: str, suffixes: tuple[str, ...], *, fleet: str = "") -> FoundTraces:
    """Lists everything below a URL, which may be a pattern, that may be a trace.

    suffixes: of files to consider.
    fleet: only captures whose label kineto.fleet has this value.

    Raises FileError for a URL with nothing below it, and for one with captures of several fleets, which do not form one
    job.
    """
    fs, root = checked_store(url)
    sizes = list_url(url, lambda: _sizes(fs, root))
    if not sizes:
        raise FileError(f"{url}: nothing found")
    scheme = f"{url.partition('://')[0]}://"
    captures = _captures(fs, scheme, [path for path in sizes if PurePosixPath(path).name == MANIFEST])
    chosen = _of_fleet(url, captures, fleet)
    targets = [entry for folder, found in chosen.items() for entry in _targets(scheme, folder, found)]
    if fleet:
        return FoundTraces(targets, [])
    rest = [path for path in sizes if not any(str(parent) in captures for parent in PurePosixPath(path).parents)]
    folders, rest = _folders(scheme, rest, sizes)
    names = [path for path in rest if path.endswith(suffixes)]
    heads = list_url(url, lambda: _heads(fs, names, sizes))
    found = [RemoteTrace(url=scheme + path, files=(RemoteFile(name="", size_bytes=sizes[path]),)) for path in names]
    return FoundTraces(
        [*targets, *folders],
        [TraceCandidate(*each) for each in zip(found, map(PurePosixPath, names), heads, strict=True)],
    )


def _sizes(fs: Any, root: str) -> dict[str, int]:
    """Returns path -> size in bytes for everything at or below a location or pattern."""
    roots = fs.glob(root) if _MAGIC & set(root) else [root]
    found: dict[str, int] = {}
    for each in roots:
        found |= {str(path): int(info["size"]) for path, info in fs.find(each, detail=True).items()}
    return found


def _captures(fs: Any, scheme: str, paths: list[str]) -> dict[str, Manifest]:
    """Returns folder -> manifest for each capture."""
    if not paths:
        return {}
    contents = list_url(scheme + paths[0], lambda: fs.cat(paths, on_error="return"))
    found = {}
    for path in paths:
        data = contents.get(path)
        if isinstance(data, BaseException):
            raise FileError(f"{scheme}{path} cannot be read: {data}")
        if b'"block_bytes"' in data:  # other files may have this name
            try:
                found[str(PurePosixPath(path).parent)] = upload_manifest.from_bytes(data)
            except FileError as exc:
                raise FileError(f"{scheme}{path}: {exc}") from exc
    return found


def _of_fleet(url: str, captures: Mapping[str, Manifest], fleet: str) -> Mapping[str, Manifest]:
    """Returns the captures of one fleet. Raises FileError."""
    fleets = {folder: _fleet(found) for folder, found in captures.items()}
    known = sorted(set(fleets.values()) - {""}, reverse=True)
    shown = ", ".join(known[:MAX_LISTED]) + (", …" if len(known) > MAX_LISTED else "")
    if fleet:
        chosen = {folder: found for folder, found in captures.items() if fleets[folder] == fleet}
        if not chosen:
            raise FileError(f"{url}: no capture has the label {FLEET_LABEL}={fleet}; labels found: {shown or 'none'}")
        return chosen
    if len(known) > 1:
        raise FileError(f"{url} holds captures of {len(known)} fleets; choose one with --fleet or a pattern ({shown})")
    return captures


def _fleet(found: Manifest) -> str:
    labels = found.capture.get("spec", {}).get("labels", {})
    return str(labels.get(FLEET_LABEL, ""))


# ------------------------------------------------------------ finding traces


def _targets(scheme: str, folder: str, found: Manifest) -> Iterator[tuple[PurePosixPath, RemoteTrace]]:
    """Yields the targets of one capture: those with files, and those without together with the reason."""
    files: dict[str, list[RemoteFile]] = {}
    for path, stored in found.files.items():
        key, _, name = path.partition("/")
        entry = RemoteFile(name=name, size_bytes=stored.size_bytes, sha256=stored.sha256)
        files.setdefault(key, []).append(entry)
    damaged = {path.partition("/")[0]: (path, why) for path, why in found.damaged.items()}
    described = {
        f"{target.get('pid')}-{target.get('start_time_ns')}": target for target in found.capture.get("targets", ())
    }
    for key in dict.fromkeys((*described, *files)):
        about = described.get(key, {})
        rank = about.get("process", {}).get("rank")
        own = tuple(files.get(key, ()))
        problem = ""
        if key in damaged:
            problem = f"{damaged[key][0]} was damaged before it could be uploaded ({damaged[key][1]})"
        elif not _needed(own):
            verdict = str(about.get("verdict", "")).removeprefix("VERDICT_") or "no verdict"
            reason = about.get("reason") or about.get("reason_code") or "there is no trace"
            problem = f"its capture ended as {verdict}: {reason}"
        url = f"{scheme}{folder}/{key}"
        host, pid = found.capture.get("host"), about.get("pid")
        process = process_name(host, pid) if isinstance(host, str) and isinstance(pid, int) else ""
        capture = _fleet(found) or str(found.capture.get("id", ""))
        yield (
            PurePosixPath(f"{folder}/{key}"),
            RemoteTrace(url=url, files=own, rank=rank, process=process, capture=capture, problem=problem),
        )


def _folders(
    scheme: str, paths: list[str], sizes: Mapping[str, int]
) -> tuple[list[tuple[PurePosixPath, RemoteTrace]], list[str]]:
    """Returns folders that are traces without a manifest, and the files outside them."""
    inside: dict[str, set[str]] = {}
    for path in paths:
        inside.setdefault(str(PurePosixPath(path).parent), set()).add(PurePosixPath(path).name)
    unfinished = {folder for folder, names in inside.items() if TARGET_FILE in names}
    stored = {folder for folder, names in inside.items() if names.issuperset(_COLUMNS_FILES)}
    stored -= {f"{folder}/{COLUMNS_DIRECTORY}" for folder in unfinished}
    found = [
        (
            PurePosixPath(folder),
            RemoteTrace(url=scheme + folder, problem="there is no manifest, so its upload has not finished"),
        )
        for folder in sorted(unfinished)
    ]
    for folder in sorted(stored):
        own = tuple(RemoteFile(name=name, size_bytes=sizes[f"{folder}/{name}"]) for name in sorted(inside[folder]))
        found.append((PurePosixPath(folder), RemoteTrace(url=scheme + folder, files=own)))
    taken = unfinished | stored
    rest = [path for path in paths if not any(str(parent) in taken for parent in PurePosixPath(path).parents)]
    return found, rest


def _heads(fs: Any, paths: list[str], sizes: Mapping[str, int]) -> list[bytes]:
    if not paths:
        return []
    ends = [min(sizes[path], PACKED_HEAD_BYTES) for path in paths]
    return [bytes(head) for head in fs.cat_ranges(paths, [0] * len(paths), ends)]


# ------------------------------------------------------------ reading one


def needed_bytes(trace: RemoteTrace) -> tuple[int, bool]:
    """Returns the number of bytes that `fetch` fetches (`open_remote` at most), and whether they are columns."""
    wanted = _needed(trace.files)
    return sum(file.size_bytes for file in wanted), _is_columns(wanted)


@contextmanager
def open_remote(trace: RemoteTrace) -> Iterator[Trace]:
    """Provides the trace for the duration of the block.

    Raises TraceError, also during the block if data that is accessed cannot be fetched.
    """
    if trace.problem:
        raise FileError(f"{trace.url}: {trace.problem}")
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX) as folder:
        wanted = _needed(trace.files)
        fetcher = _Fetcher(trace, Path(folder))
        if _is_columns(wanted):
            from kineto_trace.store.parquet_folder import TRACE_FILE, load_columns

            directory = next(PurePosixPath(file.name).parent for file in wanted if file.name.endswith(TRACE_FILE))
            fetcher.get(str(directory / TRACE_FILE))
            yield load_columns(Path(folder) / directory, lambda name: fetcher.get(str(directory / name)))
        else:
            yield open_trace(fetcher.get_all(wanted))


def fetch(trace: RemoteTrace, folder: Path) -> Path:
    """Fetches everything needed to open a trace into an existing folder. Returns the path to open.

    If the folder is removed during that, it is not created again. Raises FileError, OSError.
    """
    if trace.problem:
        raise FileError(f"{trace.url}: {trace.problem}")
    wanted = _needed(trace.files)
    name = PurePosixPath(trace.url).name
    if not is_below(name):
        raise FileError(f"{trace.url!r:.200}: its last part is not a valid folder name")
    place = folder / name if wanted[0].name else folder
    place.mkdir(exist_ok=True)
    return _Fetcher(trace, place).get_all(wanted)


def _needed(files: Iterable[RemoteFile]) -> tuple[RemoteFile, ...]:
    """Returns the files to fetch: a target's columns, otherwise its trace, otherwise its records; else all files."""
    found = tuple(files)
    names = {file.name for file in found}
    if names & {"", *_COLUMNS_FILES[1:]}:
        return found
    columns = tuple(file for file in found if file.name.startswith(f"{COLUMNS_DIRECTORY}/"))
    if columns:
        return columns
    for name in ("trace.json.gz", "trace.json", "trace.pftrace"):
        if name in names:
            return tuple(file for file in found if file.name == name)
    return found if any(name.startswith("raw/") for name in names) else ()


def _is_columns(wanted: tuple[RemoteFile, ...]) -> bool:
    return any(file.name.endswith(_COLUMNS_FILES[1]) for file in wanted)


class _Fetcher:
    """Fetches files of one trace, each once."""

    def __init__(self, trace: RemoteTrace, folder: Path) -> None:
        self._trace = trace
        self._folder = folder
        self._files = {file.name: file for file in trace.files}
        self._fs, self._root = checked_store(trace.url)

    def get_all(self, wanted: tuple[RemoteFile, ...]) -> Path:
        """Fetches all files. Returns the path of the trace: a file, a folder of columns, or a target's folder."""
        paths = [self.get(file.name) for file in wanted]
        if len(paths) == 1:
            return paths[0]
        return next((path.parent for path in paths if path.name == _COLUMNS_FILES[1]), self._folder)

    def get(self, name: str) -> Path:
        """Returns the file on this machine. Raises FileError."""
        file = self._files.get(name)
        if file is None:
            raise FileError(f"{self._trace.url}: {name} is missing")
        if name and not is_below(name):  # names come from anybody who may write to the store
            raise FileError(f"{self._trace.url}: {name!r:.80} is not a valid file name")
        path = self._folder / (name or PurePosixPath(self._trace.url).name)
        if path.exists():
            return path
        remote = f"{self._root}/{name}".rstrip("/")
        for parent in reversed(PurePosixPath(name).parents):
            (self._folder / parent).mkdir(exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            self._copy(remote, file, part)
        except FileNotFoundError:
            raise FileError(f"{self._trace.url}: {name or 'it'} is no longer there") from None
        except FileError:
            raise
        except Exception as exc:
            raise FileError(f"{self._trace.url}: {name} cannot be fetched: {type(exc).__name__}: {exc}") from exc
        return part.rename(path)

    def _copy(self, remote: str, file: RemoteFile, part: Path) -> None:
        digest = hashlib.sha256()
        free = shutil.disk_usage(self._folder).free
        if free < file.size_bytes:
            raise FileError(
                f"{self._trace.url}: {file.name} has {file.size_bytes} bytes, but only {free} bytes are free here"
            )
        with part.open("wb") as out:
            for begin in range(0, file.size_bytes, PIECE_BYTES):
                end = min(begin + PIECE_BYTES, file.size_bytes)
                data = with_retries(lambda begin=begin, end=end: self._fs.cat_file(remote, start=begin, end=end))  # type: ignore[misc]
                if len(data) != end - begin:
                    raise FileError(f"{self._trace.url}: {file.name} is shorter than when it was listed")
                digest.update(data)
                out.write(data)
        if file.sha256 and digest.hexdigest() != file.sha256:
            raise FileError(f"{self._trace.url}: {file.name} is not the file that was uploaded: its SHA-256 differs")
