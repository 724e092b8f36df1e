"""The service manager's readiness protocol (sd_notify): one datagram per message."""

import os
import socket
from collections.abc import Mapping


def notify(message: str, environ: Mapping[str, str] = os.environ) -> None:
    """Sends e.g. READY=1 to the socket in NOTIFY_SOCKET; does nothing without one. Never raises OSError."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.sendto(message.encode(), address)
    except OSError:
        return  # the manager is gone; the daemon works without it
