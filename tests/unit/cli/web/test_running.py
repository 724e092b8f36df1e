"""Where the page listens."""

import socket
from contextlib import suppress

import pytest
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.errors import Refused
from kinetoctl.web.running import WebOptions, running_web
from support.service.daemon import free_address
from support.waiting import until
from support.web.browsing import Browser, browsing

SETTINGS = CommonOptions(address="unix:/nowhere", output="table", color=False, quiet=True, timeout_s=1)


@pytest.fixture
def ipv6_port() -> int:
    """One that is free on both addresses."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs the IPv6 loopback address")

    def found() -> int | None:
        port = int(free_address().rpartition(":")[2])
        with suppress(OSError), socket.create_server(("::1", port), family=socket.AF_INET6):
            return port
        return None

    return until(found, "a port is free on both addresses")


def test_nobody_else_can_listen_where_the_browser_looks_for_the_ui(ipv6_port: int) -> None:
    with browsing() as browser, pytest.raises(OSError, match="in use"):
        socket.create_server(("::1", browser.web.pages.port), family=socket.AF_INET6)


def test_a_port_that_somebody_has_on_ipv6_is_refused(ipv6_port: int) -> None:
    taken = socket.create_server(("::1", ipv6_port), family=socket.AF_INET6)
    refused = pytest.raises(Refused, match=f"port {ipv6_port} on ::1 cannot be used")
    with taken, refused, running_web(WebOptions(port=ipv6_port), SETTINGS):
        pass


def test_the_ui_is_served_on_the_port_of_the_pages_over_both_addresses(ipv6_port: int) -> None:
    with browsing() as browser:
        port = browser.web.pages.port
        request = f"GET /nothing HTTP/1.0\r\nHost: localhost:{port}\r\n\r\n".encode()
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, port)) as sock:
                sock.sendall(request)
                assert b"the UI has no such file" in sock.makefile("rb").read()


def test_the_pages_are_at_one_host_only() -> None:
    with browsing() as browser:
        assert Browser(browser.web).ask("/enter").status == 200
        assert Browser(browser.web).ask("/enter", Host=f"localhost:{browser.web.pages.port}").status == 404
