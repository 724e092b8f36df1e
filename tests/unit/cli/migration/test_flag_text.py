"""Flags are read as gflags reads them: files, command lines, files in files, variables."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from kinetoctl.errors import NotMigrated
from kinetoctl.migration.flag_text import FlagReader, GivenFlag

KNOWN = {"port", "use_JSON", "use_otlp", "dcgm_fields", "v"}
SWITCHES = {"use_JSON", "use_otlp"}


def reader(environ: Mapping[str, str] | None = None, stand_in: Path | None = None) -> FlagReader:
    return FlagReader(program="dynolog", known=KNOWN, switches=SWITCHES, environ=environ or {}, stand_in=stand_in)


def found(given: list[GivenFlag]) -> list[tuple[str, str | None]]:
    return [(flag.name, flag.value) for flag in given]


def of_text(tmp_path: Path, text: str) -> list[tuple[str, str | None]]:
    path = tmp_path / "flags"
    path.write_text(text)
    return found(reader().file(path))


def test_a_file_has_a_flag_on_each_line_and_comments(tmp_path: Path) -> None:
    text = "# comment\n\n--port=1779\n  -use_JSON \r\n--use_otlp=false\n--dcgm_fields=155, 204\n--v\n"
    assert of_text(tmp_path, text) == [
        ("port", "1779"),
        ("use_JSON", "true"),
        ("use_otlp", "false"),
        ("dcgm_fields", "155, 204"),
        ("v", None),
    ]


def test_no_before_a_switch_turns_it_off_and_means_nothing_elsewhere(tmp_path: Path) -> None:
    text = "--nouse_JSON\n-nouse_otlp\n--noport=1\n--nothing\n"
    assert of_text(tmp_path, text) == [("use_JSON", "false"), ("use_otlp", "false"), ("noport", "1"), ("nothing", None)]


def test_dashes_in_a_name_are_underscores(tmp_path: Path) -> None:
    assert of_text(tmp_path, "--use-otlp\n--dcgm-fields=a-b\n") == [("use_otlp", "true"), ("dcgm_fields", "a-b")]


def test_lines_for_other_programs_do_not_count(tmp_path: Path) -> None:
    text = "--port=1\nother\ndyno?log\n--port=2\nother another\n--port=3\n/usr/bin/x dyno*\n--port=4\n"
    assert of_text(tmp_path, text) == [("port", "1"), ("port", "4")]


def test_each_flag_says_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "flags"
    path.write_text("\n--port=1\n")
    assert reader().file(path) == [GivenFlag(name="port", value="1", where=f"{path} line 2")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "1779", "--use_JSON"], [("port", "1779"), ("use_JSON", "true")]),
        (["--use_JSON", "1779", "--port=2"], [("use_JSON", "true"), ("port", "2")]),
        (["--port", "--use_JSON"], [("port", None), ("use_JSON", "true")]),
        (["--unheard", "of", "-v=1"], [("unheard", "of"), ("v", "1")]),
        (["word", "-", "--port=1", "--", "--port=2"], [("port", "1")]),
    ],
)
def test_a_command_line_may_have_values_as_words(arguments: list[str], expected: list[tuple[str, str]]) -> None:
    assert found(reader().command_line(arguments, "here")) == expected


def test_files_are_read_where_they_are_named_also_in_files(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    inner.write_text("--port=2\n")
    outer.write_text(f"--port=1\n--flagfile={inner}\n--v=3\n")
    asked = reader()
    line = ["--v=0", f"--flagfile={outer},{inner}", "--v=9"]
    assert found(asked.command_line(line, "here")) == [
        ("v", "0"), ("port", "1"), ("port", "2"), ("v", "3"), ("port", "2"), ("v", "9"),
    ]  # fmt: skip
    assert asked.files == [outer, inner, inner]


def test_another_file_stands_in_for_the_one_that_the_command_line_names(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_text("--port=5\n")
    given = reader(stand_in=copy).command_line(["--flagfile=/etc/nowhere", "--v=1"], "here")
    assert found(given) == [("port", "5"), ("v", "1")]


def test_files_that_insert_each_other_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "flags"
    path.write_text(f"--flagfile={path}\n")
    with pytest.raises(NotMigrated, match="more than 16 flag files insert each other"):
        reader().file(path)


def test_flags_may_come_from_variables() -> None:
    environ = {"FLAGS_port": "1779"}
    assert found(reader(environ).command_line(["--fromenv=port", "--tryfromenv=port,v"], "here")) == [
        ("port", "1779"),
        ("port", "1779"),
    ]
    with pytest.raises(NotMigrated, match="--fromenv names v, but FLAGS_v is not set"):
        reader(environ).command_line(["--fromenv=v"], "here")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"--port=\xff\n", "is not UTF-8 text"), (b"#" * (1 << 20) + b"\n", "is longer than")],
    ids=["missing", "no text", "long"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "flags"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NotMigrated, match=said) as raised:
        reader().file(path)
    assert str(path) in str(raised.value)
