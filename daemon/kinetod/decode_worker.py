"""The decode worker as the daemon starts it: `kineto_trace.worker` that never outlives its daemon."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NICE = 5  # a third of what others get who want the processor: the programs that are traced, and the daemon's answers


def die_with_parent() -> None:
    """A daemon that was killed must not leave a worker that writes into a store of the next one."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the daemon is gone")


def main() -> int:
    """Runs until the end of standard input."""
    die_with_parent()
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon, which then ends us
    from kineto_trace.worker import main as work

    return work() or 0


if __name__ == "__main__":
    sys.exit(main())
