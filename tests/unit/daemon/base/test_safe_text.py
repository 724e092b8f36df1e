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
        ("Authorization: AWS4-HMAC-SHA256 Credential=AKIA", "AKIA"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, secret: str) -> None:
    assert "(hidden)" in redacted(text) and secret not in redacted(text)


def test_a_long_text_is_cut() -> None:
    assert len(redacted("x" * 10_000)) == 500
