"""One attach, in the helper process: from the process to the channel. (The methods are joined here.)"""

import socket
from typing import TYPE_CHECKING

from kinetod.attach.interface import AttachCode, Attached, AttachError

if TYPE_CHECKING:
    from kinetod.attach.helper import Request


def warm_up() -> None:
    """Packs what travels, ahead of the first request."""


def attach(request: "Request") -> tuple[Attached, socket.socket]:
    """Raises AttachError."""
    raise AttachError(
        AttachCode.UNSUPPORTED,
        f"process {request.key.pid} has no agent, and this version of kinetod cannot bring one in; start it with "
        "`kinetoctl run -- <command>`",
    )
