"""Units are read as systemd reads them: folders, drop-ins, lists, quotes, continued lines, wrappers."""

from pathlib import Path

import pytest
from kinetoctl.errors import NotMigrated
from kinetoctl.migration.unit_file import FOLDERS, UnitFile, find_unit, read_unit

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
        ("[Unit]\n", "does not start dynolog: its ExecStart is nothing; name its flag file with --flags"),
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
