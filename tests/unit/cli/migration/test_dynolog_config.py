"""The file: whole, taken by kinetod, never over another one unless told."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from kinetoctl.errors import NotMigrated, NotWritten
from kinetoctl.migration.dynolog_config import check_text, config_text, write_text
from kinetoctl.migration.dynolog_settings import migrated
from kinetoctl.migration.flag_text import GivenFlag
from support.service.daemon import IMPORT_PATH

TAKES = (sys.executable, "-c", "")
REFUSES = (sys.executable, "-c", "import sys; sys.exit(f'kinetod: {sys.argv[1]} line 3: dynolog.rpc: no')")


@pytest.fixture(autouse=True)
def _kinetod_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)


def text_of(**flags: str) -> str:
    given = [GivenFlag(name=name, value=value, where="flags line 1") for name, value in flags.items()]
    return config_text(migrated(given, {}, {"User": "dyno"}), [Path("/etc/dynolog.gflags")])


def test_each_setting_stands_below_the_flags_that_decide_it() -> None:
    text = text_of(enable_ipc_monitor="true", use_otlp="true", use_JSON="true")
    body = text[text.index("[dynolog]") :]
    assert "# --enable_ipc_monitor=true (flags line 1): same\nipc = true\n" in body
    assert 'allows other addresses\nrpc = "loopback"\n\n[metrics]\n# --use_JSON=true (flags line 1): same;' in body
    assert "# Without a setting here:\n# --use_otlp=true (flags line 1): no counterpart; nothing is pushed;" in body
    assert "# User=dyno (the unit): no counterpart;" in body
    assert "# Made of: /etc/dynolog.gflags\n" in text


def test_who_names_folders_for_traces_is_told_what_enables_the_writer() -> None:
    told = " ".join(text_of(enable_ipc_monitor="true").replace("\n# ", " ").split())
    assert "`roots` of /etc/kinetod/writer.toml and in ReadWritePaths=" in told
    assert "`systemctl enable --now kinetod-writer.socket`" in told


def test_nothing_that_was_given_can_end_a_comment() -> None:
    text = text_of(otlp_endpoint='x\n[access]\nlocal_roles = ["admin"]', use_otlp="1")
    assert not [line for line in text.splitlines() if line.startswith(("[access]", "local_roles"))]


def test_kinetod_takes_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETOD_METRICS_LISTEN", "nonsense")  # of a shell: it must not count
    path = tmp_path / "config.toml"
    flags = {"use_prometheus": "1", "prometheus_address": "0.0.0.0", "use_JSON": "1", "enable_gpu_monitor": "1"}
    more = {"filter_nic_interfaces": "1", "enable_pod_resources_attribution": "1", "enable_ipc_monitor": "1"}
    write_text(text_of(**flags, **more, port="1779"), path, replace=False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert 'rpc = "127.0.0.1:1779"' in path.read_text()


def test_what_kinetod_does_not_take_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    with pytest.raises(NotMigrated, match=r"kinetod does not take the configuration:\n.*metrics\.listten"):
        write_text("[metrics]\nlistten = 1\n", path, replace=False)
    with pytest.raises(NotMigrated, match=r"configuration line 3: dynolog\.rpc: no"):
        check_text("", REFUSES)
    with pytest.raises(NotMigrated, match="kinetod cannot be asked"):
        check_text("", ("/nonexistent/kinetod",))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_stays_unless_it_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("mine")
    with pytest.raises(NotWritten, match=f"{path} exists already; --replace writes over it"):
        write_text("yours", path, replace=False, command=TAKES)
    assert path.read_text() == "mine"
    write_text("yours", path, replace=True, command=TAKES)
    assert path.read_text() == "yours"
    assert list(tmp_path.iterdir()) == [path]


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("mine")
    link.symlink_to(target)
    os.mkfifo(pipe)
    for path in (link, pipe, Path("/dev/null"), Path("/dev/stdout")):
        with pytest.raises(NotWritten, match=f"{path} is no regular file, and stays"):
            write_text("yours", path, replace=True, command=TAKES)
    assert (target.read_text(), link.is_symlink(), pipe.is_fifo()) == ("mine", True, True)


def test_a_disk_without_second_names_is_written_to_and_nothing_there_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(_source: Path, _target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "config.toml"
    write_text("yours", path, replace=False, command=TAKES)
    assert path.read_text() == "yours"
    path.unlink()
    takes_it = (sys.executable, "-c", f"open({str(path)!r}, 'w').write('mine')")
    with pytest.raises(NotWritten, match="exists already"):
        write_text("yours", path, replace=False, command=takes_it)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_utf8_whatever_the_locale_is(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    script = (
        "from pathlib import Path; from kinetoctl.migration.dynolog_config import write_text; "
        f"write_text('# \\xe9\\n', Path({str(path)!r}), replace=False)"
    )
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": IMPORT_PATH}
    subprocess.run([sys.executable, "-c", script], env=environ, check=True)
    assert path.read_bytes() == b"# \xc3\xa9\n"


def test_a_name_that_is_taken_during_the_check_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    takes_it = (sys.executable, "-c", f"open({str(path)!r}, 'w').write('mine')")
    with pytest.raises(NotWritten, match="exists already"):
        write_text("yours", path, replace=False, command=takes_it)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotWritten, match=f"cannot write {tmp_path}/none/config.toml: No such file"):
        write_text("", tmp_path / "none/config.toml", replace=False, command=TAKES)
