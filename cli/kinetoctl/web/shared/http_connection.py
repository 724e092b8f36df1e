"""One connection of many users' door: HTTP/1.1 by h11, with the same limits and checks as for one user."""

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import h11

from kinetoctl.web.http import security
from kinetoctl.web.http.connection_deadlines import ConnectionDeadlines
from kinetoctl.web.http.request_handler import failure, headers_of
from kinetoctl.web.http.request_parts import MAX_TARGET_BYTES, content_length, web_request
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, opened
from kinetoctl.web.http.web_server import IDLE_S, REQUEST_S
from kinetoctl.web.shared.page_user import PageUser, UnknownUser

MAX_HEAD_BYTES = MAX_TARGET_BYTES + (16 << 10)  # of the first line and all headers
_READ_BYTES = 64 << 10
_SEND_BYTES = 256 << 10  # a client must take so much within the connection's timeout

Headers = Sequence[tuple[str, str]]
Identify = Callable[[Headers], PageUser]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSite:
    """What a door answers: the origin that browsers see, the policy of its answers, and where these come from."""

    origin: str
    policy: str
    application: Callable[[WebRequest, PageUser], WebAnswer]


class HttpConnection:
    """Serves the requests of one connection, one after the other. identify: who asks. Raises OSError."""

    def __init__(
        self, sock: socket.socket, site: SharedSite, deadlines: ConnectionDeadlines, identify: Identify
    ) -> None:
        self._sock = sock
        self._site = site
        self._deadlines = deadlines
        self._identify = identify
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)

    def serve(self) -> None:
        """Serves until the connection ends."""
        while self._began():
            head = self._answer_one()
            if head is None or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    def _began(self) -> bool:
        """Waits for the first byte of a request."""
        self._deadlines.expect(self._sock, IDLE_S)
        if self._http.trailing_data[0]:
            return True
        data = self._sock.recv(_READ_BYTES)
        self._http.receive_data(data)
        self._deadlines.expect(self._sock, REQUEST_S)
        return bool(data)

    def _answer_one(self) -> h11.Request | None:
        """Reads a request and answers it. None if none came."""
        head: h11.Request | None = None
        try:
            event = self._event()
            if not isinstance(event, h11.Request):
                return None
            head = event
            answer = self._answer(head)
        except h11.RemoteProtocolError as exc:
            answer = failure(WebError(HTTPStatus(exc.error_status_hint), "this is no request of HTTP/1.1"))
        self._send(answer, content=head is None or head.method != b"HEAD")
        return head

    def _answer(self, head: h11.Request) -> WebAnswer:
        """Raises h11.RemoteProtocolError, OSError."""
        try:
            request, headers = self._received(head)
            self._deadlines.expect(self._sock, None)
            user = self._identify(headers)
            security.check(request, self._site.origin)
            return self._site.application(request, user)
        except WebError as exc:
            return failure(exc)
        except UnknownUser as exc:
            return failure(WebError(HTTPStatus.FORBIDDEN, str(exc)))
        except (OSError, h11.RemoteProtocolError):
            raise
        except Exception:  # noqa: BLE001 - of a page: it must not take the connection down without an answer
            _log.exception("the page %s failed", head.target.partition(b"?")[0].decode("ascii", "replace"))
            return failure(WebError(HTTPStatus.INTERNAL_SERVER_ERROR, "this page failed; the log says why"))

    def _received(self, head: h11.Request) -> tuple[WebRequest, Headers]:
        """The request, whose content has been read. Raises WebError."""
        method, target = head.method.decode("ascii", "replace"), head.target.decode("latin-1")
        headers = [(name.decode("ascii", "replace"), value.decode("latin-1")) for name, value in head.headers]
        length = content_length(method, target, headers)
        content = bytearray()
        while isinstance(event := self._event(), h11.Data):
            content += event.data
        if not isinstance(event, h11.EndOfMessage) or len(content) != length:
            raise WebError(HTTPStatus.BAD_REQUEST, "the form is incomplete")
        return web_request(method, target, headers, bytes(content)), headers

    def _event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                self._write(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(self._sock.recv(_READ_BYTES))
        return event

    def _send(self, answer: WebAnswer, *, content: bool) -> None:
        file, length = opened(answer)
        with file:
            headers = headers_of(answer, self._site.policy, length)
            if self._http.their_state is not h11.DONE:  # what was refused may stay unread
                headers.append(("Connection", "close"))
            reason = answer.status.phrase.encode()
            self._write(h11.Response(status_code=answer.status, headers=headers, reason=reason))
            while content and (part := file.read(_SEND_BYTES)):
                self._write(h11.Data(data=part))
            self._write(h11.EndOfMessage())

    def _write(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            self._sock.sendall(data)
