"""What `kinetod-web` refuses to start with."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kinetoctl import kinetod_web
from kinetoctl.kinetod_web import command

TLS = ["--tls-certificate", "c", "--tls-key", "k", "--tls-client-ca", "a"]
ORIGIN = ["--origin", "https://web.example"]
BEHIND = [*ORIGIN, "--socket", "/x", "--proxy-user", "0"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (ORIGIN, "--listen, --socket"),
        (["--socket", "/x"], "--origin"),
        ([*ORIGIN, "--listen", "127.0.0.1:8443"], "TCP is served only with TLS"),
        ([*ORIGIN, "--listen", "127.0.0.1:8443", *TLS[:4]], "--tls-client-ca"),
        (["--origin", "http://web.example", "--listen", "127.0.0.1:8443", *TLS], "must begin with https://"),
        ([*ORIGIN, "--socket", "/x"], "--proxy-user"),
        ([*ORIGIN, "--socket", "/x", "--proxy-user", "no-such-user"], "no user"),
        ([*ORIGIN, "--socket", "/x", "--proxy-user", "65534"], "cannot map"),
        ([*ORIGIN, "--socket", "/x", "--proxy-user", "\u0667"], "no user"),
        ([*ORIGIN, "--listen", "127.0.0.1", *TLS], "expected host:port"),
        ([*ORIGIN, "--listen", "127.0.0.1:65535", *TLS], "expected host:port"),
        ([*ORIGIN, "--ui-origin", "https://web.example", "--socket", "/x", "--proxy-user", "0"], "must differ"),
        (["--origin", "https://web.example/", "--socket", "/x"], "expected https://name"),
        (["--origin", "ftp://web.example", "--socket", "/x"], "expected https://name"),
        (["--origin", "https://:8443", "--socket", "/x"], "expected https://name"),
        (["--origin", "https://ada@web.example", "--socket", "/x"], "without a user, got"),
        (["--origin", "https://Web.example", "--socket", "/x"], "lower-case"),
        (["--origin", "https://web.example:443", "--socket", "/x"], "leave out port"),
        ([*ORIGIN, "--socket", "/x", "--user-header", "a b"], "expected a header name"),
        ([*BEHIND, "--address", "unix:/d", "--hosts", "a,b"], "--address and --hosts cannot be combined"),
        ([*BEHIND, "--hosts", "a,b", "--service", "name:1"], "--hosts and --service cannot be combined"),
        ([*BEHIND, "--hosts", "/nowhere/hosts"], "no file '/nowhere/hosts'"),
        ([*BEHIND, "--hosts", "a,b c"], "expected a host name"),
        ([*BEHIND, "--service", "name"], "expected name:port"),
        ([*BEHIND, "--service", "name:0"], "expected name:port"),
        ([*BEHIND, "--service", "name:65536"], "expected name:port"),
    ],
)
def test_doors_that_are_not_closed_to_others_are_not_opened(arguments: list[str], why: str) -> None:
    found = CliRunner().invoke(command, arguments)
    assert found.exit_code == 2
    assert why in found.output


def test_without_its_http_library_it_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h11", None)
    found = CliRunner().invoke(command, BEHIND)
    assert (
        str(found.exception)
        == f"kinetod-web needs h11, which is not installed: run {sys.executable} -m pip install h11"
    )


def test_ports_are_those_that_there_are_and_the_next_one_is_the_uis() -> None:
    assert kinetod_web._parse_listen("[::1]:65534") == ("::1", 65534)
    assert kinetod_web._parse_service("kinetod.example:65535") == ("kinetod.example", 65535)


@pytest.mark.parametrize(
    ("variables", "address", "hosts"),
    [
        ({}, "unix:/run/kineto/kinetod.sock", []),
        ({"KINETOD_WEB_ADDRESS": "gpu-1:7"}, "gpu-1:7", []),
        ({"KINETOD_WEB_HOSTS": "gpu-1,gpu-2:7 @{file}"}, None, ["gpu-1:50051", "gpu-2:7", "gpu-3:50051"]),
    ],
)
def test_where_is_asked(
    variables: dict[str, str], address: str | None, hosts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hosts"
    file.write_text("gpu-3\n")
    served: list[Any] = []

    @contextmanager
    def serve(*given: Any) -> Iterator[None]:
        served.extend(given)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("kinetoctl.web.shared.serving.running_shared", serve)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    environ = {name: value.format(file=file) for name, value in variables.items()}
    CliRunner().invoke(command, BEHIND, env=environ, standalone_mode=False)
    options, settings = served
    assert address in (None, settings.address)
    assert [place.address for place in options.hosts.find()] == hosts if hosts else options.hosts is None
