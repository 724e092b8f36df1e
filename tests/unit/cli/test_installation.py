"""Installing into another root, as for an image. Needs root for the owners of files."""

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from kinetoctl import installation
from kinetoctl.__main__ import main
from kinetoctl.errors import NotInstalled
from kinetoctl.installation import Host, Owned

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="no systemd (apt-get install systemd)"),
]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root with the programs and nothing else."""
    programs = tmp_path / "opt/kinetod/bin"
    programs.mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    for name in installation.PROGRAMS:
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def host(image: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    def run(command: str, *options: str, programs: str = "/opt/kinetod/bin") -> subprocess.CompletedProcess[str]:
        given = ["--programs", programs] if command == "install" else []
        arguments = ["host", command, "--root", str(image), *given, *options]
        return subprocess.CompletedProcess(arguments, main(arguments), *capfd.readouterr())

    return run


def tree(root: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Owner, group, mode and content of everything."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = bytes(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode), content)
    return found


def test_everything_is_laid_down_with_its_owner(image: Path, host: Run) -> None:
    done = host("install")
    assert done.returncode == 0, done.stderr
    found = tree(image)
    kineto = Host(image).number("passwd", "kineto")
    numbers = {Host(image).number("passwd", name) for name in installation.USERS}
    assert kineto and len(numbers) == len(installation.USERS) and not numbers & {None, 0}
    for name in installation.UNITS:
        assert found[f"etc/systemd/system/{name}"][:3] == (0, 0, 0o644)
    for name in installation.POLICIES:
        assert found[f"etc/kinetod/{name}"][:3] == (0, 0, 0o644)
    assert found["etc/kinetod/config.toml"][:3] == (0, Host(image).number("group", "kineto"), 0o640)
    assert found["etc/credstore"][:3] == (0, 0, 0o700)
    assert found["var/lib/kineto"][:3] == (kineto, kineto, 0o700)
    assert "etc/systemd/system/multi-user.target.wants/kinetod.service" in found
    assert "etc/systemd/system/sockets.target.wants/kinetod-attach.socket" in found
    assert not [name for name in found if "wants/kinetod-writer" in name]


def test_a_dry_run_says_the_same_and_changes_nothing(image: Path, host: Run) -> None:
    before = tree(image)
    dry = host("install", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert tree(image) == before
    real = host("install")
    assert dry.stdout.replace("would ", "") == real.stdout


@pytest.mark.parametrize("umask", [0, 0o077])
def test_folders_on_the_way_are_root_s_to_write_and_everybodys_to_read(image: Path, host: Run, umask: int) -> None:
    before = os.umask(umask)
    try:
        done = host("install")
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    folders = ("etc/systemd", "etc/systemd/system", "etc/sysusers.d", "var", "var/lib")
    assert {stat.S_IMODE((image / folder).stat().st_mode) for folder in folders} == {0o755}


def test_a_second_installation_has_nothing_to_do(image: Path, host: Run) -> None:
    host("install")
    before = tree(image)
    done = host("install")
    assert done.stdout == "nothing to do: kinetod is installed and up to date\n"
    assert tree(image) == before


def test_an_upgrade_keeps_the_configuration_and_replaces_the_units(image: Path, host: Run) -> None:
    host("install")
    config, unit = image / "etc/kinetod/config.toml", image / "etc/systemd/system/kinetod.service"
    config.write_text("[captures]\nmax_captures = 3\n")
    new = unit.read_text()
    unit.write_text("[Unit]\nDescription=an older one\n")
    done = host("install")
    assert done.stdout == "replace /etc/systemd/system/kinetod.service (root:root 0644)\n"
    assert config.read_text() == "[captures]\nmax_captures = 3\n"
    assert unit.read_text() == new


def test_wrong_owners_and_modes_are_mended(image: Path, host: Run) -> None:
    host("install")
    policy = image / "etc/kinetod/attach.toml"
    policy.chmod(0o600)
    os.chown(image / "var/lib/kineto", 12345, 12345)
    done = host("install")
    assert "set owner and mode of /etc/kinetod/attach.toml to root:root 0644" in done.stdout
    assert "set owner and mode of /var/lib/kineto/ to kineto:kineto 0700" in done.stdout
    assert stat.S_IMODE(policy.stat().st_mode) == 0o644


def passwd(image: Path, *lines: str) -> None:
    (image / "etc/passwd").write_text("".join(f"{line}\n" for line in ("root:x:0:0::/root:/bin/sh", *lines)))


@pytest.mark.parametrize("name", installation.CONFIGURATION)
@pytest.mark.parametrize(("owner", "mode"), [(12345, 0o644), (0, 0o666), (0, 0o664)])
def test_a_configuration_that_others_could_have_written_is_not_taken_over(
    image: Path, host: Run, name: str, owner: int, mode: int
) -> None:
    (image / "etc/kinetod").mkdir()
    path = image / "etc/kinetod" / name
    path.write_text('callers = ["*"]\n')
    path.chmod(mode)
    os.chown(path, owner, owner)
    before = tree(image)
    done = host("install")
    assert done.returncode == 5 and f"/etc/kinetod/{name} " in done.stderr and "check its contents" in done.stderr
    assert tree(image) == before


def test_nor_is_one_that_a_link_of_another_user_leads_to(image: Path, host: Run) -> None:
    (image / "etc/kinetod").mkdir()
    (image / "etc/kinetod/attach.toml").symlink_to("/etc/hostname")
    os.chown(image / "etc/kinetod/attach.toml", 12345, 12345, follow_symlinks=False)
    assert "belongs to uid 12345" in host("install").stderr


@pytest.mark.parametrize("folder", ["etc/kinetod", "etc/credstore", "var/lib/kineto"])
def test_a_folder_of_another_user_is_not_taken_over(image: Path, host: Run, folder: str) -> None:
    passwd(image, "mallory:x:12345:12345::/home/mallory:/bin/sh")
    (image / folder).mkdir(parents=True)
    os.chown(image / folder, 12345, 12345)
    done = host("install")
    assert done.returncode == 5 and f"/{folder} belongs to mallory (uid 12345)" in done.stderr
    assert (image / folder).stat().st_uid == 12345


@pytest.mark.parametrize(
    "lines",
    [
        ["kineto:x:1000:1000:Ki Neto:/home/kineto:/bin/bash"],
        ["kineto-attach:x:1000:1000::/home/ka:"],
        ["kineto:x:0:0::/:/usr/sbin/nologin"],
        ["kineto:x:990:990::/:/usr/sbin/nologin", "kineto-attach:x:990:990::/:/usr/sbin/nologin"],
        ["daemon:x:1:1::/:/usr/sbin/nologin", "kineto:x:1:1::/:/usr/sbin/nologin"],
    ],
)
def test_an_account_that_is_somebodys_does_not_become_kinetods_and_no_purge_removes_it(
    image: Path, host: Run, lines: list[str]
) -> None:
    passwd(image, *lines)
    before = tree(image)
    done = host("install")
    assert done.returncode == 5 and "kinetod needs this user for itself" in done.stderr
    assert tree(image) == before
    if len(lines) == 1:  # else they are system users
        assert host("uninstall", "--purge").returncode == 0
        assert lines[0] in (image / "etc/passwd").read_text()


def test_users_that_an_administrator_has_made_before_are_taken(image: Path, host: Run) -> None:
    passwd(image, "kineto:x:990:990::/:/bin/sh", "kineto-attach:x:5991:5991::/:/usr/sbin/nologin")
    (image / "etc/group").write_text("root:x:0:\nkineto:x:990:\nkineto-attach:x:5991:\n")
    assert host("install").returncode == 0
    assert (image / "var/lib/kineto").stat().st_uid == 990


@pytest.mark.parametrize("folder", ["etc/systemd/system", "etc/kinetod", "var/lib"])
def test_a_link_in_an_image_leads_nothing_out_of_it(image: Path, host: Run, folder: str, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-host"
    outside.mkdir()
    (image / folder).parent.mkdir(parents=True, exist_ok=True)
    (image / folder).symlink_to(outside)
    done = host("install")
    assert done.returncode == 5, done.stdout
    assert list(outside.iterdir()) == [] and outside.stat().st_mode & 0o777 == 0o755


def test_giving_a_file_to_somebody_follows_no_link_that_is_put_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "roots").write_text("x")
    (tmp_path / "roots").chmod(0o600)
    (tmp_path / "config.toml").symlink_to(tmp_path / "roots")
    with pytest.raises(OSError, match="symbolic links"):
        Owned(mode=0o666).apply(Host(), tmp_path / "config.toml")
    assert stat.S_IMODE((tmp_path / "roots").stat().st_mode) == 0o600


def test_an_interrupted_installation_is_finished_by_the_next(image: Path, host: Run) -> None:
    (image / "etc/kinetod").mkdir(parents=True)
    (image / "etc/kinetod/config.toml").mkdir()  # in the way
    first = host("install")
    assert first.returncode == 5
    assert "/etc/kinetod/config.toml" in first.stderr
    (image / "etc/kinetod/config.toml").rmdir()
    assert host("install").returncode == 0
    assert host("install").stdout.startswith("nothing to do")


def test_uninstalling_leaves_captures_and_configuration(image: Path, host: Run) -> None:
    host("install")
    (image / "var/lib/kineto/captures").mkdir()
    done = host("uninstall")
    assert done.returncode == 0, done.stderr
    assert "kept: /var/lib/kineto/" in done.stderr
    left = tree(image)
    assert "var/lib/kineto/captures" in left and "etc/kinetod/config.toml" in left
    assert not [name for name in left if re.search(r"kinetod[\w-]*\.(service|socket)$|s.d/kinetod.conf", name)]
    assert host("uninstall").stdout == "nothing to do: kinetod is not installed\n"


def test_a_purge_leaves_nothing_but_the_programs(image: Path, host: Run) -> None:
    host("install")
    (image / "var/lib/kineto/captures").mkdir()
    done = host("uninstall", "--purge")
    assert done.returncode == 0, done.stderr
    left = tree(image)
    assert "var/lib/kineto" not in left and "etc/kinetod" not in left
    assert Host(image).number("passwd", "kineto") is None
    assert "opt/kinetod/bin/kinetod" in left


def test_a_purge_does_not_follow_a_link_to_another_disk(image: Path, host: Run) -> None:
    host("install")
    other = image / "data"
    other.mkdir()
    (other / "precious").write_text("x")
    (image / "var/lib/kineto").rmdir()
    (image / "var/lib/kineto").symlink_to(other)
    assert host("uninstall", "--purge").returncode == 0
    assert (other / "precious").read_text() == "x"


def test_a_package_packs_the_files_and_sets_up_the_rest(image: Path, host: Run) -> None:
    assert host("install", "--for-package", "files").returncode == 0
    assert set(tree(image / "usr")) >= {f"lib/systemd/system/{name}" for name in installation.UNITS}
    assert not list((image / "etc").iterdir())
    done = host("install", "--for-package", "setup")
    assert done.returncode == 0, done.stderr
    assert (image / "etc/kinetod/config.toml").is_file()
    assert "kinetod was installed on this host by a package" in host("install").stderr
    assert host("uninstall", "--for-package", "setup").returncode == 0
    assert (image / "usr/lib/systemd/system/kinetod.service").exists()  # the package manager's to remove


def test_units_name_the_programs_of_this_installation(image: Path, host: Run) -> None:
    shutil.copytree(image / "opt/kinetod", image / "srv/tools/kinetod")
    assert host("install", programs="/srv/tools/kinetod/bin").returncode == 0
    text = (image / "etc/systemd/system/kinetod-attach.service").read_text()
    assert "\nExecStart=/srv/tools/kinetod/bin/kinetod-attach\n" in text
    assert "/opt/kinetod" not in text


@pytest.mark.parametrize(
    ("programs", "code", "why"),
    [
        ("/nowhere", 5, "program /nowhere/kinetod not found"),
        ("bin", 2, "not an absolute path"),
    ],
)
def test_programs_that_are_not_there_are_refused(host: Run, programs: str, code: int, why: str) -> None:
    done = host("install", programs=programs)
    assert (done.returncode, why in done.stderr) == (code, True), done.stderr


def test_programs_that_others_could_replace_are_refused(image: Path) -> None:
    programs = image / "opt/kinetod/bin"  # below /tmp
    (programs / "python3").symlink_to("/bin/true")
    programs.chmod(0o777)
    with pytest.raises(NotInstalled, match="users other than root can write to"):
        installation.check_programs(Host(), programs)


def test_programs_without_their_interpreter_are_refused(image: Path) -> None:
    programs = image / "opt/kinetod/bin"
    with pytest.raises(NotInstalled, match=f"program {programs}/python3 not found"):
        installation.check_programs(Host(), programs)


def test_every_unit_and_configuration_file_is_installed() -> None:
    packed = {f"systemd/{name}" for name in (*installation.UNITS, "sysusers.d.conf", "tmpfiles.d.conf")}
    packed |= {f"config/{name}" for name in installation.CONFIGURATION}
    deploy = Path(__file__).parents[3] / "deploy"
    there = {str(path.relative_to(deploy)) for part in ("systemd", "config") for path in (deploy / part).iterdir()}
    assert there == packed


def test_both_packages_have_every_unit_and_remove_every_user() -> None:
    packages = Path(__file__).parents[3] / "deploy/packages"
    listed = re.findall(r"^/usr/lib/systemd/system/(\S+)$", (packages / "kinetod.spec.in").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(installation.UNITS)
    assert f"{' | '.join(installation.USERS)}) ;;" in (packages / "postrm").read_text()
