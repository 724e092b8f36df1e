"""What requests are refused for, and what browsers are told."""

import pytest
from kinetoctl.web.http.web_messages import (
    LIFETIME_S,
    MAX_HISTORY,
    MAX_SESSIONS,
    Origins,
    Sessions,
    WebError,
    WebRequest,
    WebSession,
    check_request,
    page_policy,
    ui_policy,
)

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
        check_request(request(host=host), OWN)
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
        check_request(request("POST", **headers), OWN)
    assert refused.value.status == 403


def test_a_form_of_our_own_is_taken() -> None:
    for headers in ({"origin": OWN}, {"origin": OWN, "sec_fetch_site": "same-origin"}):
        assert check_request(request("POST", **headers), OWN) is None  # type: ignore[func-returns-value]


def test_the_policy_of_pages_allows_own_files_only() -> None:
    assert page_policy(ORIGINS) == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "frame-src http://127.0.0.1:4001; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def test_without_the_ui_pages_frame_nothing() -> None:
    assert "frame-src 'none'; " in page_policy(ORIGINS._replace(ui=""))


def test_the_policy_of_the_ui_names_no_other_place() -> None:
    assert "http" not in ui_policy(ORIGINS).replace(OWN, "")
    assert "frame-ancestors http://127.0.0.1:4000" in ui_policy(ORIGINS)


def test_a_token_works_once() -> None:
    sessions = Sessions()
    token = sessions.token
    assert sessions.enter(token) is not None
    assert sessions.enter(token) is None
    assert sessions.token != token


def test_a_wrong_token_opens_nothing_and_the_right_one_stays() -> None:
    sessions = Sessions()
    assert [sessions.enter(guess) for guess in ("", "x", sessions.token[:-1], "\u00e9")] == [None] * 4
    assert sessions.enter(sessions.token) is not None


def test_a_session_ends() -> None:
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    key = sessions.enter(sessions.token)
    assert key and sessions.find(key)
    now[0] = LIFETIME_S
    assert sessions.find(key) is None


def test_of_too_many_sessions_the_oldest_ends() -> None:
    sessions = Sessions()
    keys = [sessions.enter(sessions.token) for _ in range(MAX_SESSIONS + 1)]
    assert [sessions.find(key or "") is not None for key in keys] == [False] + [True] * MAX_SESSIONS


def test_a_form_belongs_to_one_session() -> None:
    first, second = WebSession("a", 1.0), WebSession("b", 1.0)
    assert (first.owns("a"), first.owns(second.form_secret), first.owns("")) == (True, False, False)


def test_the_history_has_each_query_once_and_is_bounded() -> None:
    session = WebSession("", 1.0)
    for number in [*range(MAX_HISTORY + 5), 20]:
        session.remember(f"SELECT {number}")
    assert len(session.history) == MAX_HISTORY
    assert session.history[:2] == ["SELECT 20", f"SELECT {MAX_HISTORY + 4}"]
