"""Files on storage that answers late: named pipes whose other end, a process of its own, waits before it writes."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_SERVER = """
import ctypes, signal, sys, time
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the program
path, delay, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
while True:
    try:
        with open(path, "wb") as stream:
            time.sleep(delay)
            stream.write(bytes(size))
    except BrokenPipeError:
        pass  # it was opened for a reader that had all and was about to leave
    time.sleep(0.002)
"""


class SlowFile:
    """A file that can be read again and again; each time its bytes come only after `delay_s`."""

    def __init__(self, delay_s: float, size: int) -> None:
        folder = tempfile.mkdtemp(prefix="rootcause-")
        self.path = Path(folder, "sample.bin")
        os.mkfifo(self.path)
        self._server = subprocess.Popen(
            [sys.executable, "-S", "-c", _SERVER, str(self.path), str(delay_s), str(size)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def close(self) -> None:
        """Ends the storage."""
        self._server.kill()
        self._server.wait()
        self.path.unlink()
        self.path.parent.rmdir()
