"""Which process listens on a port that is taken. Blocking."""

import psutil

from kinetod.base.safe_text import clean


def port_holder(port: int) -> str:
    """The process for people, such as "process 4242 (dynolog)"; its kind if it may not be seen; "" for none."""
    try:
        found = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    except (psutil.Error, OSError):
        return ""
    holders = [each.pid for each in found if each.laddr and each.laddr.port == port]
    known = next((pid for pid in holders if pid), None)
    if known is None:
        return "a process that this daemon may not look into" if holders else ""
    try:
        name = clean(psutil.Process(known).name(), 64)
    except psutil.Error:
        return f"process {known}"
    return f"process {known} ({name})"
