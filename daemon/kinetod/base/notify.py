"""The service manager's side channel (sd_notify): one datagram per message, and its watchdog interval."""

import os
import socket
import time
from collections.abc import Mapping

STATE_WAIT_S = 1.0  # for messages that the manager must get; others are dropped if its queue is full


def notify(message: str, environ: Mapping[str, str] = os.environ, *, wait_s: float = 0.0) -> None:
    """Sends a message such as STATUS=… to the socket in NOTIFY_SOCKET, if there is one.

    Blocks for `wait_s` at most while the manager's queue is full. Never raises OSError.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(wait_s)
            sock.sendto(message.encode(), address)
    except OSError:
        return  # the manager is gone or does not read; the daemon works without it


def ready(status: str, environ: Mapping[str, str] = os.environ) -> None:
    """Reports that the daemon has started or finished a reload."""
    notify(f"READY=1\nSTATUS={status}", environ, wait_s=STATE_WAIT_S)


def reloading(environ: Mapping[str, str] = os.environ) -> None:
    """Reports the start of a reload, which `ready` ends. The time identifies it as the requested one."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}", environ, wait_s=STATE_WAIT_S)


def stopping(environ: Mapping[str, str] = os.environ) -> None:
    """Reports that the daemon is stopping."""
    notify("STOPPING=1", environ, wait_s=STATE_WAIT_S)


def watchdog_s(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> float | None:
    """Seconds without WATCHDOG=1 after which the manager kills this process; None if it never does."""
    text = environ.get("WATCHDOG_USEC", "")
    meant = environ.get("WATCHDOG_PID", "")
    if meant and meant != str(os.getpid() if pid is None else pid):
        return None
    return int(text) / 1e6 if text.isascii() and text.isdecimal() and int(text) > 0 else None
