"""What a kernel without some parts costs: it is said, and `required` refuses it."""

from pathlib import Path

import pytest
from kinetod.attach.attach_types import Status
from kinetod.captures.result import decode_pool
from kinetod.host_checks.daemon_checks import sandbox_findings
from kinetod.sandbox import confinement, landlock, seccomp_filter
from kinetod.sandbox.confinement import CannotConfine, Limits, Support, support

WHOLE = Support(landlock=7, seccomp=True)
LIMITS = Limits(memory_bytes=1 << 30, cpu_s=60, required=True)


def test_a_whole_sandbox_lacks_nothing() -> None:
    assert WHOLE.missing == ()
    assert WHOLE.present == "Landlock ABI 7 (files, TCP, signals), a seccomp filter, resource limits"
    assert Support(landlock=1, seccomp=True).present == "Landlock ABI 1 (files), a seccomp filter, resource limits"


def test_what_is_missing_is_told_with_its_cost() -> None:
    assert Support(landlock=0, seccomp=False).missing == (
        "without Landlock, a compromised decoder could read all files of the daemon's user",
        "without seccomp filters, a compromised decoder could open connections and send signals",
    )


@pytest.mark.parametrize(
    ("found", "status", "says"),
    [
        (WHOLE, Status.OK, "decoders are confined by Landlock ABI 7"),
        (Support(landlock=0, seccomp=True), Status.NOTE, "decoders are not fully confined: without Landlock"),
    ],
)
def test_the_doctor_says_it(found: Support, status: Status, says: str) -> None:
    (finding,) = sandbox_findings(found)
    assert (finding.name, finding.status) == ("sandbox", status)
    assert finding.detail.startswith(says)


def test_this_kernel_is_asked_without_raising() -> None:
    assert 0 <= support().landlock < 100


@pytest.mark.parametrize("part", ["Landlock", "seccomp"])
def test_a_required_part_that_is_missing_is_an_error(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("die_first_for_memory", "drop_capabilities"):
        monkeypatch.setattr(confinement, name, lambda: None)
    monkeypatch.setattr(confinement, "_set_limits", lambda own, limits: None)
    monkeypatch.setattr(confinement, "prctl", lambda option, value: None)
    monkeypatch.setattr(landlock, "abi", lambda: 0 if part == "Landlock" else 1)
    monkeypatch.setattr(landlock, "restrict", lambda rules, version: None)
    monkeypatch.setattr(seccomp_filter, "available", lambda: part != "seccomp")
    monkeypatch.setattr(seccomp_filter, "install", lambda: None)
    with pytest.raises(CannotConfine, match=f'{part}.*captures.decode_sandbox is "required"'):
        confinement.confine(tmp_path, LIMITS)
    confinement.confine(tmp_path, Limits(memory_bytes=1, cpu_s=1))  # not required: what is there


def test_a_folder_may_be_tried_twice_whoever_asks(tmp_path: Path) -> None:
    folder = tmp_path / "12-34"
    assert [decode_pool.begin_try(folder) for _ in range(3)] == [True, True, False]
    decode_pool.take_back_try(folder)
    assert [decode_pool.begin_try(folder), decode_pool.begin_try(folder)] == [True, False]
    decode_pool.forget_tries(folder)
    assert decode_pool.begin_try(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["12-34.tries"]


def test_a_count_that_is_a_link_or_nonsense_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.tries").symlink_to("/etc/passwd")
    (tmp_path / "b.tries").write_bytes(b"\xff" * 9)
    assert decode_pool.begin_try(tmp_path / "a") and decode_pool.begin_try(tmp_path / "b")
    assert not (tmp_path / "a.tries").is_symlink()
