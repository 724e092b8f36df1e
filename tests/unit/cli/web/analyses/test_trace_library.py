"""Which files an address stands for."""

import os
from contextlib import closing
from pathlib import Path

import pytest
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.errors import NotFound
from kinetoctl.web.analyses.trace_library import TraceLibrary
from support.waiting import scaled

SETTINGS = CommonOptions(address="unix:/nowhere", output="table", color=False, quiet=True, timeout_s=1)


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
    for other in ("", "x", str(file), "20260131-120000-abc"):
        with pytest.raises(NotFound):
            library.find(other)


@pytest.mark.parametrize("text", ["/etc/passwd", "../x", "*", "s3://bucket/x", "20260131"])
def test_without_files_an_address_is_the_id_of_a_capture_and_nothing_else(text: str) -> None:
    with pytest.raises(NotFound):
        TraceLibrary(SETTINGS).find(text)
