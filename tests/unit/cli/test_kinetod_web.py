"""What `kinetod-web` refuses to start with."""

import pytest
from click.testing import CliRunner
from kinetoctl.kinetod_web import command

TLS = ["--tls-certificate", "c", "--tls-key", "k", "--tls-client-ca", "a"]
ORIGIN = ["--origin", "https://web.example"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (ORIGIN, "--listen, --socket"),
        (["--socket", "/x"], "--origin"),
        ([*ORIGIN, "--listen", "127.0.0.1:8443"], "no TCP without TLS"),
        ([*ORIGIN, "--listen", "127.0.0.1:8443", *TLS[:4]], "--tls-client-ca"),
        (["--origin", "http://web.example", "--listen", "127.0.0.1:8443", *TLS], "must begin with https://"),
        ([*ORIGIN, "--socket", "/x"], "--proxy-user"),
        ([*ORIGIN, "--socket", "/x", "--proxy-user", "no-such-user"], "no user"),
        ([*ORIGIN, "--socket", "/x", "--proxy-user", "65534"], "cannot name"),
        ([*ORIGIN, "--ui-origin", "https://web.example", "--socket", "/x", "--proxy-user", "0"], "must differ"),
        (["--origin", "https://web.example/", "--socket", "/x"], "expected https://name"),
        (["--origin", "https://Web.example", "--socket", "/x"], "lower case"),
        (["--origin", "https://web.example:443", "--socket", "/x"], "leave out port"),
        ([*ORIGIN, "--socket", "/x", "--user-header", "a b"], "name of a header"),
    ],
)
def test_doors_that_are_not_closed_to_others_are_not_opened(arguments: list[str], why: str) -> None:
    found = CliRunner().invoke(command, arguments)
    assert found.exit_code == 2
    assert why in found.output
