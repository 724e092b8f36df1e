"""Tabs of a browser that have come in by the address of the terminal."""

from typing import Any

from support.web.browsing import Browser


def entered(new_tab: Any, server: Browser, heading: str = "Traces", **options: Any) -> Any:
    """A tab at the first page, which has this heading. options: of the browser's context."""
    tab = new_tab(**options)
    tab.go(server.web.address)
    tab.page.get_by_role("heading", name=heading).wait_for()
    return tab


def opened(new_tab: Any, server: Browser, path: str, **options: Any) -> Any:
    """A tab at a page whose results are there. options: of the browser's context.

    A page whose results are being computed loads itself again, and what was chosen in its forms is gone.
    """
    tab = entered(new_tab, server, **options)
    server.shown(path)
    tab.go(server.own + path)
    return tab
