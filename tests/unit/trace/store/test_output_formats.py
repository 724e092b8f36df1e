"""File names from ACTIVITIES_LOG_FILE."""

from pathlib import Path

import pytest
from kineto_trace.store.output_formats import parse_log_file


@pytest.mark.parametrize(
    ("log_file", "name", "file_format"),
    [
        ("/tmp/x.json", "x_7.json", "chrome-json"),
        ("/tmp/x.pt.trace.json", "x_7.pt.trace.json", "chrome-json"),
        ("/tmp/x.json.gz", "x_7.json.gz", "chrome"),
        ("/tmp/x.pt.trace.json.gz", "x_7.pt.trace.json.gz", "chrome"),
        ("x.v2.json", "x.v2_7.json", "chrome-json"),
        ("/tmp/x.trace", "x.trace", "chrome-json"),
        ("/tmp/.json", ".json", "chrome-json"),
        ("/tmp/x.pftrace", "x_7.pftrace", "perfetto"),
    ],
)
def test_the_pid_stands_before_the_ending(log_file: str, name: str, file_format: str) -> None:
    parsed = parse_log_file(log_file)
    assert (parsed.name(7, parsed.format, alone=True), parsed.format) == (name, file_format)


def test_two_processes_never_share_a_name() -> None:
    assert parse_log_file("/tmp/x.trace").name(7, "chrome-json", alone=False) == "x.trace_7"


def test_other_formats_have_their_own_endings() -> None:
    parsed = parse_log_file("/tmp/x.pt.trace.json")
    assert parsed.name(7, "chrome", alone=True) == "x_7.pt.trace.json.gz"
    assert parsed.name(7, "memory-snapshot", alone=True) == "x_7.pt.trace.memory_snapshot.pickle"
    assert parse_log_file("x.trace").name(7, "chrome", alone=True) == "x.trace_7.json.gz"


def test_a_format_of_a_newer_daemon_stays_in_the_folder() -> None:
    assert parse_log_file("x.json").name(7, "../../evil", alone=True) == "x_7.evil"


def test_the_folder_is_that_of_the_path() -> None:
    assert parse_log_file("/data/traces/x.json").directory == Path("/data/traces")
    assert parse_log_file("x.json").directory == Path()


@pytest.mark.parametrize("text", ["/tmp/", "..", "/", "/tmp/..", "a\0b"])
def test_a_path_that_is_no_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a file path"):
        parse_log_file(text)
