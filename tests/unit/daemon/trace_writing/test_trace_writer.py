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
from support.dynolog.door import open_folder
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


@pytest.mark.parametrize("content", [b"#!/bin/sh\n", b'{"a": 1}', b"\x1f\x8bnothing", gzip.compress(b"text")])
def test_what_is_no_trace_stays(root: Path, content: bytes) -> None:
    (root / "t_7.json").write_bytes(content)
    assert "it exists and is not a trace" in write(root)
    assert (root / "t_7.json").read_bytes() == content


def test_a_link_is_not_followed_where_the_file_should_be(root: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(TRACE + b"more")
    (root / "t_7.json").symlink_to(tmp_path / "other")
    assert "it exists and is not a trace that may be replaced" in write(root)
    assert (tmp_path / "other").read_bytes() == TRACE + b"more"
    os.mkfifo(root / "pipe")
    assert "not a regular file" in write(root, "pipe")


def test_a_link_is_not_followed_on_the_way(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / "a").symlink_to(tmp_path / "elsewhere")
    assert write(root, parts="a") == f"{root}/a is not a folder, or a symbolic link; write its real path"
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
    assert write(root, uid=ADA, parts="closed", files=False).endswith(f"is not writable for uid {ADA}")
    assert write(root, uid=ADA) == f"{root} is not writable for uid {ADA}"
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
        assert "so nothing is written there with root's rights" in write(root, parts=parts)
    assert write(root, parts="sticky") == ""


def test_a_user_whom_one_may_not_become_gets_nothing(root: Path) -> None:
    me = ADA if IS_ROOT else os.getuid()
    assert "cannot become uid" in write(root, uid=me + 1, prefix=as_user(me) if IS_ROOT else ())
