"""Callers from other hosts: a real daemon with certificates."""

import contextlib
import datetime
import os
import shutil
import socket
import ssl
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import ScriptedAgent
from support.peers.certificates import DAY, Authority, Pair, write_server_files
from support.service.calls_as import OK, Answer, call
from support.service.cli import run_here
from support.service.daemon import Daemon, DaemonFailed, free_address, running_daemon
from support.waiting import scaled, until

pytestmark = pytest.mark.slow

ROOT_URI = "spiffe://cluster/root"
SETTINGS = f"""
[access]
tls_certificate = "server.pem"
tls_key = "server.key"
tls_client_ca = "clients.pem"
[access.certificates]
"URI:{ROOT_URI}" = "own as root"
"DNS:dashboard.cluster" = "viewer"
"CN:operator" = "admin"
"CN:gone" = "own as no-such-user"
"""


@dataclass(frozen=True)
class Remote:
    """A daemon that is called with TLS, and its authority."""

    daemon: Daemon
    address: str
    folder: Path
    authority: Authority

    def call(self, client: Pair | None, name: str = "GetHost", authority: Authority | None = None) -> Answer:
        """A call over a new connection; by an authority of its own if it does not trust the daemon's."""
        with (authority or self.authority).channel(self.address, client) as channel:
            return call(channel, name, getattr(pb, f"{name}Request")())


def handshake(remote: Remote, version: ssl.TLSVersion, ciphers: str) -> tuple[str, str, int]:
    """The cipher agreed upon with a client that knows one version of TLS. Raises SSLError, ConnectionError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the old versions
        context.minimum_version = context.maximum_version = version
    context.set_ciphers(ciphers)
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=remote.authority.certificate.decode())
    client = remote.authority.issue("operator")
    pem = remote.folder / "client.pem"
    pem.write_bytes(client.certificate + client.key)
    context.load_cert_chain(pem)
    host, _, port = remote.address.rpartition(":")
    plain = socket.create_connection((host, int(port)), timeout=scaled(20))
    with context.wrap_socket(plain, server_hostname="localhost") as secure:
        secure.recv(1)  # TLS 1.3 tells what is wrong with a client after the client's handshake
        cipher = secure.cipher()
        assert cipher is not None
        return cipher


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    folder, authority = tmp_path_factory.mktemp("tls"), Authority()
    write_server_files(folder, authority.issue(dns="localhost"), authority.certificate)
    config = folder / "config.toml"
    config.write_text(SETTINGS.replace('= "server', f'= "{folder}/server').replace('"clients', f'"{folder}/clients'))
    address = free_address()
    with running_daemon("--config", str(config), "--listen", address) as daemon:
        yield Remote(daemon, address, folder, authority)


def test_a_certificate_stands_for_a_user(remote: Remote) -> None:
    client = remote.authority.issue("whoever", uri=ROOT_URI)
    with ScriptedAgent(remote.daemon.agent_socket) as agent:
        agent.hello()
        (process,) = remote.call(client, "ListProcesses").only.processes
    assert process.pid == os.getpid()


def test_the_unix_socket_needs_no_certificate(remote: Remote) -> None:
    assert remote.daemon.stub().GetHost(pb.GetHostRequest(), timeout=scaled(10)).hostname


@pytest.mark.parametrize(
    ("names", "traces"),
    [({"dns": "dashboard.cluster"}, "ROLE_NEEDED"), ({"common_name": "operator"}, "INVALID_FIELD")],
)
def test_certificates_without_a_user_see_everything(remote: Remote, names: dict[str, str], traces: str) -> None:
    client = remote.authority.issue(**names)  # type: ignore[arg-type]
    assert remote.call(client, "ListCaptures").code == OK
    assert remote.call(client, "CreateCapture").reason == traces


@pytest.mark.parametrize("names", [{"dns": "mallory.cluster"}, {"ip": "10.0.0.1"}, {"registered_id": "1.2.3.4"}])
def test_a_common_name_gives_nothing_where_the_authority_vouches_for_other_names(
    remote: Remote, names: dict[str, str]
) -> None:
    answer = remote.call(remote.authority.issue("operator", **names))  # type: ignore[arg-type]
    assert (answer.code, answer.reason) == ("PERMISSION_DENIED", "UNKNOWN_CERTIFICATE")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_old_versions_of_tls_are_not_spoken(remote: Remote, version: ssl.TLSVersion) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        handshake(remote, version, "ALL:@SECLEVEL=0")


@pytest.mark.parametrize(
    "ciphers",
    ["NULL", "aNULL", "RC4", "3DES", "CAMELLIA", "kRSA", "DHE", "ECDHE+AES+SHA1", "ECDHE+AES+SHA256:!AESGCM:!AESCCM"],
)
def test_ciphers_without_forward_secrecy_or_authenticated_encryption_are_not_taken(
    remote: Remote, ciphers: str
) -> None:
    try:
        chosen = handshake(remote, ssl.TLSVersion.TLSv1_2, f"{ciphers}:@SECLEVEL=0")
    except ssl.SSLError:
        return
    raise AssertionError(f"the daemon agreed to {chosen}")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_1_3_are_spoken(remote: Remote, version: ssl.TLSVersion) -> None:
    name, spoken, bits = handshake(remote, version, "ALL")
    assert ("GCM" in name or "CHACHA20" in name) and spoken == version.name.replace("_", ".") and bits >= 128


@pytest.mark.parametrize("names", [{"common_name": "mallory"}, {"dns": "operator"}, {"uri": "spiffe://cluster/x"}])
def test_a_certificate_that_stands_for_nobody_is_told_so(remote: Remote, names: dict[str, str]) -> None:
    answer = remote.call(remote.authority.issue(**names))  # type: ignore[arg-type]
    assert (answer.code, answer.reason) == ("PERMISSION_DENIED", "UNKNOWN_CERTIFICATE")
    assert next(iter(names.values())) in answer.message


def test_a_certificate_of_a_user_whom_this_host_does_not_have_is_told_so(remote: Remote) -> None:
    answer = remote.call(remote.authority.issue("gone"))
    assert answer.reason == "UNKNOWN_CERTIFICATE"
    assert "this host has no such user" in answer.message


def expired(authority: Authority) -> Pair:
    return authority.issue("operator", lasts=-DAY)


def of_a_stranger(_authority: Authority) -> Pair:
    return Authority().issue("operator")


def none(_authority: Authority) -> None:
    return None


@pytest.mark.parametrize("make", [expired, of_a_stranger, none])
def test_without_a_valid_certificate_there_is_no_connection(remote: Remote, make: object) -> None:
    assert callable(make)
    answer = remote.call(make(remote.authority))
    assert (answer.code, answer.reason) == ("UNAVAILABLE", "")


def test_what_is_no_tls_gets_nothing(remote: Remote) -> None:
    host, _, port = remote.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=scaled(20)) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        heard = b""
        with contextlib.suppress(ConnectionError):
            while data := plain.recv(4096):
                heard += data
    assert b"HTTP" not in heard and len(heard) < 100, heard  # a TLS alert at most


def test_new_certificates_are_taken_while_the_daemon_runs(remote: Remote) -> None:
    new = Authority("the next one")
    client = new.issue("operator")
    assert remote.call(client, authority=new).code == "UNAVAILABLE"
    write_server_files(remote.folder, new.issue(dns="localhost"), new.certificate)
    until(lambda: remote.call(client, authority=new).code == OK, "the new certificates are in use")
    assert remote.call(remote.authority.issue("operator")).code == "UNAVAILABLE"
    old = remote.authority
    write_server_files(remote.folder, old.issue(dns="localhost"), old.certificate)
    until(lambda: remote.call(old.issue("operator")).code == OK, "the old ones are in use again")


class ImpatientDaemon(Daemon):
    """Its connections last for a moment instead of an hour."""

    def command(self) -> list[str]:
        """The same command line, with another constant."""
        start = (
            "import sys; from kinetod.rpc import grpc_server as server; from kinetod.__main__ import main;"
            "server._OPTIONS = tuple((name, 200 if '_age_' in name else value) for name, value in server._OPTIONS);"
            "sys.exit(main())"
        )
        return [*super().command()[:1], "-c", start, *super().command()[3:]]


def test_an_open_connection_counts_no_longer_than_its_age_once_the_authority_is_withdrawn(
    tmp_path: Path,
) -> None:
    authority, address = Authority(), free_address()
    write_server_files(tmp_path, authority.issue(dns="localhost"), authority.certificate)
    config = tmp_path / "config.toml"
    config.write_text(
        SETTINGS.replace('= "server', f'= "{tmp_path}/server').replace('"clients', f'"{tmp_path}/clients')
    )
    root = Path(tempfile.mkdtemp(prefix="kinetod-"))
    daemon = ImpatientDaemon(root, ("--config", str(config), "--listen", address))
    daemon.start()
    try:
        with authority.channel(address, authority.issue("operator")) as channel:
            # A connection may be over before its first call is answered.
            until(lambda: call(channel, "GetHost", pb.GetHostRequest()).code == OK, "a call is answered")
            write_server_files(tmp_path, authority.issue(dns="localhost"), Authority("another").certificate)
            until(
                lambda: call(channel, "GetHost", pb.GetHostRequest()).code == "UNAVAILABLE",
                "the open connection ends, and there is no new one",
            )
    finally:
        daemon.stop()
        shutil.rmtree(root)


def test_a_renewed_certificate_of_a_client_counts_with_the_next_connection(remote: Remote) -> None:
    with remote.authority.channel(remote.address, remote.authority.issue("operator")) as open_channel:
        assert call(open_channel, "GetHost", pb.GetHostRequest()).code == OK
        assert remote.call(remote.authority.issue("operator", lasts=-DAY)).code == "UNAVAILABLE"
        assert remote.call(remote.authority.issue("operator", lasts=2 * DAY)).code == OK
        assert call(open_channel, "GetHost", pb.GetHostRequest()).code == OK


def test_kinetoctl_calls_with_certificates_from_its_variables(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = remote.authority.issue("operator", lasts=datetime.timedelta(hours=1))
    for name, data in (("ca", remote.authority.certificate), ("cert", client.certificate), ("key", client.key)):
        (tmp_path / name).write_bytes(data)
        monkeypatch.setenv(f"KINETO_TLS_{name.upper()}", str(tmp_path / name))
    monkeypatch.setenv("KINETO_TLS_NAME", "localhost")
    assert str(remote.daemon.state_dir) in run_here(capsys, remote.address, "host", "-o", "json").stdout
    monkeypatch.delenv("KINETO_TLS_KEY")
    refused = run_here(capsys, remote.address, "host")
    assert refused.code == 2
    assert "requires certificates: set KINETO_TLS_KEY to PEM files" in refused.stderr
    monkeypatch.setenv("KINETO_TLS_KEY", str(tmp_path / "none"))
    assert "KINETO_TLS_KEY: " in run_here(capsys, remote.address, "host").stderr


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('tls_certificate = "{0}/server.pem"', "access.tls_key: is missing; TLS needs access.tls_certificate, "),
        ('certificates = {{ada = "viewer"}}', "access.certificates.ada: is not a valid certificate name"),
        ('certificates = {{"CN:ada" = "own"}}', "the roles own and jobs need a user of this host"),
        ("", "0.0.0.0:50051 is not a loopback address and needs certificates"),
        ("loopback_without_tls = true", "0.0.0.0:50051 is not a loopback address and needs certificates"),
        ('tls_certificate = "{0}/server.pem"\ntls_key = "{0}/clients.pem"\ntls_client_ca = "{0}/clients.pem"',
         "clients.pem are not a certificate and its matching key"),
    ],
)  # fmt: skip
def test_settings_that_would_leave_a_door_open_stop_the_start(
    remote: Remote, tmp_path: Path, lines: str, problem: str
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[access]\n" + lines.format(remote.folder))
    with (
        pytest.raises(DaemonFailed) as caught,
        running_daemon("--config", str(config), "--listen", "0.0.0.0:50051"),
    ):
        pass
    assert problem in str(caught.value)
