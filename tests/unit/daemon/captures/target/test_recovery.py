"""Why a collection ended, kept for a daemon that comes later."""

from pathlib import Path

import pytest
from kinetod.captures.result.verdict import DONE, Ending, EndState
from kinetod.captures.target.recovery import note_ending, noted_ending

STOPPED = Ending(EndState.PARTIAL, "DAEMON_STOPPED", "the daemon was stopped")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    return tmp_path


@pytest.mark.parametrize("ending", [STOPPED, DONE])
def test_what_was_noted_is_told(folder: Path, ending: Ending) -> None:
    note_ending(folder, ending, 7)
    known = noted_ending(folder)
    assert known is not None and (known.ending(), known.dropped) == (ending, 7)


def test_the_first_reason_stays(folder: Path) -> None:
    note_ending(folder, DONE, 0)
    note_ending(folder, STOPPED, 0)
    known = noted_ending(folder)
    assert known is not None and known.ending() == DONE


def test_without_records_there_is_no_note(tmp_path: Path) -> None:
    note_ending(tmp_path, STOPPED, 0)
    assert noted_ending(tmp_path) is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"outcome":"fine","code":"","reason":"","dropped":0}', b"\xff" * 99]
)
def test_a_note_that_cannot_be_read_counts_as_none(folder: Path, text: bytes) -> None:
    (folder / "raw/ending.json").write_bytes(text)
    assert noted_ending(folder) is None


def test_a_note_has_no_control_characters_and_a_code_that_is_one(folder: Path) -> None:
    note_ending(folder, Ending(EndState.PARTIAL, "not a code\n", "a\x1b[31mreason"), 0)
    known = noted_ending(folder)
    assert known is not None
    assert known.ending().code == "DAEMON_RESTARTED" and "\x1b" not in known.ending().reason
