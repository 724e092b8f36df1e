"""What the kernel lets these tests do."""

import ctypes
import subprocess


def allowed_to_trace() -> bool:
    """Whether the kernel lets this process trace a child that is no longer its own image."""
    with subprocess.Popen(["sleep", "60"]) as process:
        libc = ctypes.CDLL(None, use_errno=True)
        seized = libc.ptrace(0x4206, process.pid, None, None) == 0  # PTRACE_SEIZE
        process.kill()
    return bool(seized)
