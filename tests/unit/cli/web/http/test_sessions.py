"""Tokens work once, sessions end."""

from kinetoctl.web.http.sessions import LIFETIME_S, MAX_HISTORY, MAX_SESSIONS, Sessions, WebSession


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
