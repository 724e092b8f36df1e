import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from kinetod.access.connections.certificates import LOOK_PERIOD_S, MAX_FILE_BYTES, Certificates, TlsFiles
from kinetod.base.errors import StartError
from support.peers.certificates import DAY, Authority, Pair, write_server_files


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
    assert certificates.credentials(of_clients=True) is not None


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
    assert "the new TLS files were rejected; the previous ones stay in use" in caplog.text
    files.key.write_bytes(new.key)
    assert certificates.look()


@pytest.mark.parametrize("name", ["certificate", "key", "client_ca"])
def test_a_file_that_is_being_written_is_never_in_force(files: TlsFiles, authority: Authority, name: str) -> None:
    first = authority.certificate.strip()
    files.client_ca.write_bytes(first + b"\n" + Authority("another").certificate)
    certificates, path = Certificates(files, Clock()), getattr(files, name)
    whole = path.read_bytes()
    for length in range(0, len(whole.strip()), 29):
        if whole[:length].strip() != first:  # of several authorities, those that are whole count
            path.write_bytes(whole[:length])
            assert not certificates.look(), length
    path.write_bytes(whole)
    assert not certificates.look()
    assert getattr(certificates._pem, name) == whole


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
    with pytest.raises(StartError, match="are not a certificate and its matching key"):
        Certificates(files)


def test_a_key_with_a_passphrase_and_a_huge_file_are_named(files: TlsFiles) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    lock = serialization.BestAvailableEncryption(b"secret")
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files.key.write_bytes(key.private_bytes(pem, form, lock))
    with pytest.raises(StartError, match="the key is protected by a passphrase"):
        Certificates(files)
    files.key.write_bytes(b"-" * (MAX_FILE_BYTES + 1))
    with pytest.raises(StartError, match=f"is longer than {MAX_FILE_BYTES} bytes"):
        Certificates(files)


def test_a_hundred_renewals_leave_no_descriptor(files: TlsFiles, authority: Authority, tmp_path: Path) -> None:
    certificates = Certificates(files, Clock())
    before = len(list(Path("/proc/self/fd").iterdir()))
    pairs = [authority.issue(dns="localhost") for _ in range(2)]
    for number in range(100):
        write_server_files(tmp_path, pairs[number % 2], authority.certificate)
        assert certificates.look()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_every_port_of_grpc_gets_a_renewal_and_none_keeps_a_withdrawn_authority(
    files: TlsFiles, authority: Authority, tmp_path: Path
) -> None:
    certificates = Certificates(files, Clock())
    server = grpc.server(ThreadPoolExecutor(1))
    ports = [
        server.add_secure_port("localhost:0", certificates.credentials(of_clients=of_clients))
        for of_clients in (True, False)
    ]
    server.start()
    try:
        assert all(_lets_in(port, authority, authority.issue("user")) for port in ports)
        new = Authority("the next one")
        write_server_files(tmp_path, new.issue(dns="localhost"), new.certificate)
        for port in reversed(ports):
            assert _lets_in(port, new, new.issue("user"))
            assert not _lets_in(port, authority, authority.issue("user"))
    finally:
        server.stop(None).wait()


def _lets_in(port: int, authority: Authority, client: Pair) -> bool:
    with authority.channel(f"localhost:{port}", client) as channel:
        try:
            channel.unary_unary("/none/none", bytes, bytes)(b"", timeout=30)
        except grpc.RpcError as exc:
            return exc.code() is grpc.StatusCode.UNIMPLEMENTED
    return False


def test_a_renewal_that_has_expired_is_not_taken(
    files: TlsFiles, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(files, Clock())
    write_server_files(tmp_path, authority.issue(dns="localhost", lasts=-DAY), authority.certificate)
    assert not certificates.look()
    assert not certificates.look()  # it is said once
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        f"clients would refuse {files.certificate}: certificate has expired"
    ]
    write_server_files(tmp_path, authority.issue(dns="localhost"), authority.certificate)
    assert certificates.look()


def test_a_certificate_that_has_expired_at_the_start_is_told(
    files: TlsFiles, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_server_files(tmp_path, authority.issue(dns="localhost", lasts=-DAY), authority.certificate)
    Certificates(files)
    assert f"clients will refuse {files.certificate}: certificate has expired" in caplog.text
