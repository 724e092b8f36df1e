"""Which files an address stands for."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.value_types import removable_folder
from kinetoctl.errors import CliError, NotFound, Refused
from kinetoctl.web.analyses import trace_list
from kinetoctl.web.analyses.analysis_queue import Computing
from kinetoctl.web.analyses.trace_library import TraceLibrary, UrlCopies
from support.waiting import scaled, until

CAPTURE = "20260131-120000-abc"
SETTINGS = CommonOptions(address="unix:/nowhere", output="table", color=False, quiet=True, timeout_s=1)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look is waited for."""
    monkeypatch.setattr(trace_list, "FIRST_S", scaled(20))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_text("{}")
    return path


def test_an_address_stays_when_the_server_starts_again(file: Path) -> None:
    ids = [list(TraceLibrary(SETTINGS, [str(file)]).files) for _ in range(2)]
    assert ids[0] == ids[1]


def test_a_file_that_changed_has_another_identity(file: Path) -> None:
    library = TraceLibrary(SETTINGS, [str(file), str(file.parent), str(file.parent / "*.json")])
    before = [library.find(each).identity for each in library.files]
    os.utime(file, ns=(1, 1))
    after = [library.find(each).identity for each in library.files]
    assert all(first != second for first, second in zip(before, after, strict=True))


def test_what_was_removed_is_said_to_be_gone(file: Path) -> None:
    library = TraceLibrary(SETTINGS, [str(file)])
    (found,) = library.files
    file.unlink()
    with pytest.raises(NotFound, match="is gone"):
        library.find(found)
    library.close()


def test_a_url_is_an_entry_whose_traces_are_copies(file: Path) -> None:
    file.write_text('{"traceEvents": []}')
    with closing(TraceLibrary(SETTINGS, [file.as_uri()])) as library:
        ((found, name),) = library.files.items()
        (copy,) = library.find(found, scaled(60)).paths
        assert (name, library.words(name)) == (file.as_uri(), (file.as_uri(),))
        assert Path(copy) != file
        assert Path(copy).read_text() == file.read_text()
    assert not Path(copy).exists()


def test_only_what_the_command_line_names_is_found(file: Path) -> None:
    library = TraceLibrary(SETTINGS, [str(file)])
    for other in ("", "x", str(file), CAPTURE):
        with pytest.raises(NotFound):
            library.find(other)


class _Downloading(TraceLibrary):
    """Downloads a capture when it is let go. ended: that has ended."""

    def __init__(self, folder: Path) -> None:
        super().__init__(SETTINGS)
        self.folder, self.begun, self.go, self.ended = folder, *(threading.Event() for _ in range(3))

    def _paths(self, capture_id: str, stack: ExitStack) -> tuple[str, ...]:
        self.begun.set()
        assert self.go.wait(scaled(60))
        path = stack.enter_context(removable_folder("", self.folder)) / capture_id
        path.write_text("{}")
        stack.callback(self.ended.set)
        return (str(path),)


def test_nothing_is_left_of_a_download_that_ends_after_the_server(tmp_path: Path) -> None:
    with closing(_Downloading(tmp_path)) as library:
        with pytest.raises(Computing):
            library.find(CAPTURE, 0.0)
        assert library.begun.wait(scaled(60))
    library.go.set()
    assert library.ended.wait(scaled(60))
    library._pool.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_a_download_is_kept_until_the_end(tmp_path: Path) -> None:
    with closing(_Downloading(tmp_path)) as library:
        library.go.set()
        (path,) = library.find(CAPTURE, scaled(60)).paths
        assert Path(path).read_text() == "{}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["/etc/passwd", "../x", "*", "s3://bucket/x", "20260131"])
def test_without_files_an_address_is_the_id_of_a_capture_and_nothing_else(text: str) -> None:
    with pytest.raises(NotFound):
        TraceLibrary(SETTINGS).find(text)


SIZE = 1000
WAIT_S = 60.0
FILES, ROUNDS = 40, 10


def fetching() -> bool:
    """Whether a thread fetches URLs."""
    return any(thread.name == "urls" for thread in threading.enumerate())


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    found = []
    for name in "ab":
        (tmp_path / name).mkdir()
        for rank in range(2):
            text = f'{{"distributedInfo": {{"rank": {rank}}}, "traceEvents": []}}'
            (tmp_path / name / f"x{rank}y.json").write_text(text.ljust(SIZE))
        found.append((tmp_path / name).as_uri())
    return found


@contextmanager
def copies(urls: list[str], most_bytes: int = 1 << 20) -> Iterator[UrlCopies]:
    made = UrlCopies(urls, most_bytes)
    try:
        yield made
    finally:
        made.close()


def paths(made: UrlCopies, trace_id: str) -> tuple[str, ...]:
    """Waits as a page does: it is loaded again."""
    found: list[tuple[str, ...]] = []

    def complete() -> bool:
        try:
            found.append(made.paths(trace_id, scaled(WAIT_S)) or ())
        except Computing:
            return False
        return True

    until(complete, "the copy of a URL")
    return found[0]


def test_urls_are_fetched_by_themselves_and_removed_at_the_end(urls: list[str]) -> None:
    with copies(urls) as made:
        until(lambda: not any(trace.state for trace in made.traces()), "all copies")
        assert [(trace.name, trace.size_bytes) for trace in made.traces()] == [(url, 2 * SIZE) for url in urls]
        here = [Path(path) for trace in made.traces() for path in paths(made, trace.id)]
        assert [path.stat().st_size for path in here] == [SIZE] * 4
    assert not any(path.exists() for path in here)


def test_nothing_is_left_of_a_copy_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, folder = tmp_path / "many", tmp_path / "copies"
    url.mkdir()
    folder.mkdir()
    for rank in range(FILES):
        (url / f"x{rank}y.json").write_text(f'{{"distributedInfo": {{"rank": {rank}}}, "traceEvents": []}}')
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    for _ in range(ROUNDS):
        with copies([url.as_uri()]):
            until(lambda: any(folder.glob("*/*")), "the first folder of a trace")
        until(lambda: not fetching(), "the thread has ended")
        assert list(folder.iterdir()) == []


def test_a_url_that_fails_is_an_entry_with_the_reason(tmp_path: Path) -> None:
    with copies([(tmp_path / "none").as_uri(), "ftp://host/x"]) as made:
        until(lambda: all(trace.state == "failed" for trace in made.traces()), "both failures")
        first, second = made.traces()
        assert "nothing found" in first.problem
        assert "traces can be read from s3://" in second.problem
        with pytest.raises(CliError, match="nothing found"):
            paths(made, first.id)


def test_a_url_that_failed_is_fetched_again_when_it_is_opened(tmp_path: Path, urls: list[str]) -> None:
    later = tmp_path / "later"
    with copies([later.as_uri()]) as made:
        until(lambda: made.traces()[0].state == "failed", "the failure")
        (tmp_path / "a").rename(later)
        (trace,) = made.traces()
        with pytest.raises(CliError):
            paths(made, trace.id)
        assert len(paths(made, trace.id)) == 2
        assert made.traces()[0].problem == ""


def test_what_is_larger_than_the_space_is_refused(urls: list[str]) -> None:
    with copies(urls[:1], SIZE) as made:
        until(lambda: made.traces()[0].state == "failed", "the refusal")
        with pytest.raises(Refused, match="--url-space"):
            paths(made, made.traces()[0].id)


def test_what_does_not_fit_is_fetched_when_it_is_opened_and_takes_the_place_of_another(urls: list[str]) -> None:
    with copies(urls, 3 * SIZE) as made:
        first, second = (trace.id for trace in made.traces())
        until(lambda: [t.state for t in made.traces()] == ["", "fetched when it is opened"], "the first copy")
        before = paths(made, first)
        assert len(paths(made, second)) == 2
        assert not Path(before[0]).exists()
        assert [trace.state for trace in made.traces()] == ["fetched when it is opened", ""]
        assert len(paths(made, first)) == 2


def test_other_ids_are_not_urls(urls: list[str]) -> None:
    with copies(urls) as made:
        assert made.paths("0123456789ab", 0.0) is None
