import os
from pathlib import Path

import pytest
from kinetod.access.connections.certificates import LOOK_PERIOD_S, Certificates, TlsFiles
from kinetod.base.errors import StartError
from support.peers.certificates import Authority, write_server_files


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 2 * LOOK_PERIOD_S
        return self.now


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> TlsFiles:
    write_server_files(tmp_path, authority.issue(dns="localhost"), authority.certificate)
    return TlsFiles(
        certificate=tmp_path / "server.pem", key=tmp_path / "server.key", client_ca=tmp_path / "clients.pem"
    )


def test_files_that_stay_are_read_once(files: TlsFiles) -> None:
    certificates = Certificates(files, Clock())
    assert not certificates.look()
    assert certificates.credentials() is not None


def test_new_files_are_taken(files: TlsFiles, authority: Authority, tmp_path: Path) -> None:
    certificates = Certificates(files, Clock())
    write_server_files(tmp_path, authority.issue(dns="localhost"), authority.certificate)
    assert certificates.look()
    assert not certificates.look()


def test_files_are_looked_at_once_a_second_at_most(files: TlsFiles, authority: Authority, tmp_path: Path) -> None:
    certificates = Certificates(files, lambda: 0.0)
    write_server_files(tmp_path, authority.issue(dns="localhost"), authority.certificate)
    assert not certificates.look()


def test_half_of_a_renewal_is_not_taken_until_the_other_half_is_there(
    files: TlsFiles, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    os.utime(files.certificate, (0, 0))  # else it may be as old as the new one, by the clock of a file system
    certificates = Certificates(files, Clock())
    new = authority.issue(dns="localhost")
    files.certificate.write_bytes(new.certificate)
    assert not certificates.look()
    assert "the new TLS files are rejected, the previous ones stay in use" in caplog.text
    files.key.write_bytes(new.key)
    assert certificates.look()


@pytest.mark.parametrize("name", ["certificate", "key", "client_ca"])
@pytest.mark.parametrize("content", [None, b"", b"no PEM", b"\xff\xfe"])
def test_files_that_are_none_stop_the_start_and_change_nothing_later(
    files: TlsFiles, name: str, content: bytes | None
) -> None:
    certificates = Certificates(files, Clock())
    path: Path = getattr(files, name)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert not certificates.look()
    with pytest.raises(StartError, match="TLS cannot be set up"):
        Certificates(files, Clock())


def test_a_key_of_another_certificate_is_named(files: TlsFiles, authority: Authority) -> None:
    files.key.write_bytes(authority.issue(dns="localhost").key)
    with pytest.raises(StartError, match="are not a certificate and its key"):
        Certificates(files)
