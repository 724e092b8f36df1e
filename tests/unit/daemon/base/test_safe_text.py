"""What of texts from outside is shown."""

import pytest
from kinetod.base.safe_text import redacted


def test_secrets_are_hidden_and_the_text_is_one_line() -> None:
    assert redacted("bad wJalrXUtnFEMI\n here", {"wJalrXUtnFEMI"}) == "bad (hidden) here"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("https://u:pw@host/x", "u:pw"),
        ("https://h/x?X-Amz-Signature=abc123&a=1", "abc123"),
        ("AccountName=n;AccountKey=Zm9v==;x", "Zm9v"),
        ("{'key': 'AKIA', 'client_kwargs': {}}", "AKIA"),
        ('{"aws_secret_access_key": "wJalr/x"}', "wJalr/x"),
        ("Authorization: AWS4-HMAC-SHA256 Credential=AKIA", "AKIA"),
        ("https://u:p@ss@host/x", "ss"),
        ("https://s.example/b/o?X-Goog-Credential=me%40x&X-Goog-Signature=abc123", "abc123"),
        ("https://c.example/o?Expires=1&Signature=abc~123__&Key-Pair-Id=K", "abc~123__"),
        ("https://s.example/o?AWSAccessKeyId=AKIA77&Expires=1", "AKIA77"),
        ("302: Location: https://other.example/?next=https%3A%2F%2Fx%2F%3Fsig%3Dabc123", "abc123"),
        ("grant_type=refresh&client_secret=abc123&refresh_token=def456", "abc123"),
        ("grant_type=refresh&client_secret=abc123&refresh_token=def456", "def456"),
        ("Endpoint=sb://x;SharedAccessKeyName=n;SharedAccessKey=Zm9v==;y", "Zm9v"),
        ("aws_secret_access_key = abc123", "abc123"),
        ('{"id": 1, "client_secret": "abc123"}', "abc123"),
        ("X-Api-Key: abc123 was refused", "abc123"),
        ("X-Vault-Token: abc123", "abc123"),
        ("{'Private-Token': 'abc123'}", "abc123"),
        ("Set-Cookie: session=abc123; Secure", "abc123"),
        ("token xoxb-123456-abcdefgh is none", "abcdefgh"),
        ("bad ghp_0123456789abcdefgh", "abcdefgh"),
        ("remote: glpat-0123456789abcdefgh", "abcdefgh"),
        ("invalid eyJhbGciOiJIUzI1NiJ9.abcdefgh.ijkl", "abcdefgh"),
        ("POST https://hooks.slack.com/services/T0/B0/abc123: 404", "abc123"),
        ("redis://u:pa/abc123@host failed", "abc123"),
        ("login failed with password: abc123", "abc123"),
        ("usage: push --auth-token abc123 FILE", "abc123"),
        ("GET https://f.example/api?code=abc123&x=1: 403", "abc123"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEabc123\nabc\n-----END RSA PRIVATE KEY-----", "abc123"),
        ("407 Proxy Authentication Required: Proxy-Authorization: Basic dTpwYXNz", "dTpwYXNz"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, secret: str) -> None:
    assert "(hidden)" in redacted(text) and secret not in redacted(text)


@pytest.mark.parametrize(
    "spelled",
    [
        "wJalr%2Fx%2B",
        "wJalr%2fx%2b",
        "wJalr/x%2B",
        "wJalr\\/x+",
        "wJalr\\u002fx\\u002B",
        "wJalr&#x2F;x&#43;",
        "wjalr/x+",
    ],
)
def test_a_secret_is_hidden_as_urls_json_and_xml_write_it(spelled: str) -> None:
    assert redacted(f"GET /?k={spelled} refused", iter(["wJalr/x+"])) == "GET /?k=(hidden) refused"


@pytest.mark.parametrize(
    "text",
    [
        "signed=1 token ring",
        "cookies: 3",
        "the api-key is wrong",
        "design=flat",
        "the key=value form",
        "http://host/a@b",
        "http://host:80/a@b",
        "secret:",
        "trace --keep-key",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_a_long_text_is_cut() -> None:
    assert len(redacted("x" * 10_000)) == 500
