"""What every request is checked for, and what every answer tells the browser. Pure.

Theory of operation
    The pages live at http://127.0.0.1:PORT, the copy of the Perfetto UI at http://localhost:PORT: to the browser they
    are two origins, so that a fault of the UI, which needs a policy with inline scripts and shows hostile traces, reads
    neither pages nor forms. `localhost` serves nothing but the UI, and the UI is served nowhere else.

    A request must name one of the two hosts, or another site could reach the server through a name of its own that
    resolves to this machine. A POST must come from one of our own pages, by what the browser says (Origin) and by the
    secret in the form.
"""

from http import HTTPStatus
from typing import NamedTuple

from kinetoctl.web.http.web_messages import WebError, WebRequest

UI_PATH = "/ui/"
SAFE_METHODS = ("GET", "HEAD")


class Origins(NamedTuple):
    """Where the two parts of the server are."""

    pages: str
    ui: str


def origins(port: int) -> Origins:
    """The origins of the pages and of the UI."""
    return Origins(f"http://127.0.0.1:{port}", f"http://localhost:{port}")


def check(request: WebRequest, port: int) -> None:
    """Refuses a request that names another host or comes from another site. Raises WebError."""
    own = origins(port)
    host = request.headers.get("host", "")
    wanted = own.ui if request.path.startswith(UI_PATH) else own.pages
    if f"http://{host}" != wanted:
        raise WebError(HTTPStatus.MISDIRECTED_REQUEST, f"this page is at {wanted}")
    if request.method in SAFE_METHODS:
        return
    if request.headers.get("origin") != own.pages or request.headers.get("sec-fetch-site", "same-origin") not in (
        "same-origin",
        "none",
    ):
        raise WebError(HTTPStatus.FORBIDDEN, "this form was sent by another site")


def page_policy(port: int) -> str:
    """The policy of the pages: own files only, no inline script or style, no frame around them."""
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        f"frame-src {origins(port).ui}; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def ui_policy(port: int) -> str:
    """The policy of the Perfetto UI: what its own files need, nothing from elsewhere, in our frames only."""
    return (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; connect-src 'self' data: blob:; worker-src 'self' blob:; font-src 'self' data:; "
        f"base-uri 'none'; form-action 'none'; frame-ancestors {origins(port).pages}"
    )


HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), usb=()",
    "Cache-Control": "no-store",
}
