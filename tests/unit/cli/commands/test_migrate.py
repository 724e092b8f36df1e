"""`kinetoctl migrate dynolog`: what is read, what is written, what is said."""

from pathlib import Path

import pytest
import tomllib
from kinetoctl.commands import migrate
from support.service.cli import Run, run_here
from support.service.daemon import IMPORT_PATH

UNIT = """\
[Unit]
Description=a monitoring daemon

[Service]
ExecStartPre=/usr/bin/touch {flags}
ExecStart=/usr/local/bin/dynolog --flagfile={flags} --port 1779
CPUQuota=100%
Restart=always
"""
FLAGS = "--enable_ipc_monitor\n--use_prometheus\n--use_otlp\n--otlp_headers=Authorization=Bearer s3cret\n--unheard=of\n"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)  # of kinetod, which checks
    monkeypatch.setattr(migrate, "FLAG_FILE", tmp_path / "etc/dynolog.gflags")
    monkeypatch.setattr(migrate, "find_unit", lambda _name: None)
    return lambda *arguments: run_here(capsys, "unix:/nonexistent", *arguments)


@pytest.fixture
def flags(tmp_path: Path) -> Path:
    path = tmp_path / "dynolog.gflags"
    path.write_text(FLAGS)
    return path


@pytest.fixture
def unit(tmp_path: Path, flags: Path) -> Path:
    path = tmp_path / "dynolog.service"
    path.write_text(UNIT.format(flags=flags))
    drop_in = tmp_path / "dynolog.service.d/10-socket.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nEnvironment=KINETO_IPC_SOCKET_DIR=/run/dynolog\n")
    return path


WANTED = {
    "dynolog": {"ipc": True, "socket_dirs": ["/run/dynolog"], "rpc": "127.0.0.1:1779"},
    "metrics": {"listen": "127.0.0.1:8080", "compat": "dynolog", "host_interval": "60s"},
}


def test_a_unit_its_drop_ins_and_its_flag_file_become_a_configuration_on_stdout(run: Run, unit: Path) -> None:
    result = run("migrate", "dynolog", "--unit", str(unit))
    assert result.code == 0
    assert tomllib.loads(result.stdout) == WANTED
    assert result.stderr == "note: 1 approximated, 3 without a counterpart, 1 unknown; see the notes for why\n"
    assert "s3cret" not in result.stdout
    assert f"--unheard ({unit.parent}/dynolog.gflags line 5): unknown;" in result.stdout.replace("\n# ", " ")


def test_what_is_written_is_told_in_a_table(run: Run, unit: Path, tmp_path: Path) -> None:
    path = tmp_path / "kinetod.toml"
    result = run("migrate", "dynolog", "--unit", str(unit), "--output", str(path))
    assert result.code == 0
    assert tomllib.loads(path.read_text()) == WANTED
    rows = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert rows == [
        "FLAG", "--enable_ipc_monitor=true", "--use_prometheus=true", "--use_otlp=true", "--otlp_headers=(not shown)",
        "--port=1779", "--unheard", "KINETO_IPC_SOCKET_DIR", "CPUQuota=100%",
    ]  # fmt: skip
    assert f"{path}: kinetod accepts it." in result.stderr
    again = run("migrate", "dynolog", "--unit", str(unit), "--output", str(path))
    assert (again.code, again.stdout) == (5, "")
    assert "already exists; use --replace to overwrite it" in again.stderr
    assert run("migrate", "dynolog", "--unit", str(unit), "--output", str(path), "--replace").code == 0


def test_json_has_settings_and_report(run: Run, flags: Path) -> None:
    result = run("-o", "json", "migrate", "dynolog", "--flags", str(flags), "-q")
    document = result.json()
    assert document["files"] == [str(flags)]
    assert document["settings"]["dynolog.ipc"] is True
    assert document["report"][0] == {
        "flag": "--enable_ipc_monitor=true",
        "outcome": "same",
        "settings": ["dynolog.ipc"],
        "note": "",
        "where": f"{flags} line 1",
    }
    assert result.stderr == ""


def test_a_copy_of_the_flag_file_stands_for_the_one_that_the_unit_names(run: Run, unit: Path, tmp_path: Path) -> None:
    unit.write_text(UNIT.format(flags="/etc/of-another-host.gflags"))
    copy = tmp_path / "copy"
    copy.write_text("--port=1780\n--use_JSON\n")
    alone = run("migrate", "dynolog", "--unit", str(unit))
    assert (alone.code, alone.stdout) == (5, "")
    assert "cannot read /etc/of-another-host.gflags: No such file" in alone.stderr
    found = tomllib.loads(run("migrate", "dynolog", "--unit", str(unit), "--flags", str(copy)).stdout)
    assert found["dynolog"]["rpc"] == "127.0.0.1:1779"  # the command line counts last
    assert found["metrics"]["json_log"] == "log"


def test_a_unit_that_names_no_flag_file_gets_the_named_one_too(run: Run, unit: Path, flags: Path) -> None:
    unit.write_text("[Service]\nExecStart=/usr/local/bin/dynolog --port=1780\n")
    found = tomllib.loads(run("migrate", "dynolog", "--unit", str(unit), "--flags", str(flags)).stdout)
    assert (found["dynolog"]["ipc"], found["dynolog"]["rpc"]) == (True, "127.0.0.1:1780")


def test_without_options_it_is_this_hosts(run: Run, unit: Path, flags: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = run("migrate", "dynolog")
    assert nothing.code == 5
    assert "this host has neither dynolog.service nor" in nothing.stderr
    migrate.FLAG_FILE.parent.mkdir()
    migrate.FLAG_FILE.write_text("--port=1781\n")
    assert tomllib.loads(run("migrate", "dynolog").stdout)["dynolog"]["rpc"] == "127.0.0.1:1781"
    monkeypatch.setattr(migrate, "find_unit", lambda _name: unit)
    assert tomllib.loads(run("migrate", "dynolog").stdout) == WANTED


def test_what_kinetod_would_not_take_ends_with_its_words(run: Run, flags: Path, tmp_path: Path) -> None:
    flags.write_text("--enable_pod_resources_attribution\n--pod_resources_socket=relative.sock\n")
    path = tmp_path / "kinetod.toml"
    result = run("migrate", "dynolog", "--flags", str(flags), "--output", str(path))
    assert result.code == 5
    assert "kinetod does not accept the configuration" in result.stderr
    assert "kubernetes.kubelet_socket: expected an absolute socket path, got 'relative.sock'" in result.stderr
    assert not path.exists()


def test_the_name_of_a_format_is_no_file(
    run: Run, flags: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("migrate", "dynolog", "--flags", str(flags), "-o", "json")
    assert result.code == 2
    assert "use `kinetoctl -o json migrate dynolog` to choose the format" in " ".join(result.stderr.split())
    assert not Path("json").exists()


def test_replace_needs_a_file(run: Run, flags: Path) -> None:
    result = run("migrate", "dynolog", "--flags", str(flags), "--replace")
    assert result.code == 2
    assert "--replace needs --output" in result.stderr
