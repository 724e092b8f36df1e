"""What requests are refused for, and what browsers are told."""

import pytest
from kinetoctl.web.http.security import Origins, check, page_policy, ui_policy
from kinetoctl.web.http.web_messages import WebError, WebRequest

OWN = "http://127.0.0.1:4000"
ORIGINS = Origins(OWN, "http://127.0.0.1:4001")


def request(method: str = "GET", **headers: str) -> WebRequest:
    return WebRequest(
        method=method,
        path="/",
        headers={"host": "127.0.0.1:4000"} | {k.replace("_", "-"): v for k, v in headers.items()},
    )


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:4000", "localhost:4000", "127.0.0.1", "127.0.0.1:4001", ""]
)
def test_a_request_for_another_host_is_refused(host: str) -> None:
    with pytest.raises(WebError) as refused:
        check(request(host=host), OWN)
    assert refused.value.status == 421


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "null"},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:4001"},
        {"origin": OWN, "sec_fetch_site": "cross-site"},
        {"origin": OWN, "sec_fetch_site": "same-site"},
    ],
)
def test_a_form_of_another_site_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(WebError) as refused:
        check(request("POST", **headers), OWN)
    assert refused.value.status == 403


def test_a_form_of_our_own_is_taken() -> None:
    for headers in ({"origin": OWN}, {"origin": OWN, "sec_fetch_site": "same-origin"}):
        assert check(request("POST", **headers), OWN) is None  # type: ignore[func-returns-value]


def test_the_policy_of_pages_allows_own_files_only() -> None:
    assert page_policy(ORIGINS) == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "frame-src http://127.0.0.1:4001; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def test_the_policy_of_the_ui_names_no_other_place() -> None:
    assert "http" not in ui_policy(ORIGINS).replace(OWN, "")
    assert "frame-ancestors http://127.0.0.1:4000" in ui_policy(ORIGINS)
