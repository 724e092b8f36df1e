"""Who may use the server: a token that works once becomes a session, whose key only the browser's cookie has.

The cookie is HttpOnly and SameSite=Strict. Cookies do not tell ports apart, so that another server on 127.0.0.1 may see
it; a session therefore is no more than one of two checks: `socket_owner` is the other one. Each session has a secret of
its own that every form must repeat.
"""

import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

LIFETIME_S = 12 * 3600
MAX_SESSIONS = 16  # of one user's browsers; the oldest one ends
MAX_HISTORY = 50
COOKIE = "kinetoctl_web"


@dataclass(slots=True)
class WebSession:
    """One browser. history: its SQL queries, the last one first."""

    form_secret: str
    ends_s: float
    history: list[str] = field(default_factory=list)

    def remember(self, sql: str) -> None:
        """Puts a query first in the history, where it stands once."""
        self.history[:] = [sql, *(other for other in self.history if other != sql)][:MAX_HISTORY]

    def owns(self, form_secret: str) -> bool:
        """Whether a form was made for this session."""
        return hmac.compare_digest(self.form_secret.encode(), form_secret.encode())


def new_session(ends_s: float) -> WebSession:
    """A session with a secret of its own."""
    return WebSession(secrets.token_urlsafe(32), ends_s)


class Sessions:
    """The token for the next browser, and the sessions. Thread-safe. clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._token = secrets.token_urlsafe(32)
        self._sessions: dict[str, WebSession] = {}

    @property
    def token(self) -> str:
        """The token that opens the next session."""
        return self._token

    def enter(self, token: str) -> str | None:
        """Opens a session and makes the next token. Returns the session's key, or None for a wrong or used token."""
        with self._lock:
            if not hmac.compare_digest(self._token.encode(), token.encode()):
                return None
            self._token = secrets.token_urlsafe(32)
            key = secrets.token_urlsafe(32)
            while len(self._sessions) >= MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[key] = new_session(self._clock() + LIFETIME_S)
            return key

    def find(self, key: str) -> WebSession | None:
        """The session of this key, unless it has ended."""
        with self._lock:
            session = self._sessions.get(key)
            if session is not None and session.ends_s <= self._clock():
                del self._sessions[key]
                return None
            return session
