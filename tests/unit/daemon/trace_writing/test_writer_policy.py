"""Who may ask the writer, as whom and where it writes: never more than its own file says."""

import os
import re
from pathlib import Path, PurePath

import pytest
from kinetod.base.policy_file import PolicyError
from kinetod.trace_writing import writer_policy
from kinetod.trace_writing.writer_policy import WriterPolicy

EXAMPLE = Path(__file__).parents[4] / "deploy/config/writer.toml"
USERS = {"kineto": 990, "ada": 1000, "root": 0}


def loaded(tmp_path: Path, text: str) -> WriterPolicy:
    path = tmp_path / "writer.toml"
    path.write_text(text)
    path.chmod(0o644)
    return writer_policy.load(path, uid_of=USERS.__getitem__)


def test_by_default_nothing_is_written_anywhere(tmp_path: Path) -> None:
    found = loaded(tmp_path, "")
    assert found.refuses_caller(990) == "" == found.refuses_caller(0)
    assert "uid 1000 may not ask" in found.refuses_caller(1000)
    assert found.root_of(PurePath("/tmp")) is None
    assert found.max_bytes == 4 << 30


def test_the_file_that_is_installed_says_the_defaults(tmp_path: Path) -> None:
    text = re.sub(r"^#(?=\w+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert len(re.findall(r"^\w+ = ", text, re.MULTILINE)) == 5
    assert loaded(tmp_path, text) == loaded(tmp_path, EXAMPLE.read_text())


@pytest.mark.parametrize(
    ("users", "uid", "allowed"),
    [
        ('["1000-60000"]', 1000, True),
        ('["1000-60000"]', 999, False),
        ('["*"]', 999, True),
        ('["*"]', 0, False),
        ('["root"]', 0, True),
        ('["*"]', 990, False),
        ('["*"]', 1005, False),
    ],
)
def test_root_must_be_named_and_callers_are_never_written_as(
    tmp_path: Path, users: str, uid: int, allowed: bool
) -> None:
    found = loaded(tmp_path, f"users = {users}\ndenied_users = [1005]\n")
    assert (found.refuses_user(uid) == "") == (allowed and uid != os.geteuid())


def test_a_folder_belongs_to_a_root_by_whole_names(tmp_path: Path) -> None:
    found = loaded(tmp_path, 'roots = ["/scratch/traces"]')
    assert found.root_of(PurePath("/scratch/traces/a/b")) == found.root_of(PurePath("/scratch/traces"))
    for other in ("/scratch", "/scratch/traces2", "/scratch/traces/../x", "scratch/traces", "/"):
        assert found.root_of(PurePath(other)) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('roots = ["traces"]', "roots: must be absolute paths without"),
        ('roots = ["/a/../b"]', "roots: must be absolute paths without"),
        ('max_file = "much"', "max_file: expected a size"),
        ("more = 1", "more"),
        ('callers = ["*"]', "callers: must name individual users"),
        ('users = ["eve"]', "there is no user 'eve'"),
    ],
)
def test_a_mistake_refuses_everything_and_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        loaded(tmp_path, text)
