import pytest
from kinetod.base.http_headers import headers_in


def test_headers_are_read_by_name_and_comments_left_out() -> None:
    content = b"# for the collector\nAuthorization: Basic YTpi\n\nX-Scope-OrgID:team\n"
    assert headers_in(content) == {"authorization": "Basic YTpi", "x-scope-orgid": "team"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"no header", "line 1 is not of the form `Name: value`"),
        (b"a: b\nb c: d", "line 2 is not of the form `Name: value`"),
        (b"a: \x01", "line 1 is not"),
        (b"\xff: x", "non-ASCII"),
        (b"Content-Type: text/plain", "sets content-type, which kinetod sets itself"),
        (b"".join(b"h%d: x\n" % number for number in range(40)), "has 40 headers; at most 32"),
    ],
)
def test_what_is_no_header_is_told_by_line_and_never_shown(content: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        headers_in(content)
    assert "\x01" not in str(caught.value)
