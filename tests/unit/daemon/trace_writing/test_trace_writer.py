"""A writer is its user before it touches a path, and replaces only that user's traces."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kinetod.trace_writing import trace_writer
from support.dynolog.door import open_folder
from support.service import attach_service
from support.service.daemon import as_user

ADA = 61001
TRACE = b'{\n"schemaVersion": 1,\n"traceEvents": []}\n'
IS_ROOT = os.getuid() == 0
only_root = pytest.mark.skipif(not IS_ROOT, reason="only root may become another user")


def write(
    root: Path,
    name: str = "t_7.json",
    *,
    uid: int | None = None,
    parts: str = "",
    files: bool = True,
    prefix: Sequence[str] = (),
) -> str:
    """What the writer says of a copy of TRACE."""
    source = root.parent / "stored"
    source.write_bytes(TRACE)
    with source.open("rb") as stored:
        question: dict[str, Any] = {
            "uid": os.getuid() if uid is None else uid,
            "root": str(root),
            "parts": parts.split("/") if parts else [],
            "files": [[stored.fileno(), name]] if files else [],
            "unit": "kinetod.service",
            "max_bytes": 1 << 20,
            "deadline_s": 60,
        }
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "kinetod.trace_writing.trace_writer"],
            input=json.dumps(question), capture_output=True, text=True, pass_fds=[stored.fileno()], check=True,
        )  # fmt: skip
    (problem,) = json.loads(done.stdout)
    assert isinstance(problem, str)
    return problem


@pytest.fixture
def root() -> Iterator[Path]:
    """Below folders that every user may enter."""
    with open_folder() as folder:
        made = folder / "logs"
        made.mkdir()
        yield made


def test_a_trace_appears_whole_under_its_name_and_nothing_else_is_left(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    assert write(root, parts="a/b") == ""
    assert {path.name for path in (root / "a/b").iterdir()} == {"t_7.json"}
    assert (root / "a/b/t_7.json").read_bytes() == TRACE
    assert (root / "a/b/t_7.json").stat().st_mode & 0o7777 == 0o644


def test_a_trace_that_is_there_is_replaced_plain_or_compressed(root: Path) -> None:
    for name, content in (("t.json", b'{"traceEvents": [1]}'), ("t.json.gz", gzip.compress(TRACE)), ("e.json", b"")):
        (root / name).write_bytes(content)
        assert write(root, name) == ""
        assert (root / name).read_bytes() == TRACE


@pytest.mark.parametrize("content", [b"#!/bin/sh\n", b'{"a": 1}', b"\x1f\x8bnothing", gzip.compress(b"text", mtime=0)])
def test_what_is_no_trace_stays(root: Path, content: bytes) -> None:
    (root / "t_7.json").write_bytes(content)
    assert "it already exists and is not a trace" in write(root)
    assert (root / "t_7.json").read_bytes() == content


def test_a_link_is_not_followed_where_the_file_should_be(root: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(TRACE + b"more")
    (root / "t_7.json").symlink_to(tmp_path / "other")
    assert "it already exists and is not a trace that can be replaced" in write(root)
    assert (tmp_path / "other").read_bytes() == TRACE + b"more"
    os.mkfifo(root / "pipe")
    assert "not a regular file" in write(root, "pipe")


def test_a_link_is_not_followed_on_the_way(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / "a").symlink_to(tmp_path / "elsewhere")
    assert write(root, parts="a") == f"{root}/a is not a folder, or is a symbolic link; use its real path"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_folder_that_is_not_there_is_named(root: Path) -> None:
    assert write(root, parts="none", files=False) == f"{root}/none: No such file or directory"
    assert write(root, files=False) == ""


@only_root
def test_a_user_writes_what_that_user_may_write(root: Path) -> None:
    (root / "ada").mkdir()
    os.chown(root / "ada", ADA, ADA)
    assert write(root, uid=ADA, parts="ada") == ""
    status = (root / "ada/t_7.json").stat()
    assert (status.st_uid, status.st_gid) == (ADA, 65534)  # the host's database knows no group
    (root / "closed").mkdir(mode=0o700)
    assert write(root, uid=ADA, parts="closed", files=False).endswith(f"is not writable by uid {ADA}")
    assert write(root, uid=ADA) == f"{root} is not writable by uid {ADA}"
    (root / "ada/roots.json").write_bytes(TRACE)
    assert "is not a regular file of this user" in write(root, "roots.json", uid=ADA, parts="ada")


@only_root
def test_roots_rights_are_not_used_where_others_choose_what_a_name_means(root: Path) -> None:
    (root / "ada").mkdir()
    os.chown(root / "ada", ADA, ADA)
    (root / "ada" / "deep").mkdir()
    (root / "open").mkdir()
    (root / "open").chmod(0o777)
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o1777)
    for parts in ("ada", "ada/deep", "open"):
        assert "so nothing is written there as root" in write(root, parts=parts)
    assert write(root, parts="sticky") == ""


def test_a_user_whom_one_may_not_become_gets_nothing(root: Path) -> None:
    me = ADA if IS_ROOT else os.getuid()
    assert "cannot switch to uid" in write(root, uid=me + 1, prefix=as_user(me) if IS_ROOT else ())


@pytest.mark.parametrize("size", [len(TRACE) + 10, len(TRACE) - 10])
def test_no_more_is_read_than_there_was_at_first_and_no_half_trace_is_left(
    root: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = root.parent / "stored", os.open(root, os.O_PATH)
    source.write_bytes(TRACE)
    check = trace_writer._check_replaceable

    def changing(at: int, name: str) -> None:
        check(at, name)
        os.truncate(source, size)  # between the first look and the copy

    monkeypatch.setattr(trace_writer, "_check_replaceable", changing)
    with source.open("rb") as stored:
        if size < len(TRACE):
            with pytest.raises(trace_writer.WriteRefused, match="shrank while it was being read"):
                trace_writer.written(stored.fileno(), folder, "t.json", 1 << 20)
            assert list(root.iterdir()) == []
        else:
            trace_writer.written(stored.fileno(), folder, "t.json", 1 << 20)
            assert (root / "t.json").read_bytes() == TRACE
    os.close(folder)


def test_what_is_too_long_or_is_no_trace_is_not_written(root: Path) -> None:
    source, folder = root.parent / "other", os.open(root, os.O_PATH)
    for content, limit, why in (
        (b"#!/bin/sh", 99, "is not a trace"),
        (TRACE, 9, "bytes, but at most 9 are allowed"),
    ):
        source.write_bytes(content)
        with source.open("rb") as stored, pytest.raises(trace_writer.WriteRefused, match=why):
            trace_writer.written(stored.fileno(), folder, "t.json", limit)
    assert list(root.iterdir()) == []
    os.close(folder)


@only_root
def test_who_has_become_the_user_has_no_capability_left(root: Path) -> None:
    code = (
        "import re; from kinetod.trace_writing.trace_writer import become; become(61001)\n"
        "print(*re.findall(r'^Cap(?!Bnd)...:\\t(.*)$', open('/proc/self/status').read(), re.M))\n"
        "import os\ntry: os.setuid(61002)\nexcept PermissionError: print('stays')"
    )
    prefix = attach_service.unprivileged(64990, "setuid", "setgid", "dac_read_search")
    done = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *sets, stays = done.stdout.split()
    assert stays == "stays"
    assert {int(each, 16) for each in sets} == {0}


def mounted(root: Path, options: str) -> list[str]:
    """Prefix of a command for which a file system with these options is mounted there."""
    script = f'mount -t tmpfs -o {options} none {root} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


@only_root
def test_of_a_root_that_is_read_only_it_is_said_which_line_the_unit_needs(root: Path) -> None:
    said = write(root, uid=ADA, prefix=mounted(root, "ro,mode=777"))
    assert said == (
        f"{root} is read-only for kinetod.service; if others can write to it, add the line ReadWritePaths={root} below "
        "[Service] (`systemctl edit kinetod.service`), then `systemctl restart kinetod.service`"
    )


@only_root
def test_of_a_full_disk_it_is_said_and_no_half_trace_is_left(root: Path) -> None:
    script = (
        f"mount -t tmpfs -o size=4k,mode=777 none {root} && head -c 4096 /dev/zero > {root}/full && "
        f'"$@" && ls -A {root} >&2'
    )
    said = write(root, uid=ADA, prefix=["unshare", "--mount", "sh", "-c", script, "sh"])
    assert said == "t_7.json: No space left on device"
    assert not (root / "full").exists()  # it was on that disk


@pytest.mark.parametrize(
    ("root", "line"), [("/home/none/x", "ProtectHome=no"), ("/tmp/none-such/x", "PrivateTmp=no"), ("/srv/none", "")]
)
def test_of_a_root_that_a_unit_may_hide_it_is_said_how_to_show_it(root: str, line: str) -> None:
    with pytest.raises(trace_writer.WriteRefused) as caught:
        trace_writer.opened_root(root, "kinetod-writer.service")
    assert str(caught.value).startswith(f"{root}: No such file or directory")
    assert (f"add the line {line} below [Service]" in str(caught.value)) == bool(line)
