import re

import pytest
from kineto_protos import endpoints


@pytest.mark.parametrize("text", ["unix:/run/kineto/kinetod.sock", "localhost:7654", "[::1]:7654", "dns:///gpu-7:80"])
def test_an_address_is_a_socket_or_host_and_port(text: str) -> None:
    assert endpoints.parse_address(text) == text


@pytest.mark.parametrize("text", ["gpu-7", "/run/kinetod.sock", "unix:", "http://gpu-7:80", "gpu-7:port"])
def test_another_text_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="expected unix:/path/to/socket or host:port"):
        endpoints.parse_address(text)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("gpu-7.example", "the port is missing: use gpu-7.example:50051, unless its daemon has another port"),
        ("/run/kinetod.sock", "for a socket, use unix:/run/kinetod.sock"),
    ],
)
def test_a_host_without_a_port_or_a_bare_path_is_answered_with_the_address_to_write(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(repr(text))}; {re.escape(remedy)}$"):
        endpoints.parse_address(text)
