"""Which files an address stands for."""

import os
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.value_types import removable_folder
from kinetoctl.errors import NotFound
from kinetoctl.web.analyses import trace_list
from kinetoctl.web.analyses.analysis_queue import Computing
from kinetoctl.web.analyses.trace_library import TraceLibrary
from support.waiting import scaled

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
