import pytest
from kinetod.config.addresses import checked_webhook, parse_listen


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/kineto/kinetod.sock", "unix:/run/kineto/kinetod.sock"),
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("localhost:50051", "localhost:50051"),
        ("[::1]:50051", "[::1]:50051"),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert str(parse_listen(text)) == address


@pytest.mark.parametrize("text", ["", "localhost", "localhost:", "localhost:http", "localhost:99999", ":1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected unix:/path or host:port"):
        parse_listen(text)


def test_a_socket_path_must_be_absolute_and_fit() -> None:
    with pytest.raises(ValueError, match=r"expected an absolute socket path, got 'a\.sock'"):
        parse_listen("unix:a.sock")
    with pytest.raises(ValueError, match="is longer than 107 bytes"):
        parse_listen("unix:/" + "x" * 107)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("http://ci/hook", "would leave this host unencrypted"),
        ("ftp://ci/hook", "expected https://host/path"),
        ("https:///hook", "expected https://host/path"),
        ("https://user:pw@ci/hook", "contains a user or password"),
        ("https://ci/hook#x", "has a fragment"),
        ("https://ci:99999/", "[Pp]ort"),
        ("https://ci/a b", "expected https://host/path"),
    ],
)
def test_other_addresses_of_webhooks_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        checked_webhook(text)
