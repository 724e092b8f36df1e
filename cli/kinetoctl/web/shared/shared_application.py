"""From a checked request of a known user to the same pages as for one user alone."""

from http import HTTPStatus

from kinetoctl.web.application import page_answer
from kinetoctl.web.http.static_files import STATIC, static_file
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest
from kinetoctl.web.shared.page_user import PageUser
from kinetoctl.web.shared.user_spaces import UserSpaces


class SharedApplication:
    """Answers every request that passed `security.check`, for the user whom its connection names."""

    def __init__(self, spaces: UserSpaces) -> None:
        self._spaces = spaces

    def __call__(self, request: WebRequest, user: PageUser) -> WebAnswer:
        """The answer. Raises WebError for what is no page."""
        _check_sender(request)
        if request.path.startswith(STATIC):
            return static_file(request)
        with self._spaces.entered(user) as space:
            return page_answer(space.context, request, space.session)


def _check_sender(request: WebRequest) -> None:
    """Other sites may link to pages, and neither load them into theirs nor have them work. Raises WebError.

    There is no cookie that the browser could keep to itself: certificates and proxies know the user on every request.
    """
    headers = request.headers
    from_here = headers.get("sec-fetch-site", "none") in ("same-origin", "none")
    navigates = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if not from_here and not navigates:
        raise WebError(HTTPStatus.FORBIDDEN, "another site asked for this")
