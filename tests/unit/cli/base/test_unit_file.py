"""Units are read as systemd reads them: folders, drop-ins, lists, quotes, continued lines, wrappers."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from kinetoctl.base.unit_file import FOLDERS, FlagReader, GivenFlag, UnitFile, find_unit, read_unit
from kinetoctl.errors import NotMigrated

NAME = "dynolog.service"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def unit(tmp_path: Path, text: str, **drop_ins: str) -> UnitFile:
    path = written(tmp_path / NAME, text)
    for name, content in drop_ins.items():
        written(tmp_path / f"{NAME}.d/{name}.conf", content)
    return read_unit(path, "dynolog", tmp_path)


def test_a_unit_has_its_arguments_its_variables_and_its_settings(tmp_path: Path) -> None:
    found = unit(
        tmp_path,
        "[Unit]\nDescription=x\nExecStart=/bin/other\n[Service]\nExecStartPre=/usr/bin/touch /etc/x\n"
        "ExecStart=/usr/local/bin/dynolog --flagfile=/etc/dynolog.gflags \\\n  # a comment in between\n"
        '  --otlp_headers "a=b c"\n; another\nMemoryMax=1G\nMemoryMax=2G\nEnvironment=A=1 "B=2 3" \'C=4\'\n',
    )
    assert found == UnitFile(
        files=[tmp_path / NAME],
        arguments=["--flagfile=/etc/dynolog.gflags", "--otlp_headers", "a=b c"],
        environ={"A": "1", "B": "2 3", "C": "4"},
        settings={"ExecStartPre": "/usr/bin/touch /etc/x", "MemoryMax": "2G"},
    )


def test_drop_ins_add_and_an_empty_value_empties_a_list(tmp_path: Path) -> None:
    found = unit(
        tmp_path,
        "[Service]\nExecStart=/usr/local/bin/dynolog --port=1\nEnvironment=A=1\n",
        b="[Service]\nExecStart=\nExecStart=-/opt/dynolog --port=2\n",
        a="[Service]\nExecStart=\nExecStart=/opt/dynolog --port=3\nEnvironment=B=2\n",
        c="[Unit]\nDescription=x\n",
    )
    assert (found.arguments, found.environ) == (["--port=2"], {"A": "1", "B": "2"})
    assert [file.name for file in found.files] == [NAME, "a.conf", "b.conf", "c.conf"]


def test_the_first_folder_counts_and_drop_ins_of_all_do(tmp_path: Path) -> None:
    etc, lib = (tmp_path / str(folder).lstrip("/") for folder in (FOLDERS[0], FOLDERS[3]))
    assert find_unit(NAME, tmp_path) is None
    written(lib / NAME, "[Service]\nExecStart=/usr/local/bin/dynolog\n")
    assert find_unit(NAME, tmp_path) == lib / NAME
    written(lib / f"{NAME}.d/10.conf", "[Service]\nEnvironment=A=lib B=lib\n")
    written(etc / f"{NAME}.d/10.conf", "[Service]\nEnvironment=A=etc\n")
    written(etc / f"{NAME}.d/20.conf", "[Service]\nEnvironment=C=etc\n")
    assert read_unit(lib / NAME, "dynolog", tmp_path).environ == {"A": "etc", "C": "etc"}
    written(etc / NAME, "[Service]\nExecStart=/usr/local/bin/dynolog --port=7\n")
    assert find_unit(NAME, tmp_path) == etc / NAME


def test_files_of_variables_count_more_and_may_be_missing(tmp_path: Path) -> None:
    written(tmp_path / "etc/default/dynolog", "# x\nA=2\nB='3 4'\nC=it's\n\n")
    found = unit(
        tmp_path,
        "[Service]\nEnvironmentFile=/etc/default/dynolog\nEnvironmentFile=-/etc/none\nEnvironment=A=1\n"
        "ExecStart=/usr/local/bin/dynolog --port=${A} $B --x=$A\n",
    )
    assert found.environ == {"A": "2", "B": "3 4", "C": "it's"}
    assert found.arguments == ["--port=2", "3", "4", "--x=$A"]  # only braces count within a word
    with pytest.raises(NotMigrated, match=r"cannot read .*/etc/gone: No such file"):
        unit(tmp_path, "[Service]\nEnvironmentFile=/etc/gone\nExecStart=/usr/local/bin/dynolog\n")


@pytest.mark.parametrize(
    "command",
    [
        "/usr/bin/numactl -N 0 /usr/local/bin/dynolog --port=1",
        "@+/usr/local/bin/dynolog --port=1",
        "/bin/sh -c 'exec /usr/local/bin/dynolog --port=1 && echo x'",
        '/bin/bash -ec "sleep 1; dynolog --port=1"',
        "/bin/sh -c 'dynolog --port=$A;echo x'",
        "/bin/sh -c 'dynolog $B&'",
    ],
)
def test_a_wrapper_is_seen_through(tmp_path: Path, command: str) -> None:
    text = f"[Service]\nEnvironment=A=1 B=--port=1\nExecStart={command}\n"
    assert unit(tmp_path, text).arguments == ["--port=1"]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("/bin/dynolog --a=$$X --b=100%% --flagfile=/etc/%N.gflags --c=%p%H", [
            "--a=$X", "--b=100%", "--flagfile=/etc/dynolog.gflags", "--c=dynolog%H",
        ]),
        (":/bin/dynolog --a=${A} $B", ["--a=${A}", "$B"]),
        ("/bin/dynolog $C $NONE", ["--a=b c", "--d"]),
        ("/bin/dynolog --a=x\\\\\n--port=2", ["--a=x\\"]),
    ],
)  # fmt: skip
def test_variables_and_specifiers_are_systemds(tmp_path: Path, command: str, arguments: list[str]) -> None:
    text = f"[Service]\nEnvironment=A=1 B=2 \"C='--a=b c' --d\"\nExecStart={command}\n"
    assert unit(tmp_path, text).arguments == arguments


def test_a_unit_may_be_from_windows(tmp_path: Path) -> None:
    text = "\ufeff[Service]\r\nExecStart=/bin/dynolog \\\r\n  --port=2\r\n"
    (tmp_path / NAME).write_bytes(text.encode())
    assert read_unit(tmp_path / NAME, "dynolog", tmp_path).arguments == ["--port=2"]


def test_what_a_unit_is_reproached_with_holds_no_argument(tmp_path: Path) -> None:
    for text in ("ExecStart=/opt/run-it --token=s3cret", "ExecStart=/opt/x s3cret'", "Environment='A=s3cret"):
        with pytest.raises(NotMigrated) as raised:
            unit(tmp_path, f"[Service]\n{text}\n")
        assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[Service]\nExecStart=/opt/run-it\n", "does not start dynolog: its ExecStart is '/opt/run-it'"),
        ("[Unit]\n", "does not start dynolog: its ExecStart is nothing; give dynolog's flag file with --flags"),
        ('[Service]\nExecStart=/usr/bin/dynolog "--port\n', "no closing quotation"),
    ],
)
def test_a_unit_that_says_nothing_of_it_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(NotMigrated, match=said):
        unit(tmp_path, text)


def test_a_drop_in_that_is_a_link_to_dev_null_turns_off_the_one_of_its_name(tmp_path: Path) -> None:
    etc, lib = tmp_path / "etc/systemd/system", tmp_path / "usr/lib/systemd/system"
    path = written(lib / NAME, "[Service]\nExecStart=/usr/local/bin/dynolog --port=1\n")
    written(lib / f"{NAME}.d/port.conf", "[Service]\nExecStart=\nExecStart=/usr/local/bin/dynolog --port=2\n")
    masking = etc / f"{NAME}.d/port.conf"
    masking.parent.mkdir(parents=True)
    masking.symlink_to("/dev/null")
    found = read_unit(path, "dynolog", tmp_path)
    assert (found.files, found.arguments) == ([path], ["--port=1"])


def test_lines_of_a_file_of_variables_go_on_behind_a_backslash(tmp_path: Path) -> None:
    written(tmp_path / "etc/dynolog.env", "A=--use_prometheus \\\r\n  --prometheus_port=9999\nB=x\\\\\nC=1\n")
    found = unit(tmp_path, "[Service]\nEnvironmentFile=/etc/dynolog.env\nExecStart=/usr/local/bin/dynolog $A\n")
    assert found.arguments == ["--use_prometheus", "--prometheus_port=9999"]
    assert found.environ["C"] == "1"


KNOWN = {"port", "use_JSON", "use_otlp", "dcgm_fields", "v"}
SWITCHES = {"use_JSON", "use_otlp"}


def reader(environ: Mapping[str, str] | None = None, stand_in: Path | None = None) -> FlagReader:
    return FlagReader(program="dynolog", known=KNOWN, switches=SWITCHES, environ=environ or {}, stand_in=stand_in)


def found(given: list[GivenFlag]) -> list[tuple[str, str | None]]:
    return [(flag.name, flag.value) for flag in given if not flag.programs]


def of_text(tmp_path: Path, text: str) -> list[tuple[str, str | None]]:
    path = tmp_path / "flags"
    path.write_text(text)
    return found(reader().file(path))


def test_a_file_has_a_flag_on_each_line_and_comments(tmp_path: Path) -> None:
    text = "# comment\n\n--port=1779\n  -use_JSON\n--use_otlp=false\n--dcgm_fields=155, 204\n--v\n"
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


def test_flags_below_a_line_without_a_dash_tell_it(tmp_path: Path) -> None:
    path = tmp_path / "flags"
    path.write_text("port=1779\n--use_JSON\n--access_token=s3cret\n")
    assert [(flag.name, flag.programs) for flag in reader().file(path)] == [
        ("use_JSON", "port=1779"),
        ("access_token", "port=1779"),
    ]


def test_blanks_are_part_of_names_and_values(tmp_path: Path) -> None:
    text = "\t --use_JSON \n--port = 1\n--use_JSON = true\n--port=1 \n--dcgm_fields= a\x0bb\x1cc\u2028d \n"
    assert of_text(tmp_path, text) == [
        ("use_JSON ", None), ("port ", " 1"), ("use_JSON ", " true"), ("port", "1 "),
        ("dcgm_fields", " a\x0bb\x1cc\u2028d "),
    ]  # fmt: skip


def test_lines_may_end_as_windows_ends_them(tmp_path: Path) -> None:
    path = tmp_path / "flags"
    path.write_bytes(b"# x\r\n--port=1\r\n\r\n--use_JSON\r\n--v=1\n--v=2\n")
    assert found(reader().file(path)) == [("port", "1"), ("use_JSON", "true"), ("v", "1"), ("v", "2")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xef\xbb\xbf--port=1\n", "begins with a byte order mark, so Dynolog ignores its flags"),
        ("--port=1\n".encode("utf-16-le"), "is not plain text: it contains a NUL"),
        (b"--port=1\n--use_JSON\r\n", "mixes Unix and Windows line endings"),
    ],
)
def test_files_that_gflags_takes_for_something_else_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "flags"
    path.write_bytes(content)
    with pytest.raises(NotMigrated, match=said):
        reader().file(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "flags"
    os.mkfifo(path)
    with pytest.raises(NotMigrated, match="is not a regular file"):
        reader().file(path)
    reading, writing = os.pipe()
    os.write(writing, b"--port=1\n")
    os.close(writing)
    assert found(reader().file(Path(f"/dev/fd/{reading}"))) == [("port", "1")]
    os.close(reading)


def test_each_flag_says_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "flags"
    path.write_text("\n--port=1\n")
    assert reader().file(path) == [GivenFlag(name="port", value="1", where=f"{path} line 2")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "1779", "--use_JSON"], [("port", "1779"), ("use_JSON", "true")]),
        (["--use_JSON", "1779", "--port=2"], [("use_JSON", "true"), ("port", "2")]),
        (["--port", "--use_JSON"], [("port", "--use_JSON")]),
        (["--dcgm_fields", "--", "--port"], [("dcgm_fields", "--"), ("port", None)]),
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
    with pytest.raises(NotMigrated, match="flag files are nested more than 16 deep"):
        reader().file(path)


def test_files_that_insert_many_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "9").write_text("")
    for number in range(9):
        following = tmp_path / str(number + 1)
        (tmp_path / str(number)).write_text(f"--flagfile={following},{following},{following}\n")
    with pytest.raises(NotMigrated, match="more than 256 flag files"):
        reader().file(tmp_path / "0")


def test_flags_from_variables_may_insert_more(tmp_path: Path) -> None:
    path = tmp_path / "flags"
    path.write_text("--port=7\n")
    environ = {"FLAGS_flagfile": str(path), "FLAGS_tryfromenv": "tryfromenv"}
    assert found(reader(environ).command_line(["--fromenv=flagfile"], "here")) == [("port", "7")]
    with pytest.raises(NotMigrated, match="FLAGS_tryfromenv refers to itself"):
        reader(environ).command_line(["--tryfromenv=tryfromenv"], "here")


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
    [
        (None, "No such file"),
        (b"--port=\xff\n", "is not UTF-8 text"),
        (b"#" * (1 << 20) + b"\n", "too many for a flag file"),
    ],
    ids=["missing", "no text", "long"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "flags"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NotMigrated, match=said) as raised:
        reader().file(path)
    assert str(path) in str(raised.value)
