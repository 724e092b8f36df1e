import pytest
from kineto_protos import endpoints


@pytest.mark.parametrize("text", ["unix:/run/kineto/kinetod.sock", "localhost:7654", "[::1]:7654", "dns:///gpu-7:80"])
def test_an_address_is_a_socket_or_host_and_port(text: str) -> None:
    assert endpoints.parse_address(text) == text


@pytest.mark.parametrize("text", ["gpu-7", "/run/kinetod.sock", "unix:", "http://gpu-7:80", "gpu-7:port"])
def test_another_text_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="expected unix:/path/to/socket or host:port"):
        endpoints.parse_address(text)
