"""A process in the control group of a pod's container, as the kubelet and its runtime make it. Needs root.

with container_group(pod_uid) as enter:
    enter(pid)
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
CONTAINER_ID = "4f6d0c1e9b3a57820d1c4e6f8a9b0c2d3e4f5061728394a5b6c7d8e9f0a1b2c3"


@contextlib.contextmanager
def container_group(pod_uid: str, container_id: str = CONTAINER_ID) -> Iterator[Callable[[int], None]]:
    """Moves processes into it; at the end they are where this one is. Skips the test where no group can be made."""
    hierarchy = ROOT if (ROOT / "cgroup.procs").exists() else ROOT / "pids"  # version 2, or 1
    parts = ["kubepods", "burstable", f"pod{pod_uid}", container_id]
    folders = [hierarchy.joinpath(*parts[: at + 1]) for at in range(len(parts))]
    made: list[Path] = []
    try:
        for folder in folders:
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
    except OSError as exc:
        for folder in reversed(made):
            folder.rmdir()
        pytest.skip(f"no control group can be made: {exc}")

    def enter(pid: int) -> None:
        (folders[-1] / "cgroup.procs").write_text(str(pid))

    try:
        yield enter
    finally:
        for pid in (folders[-1] / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (hierarchy / "cgroup.procs").write_text(pid)
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # somebody else's pods may be in there by now
                folder.rmdir()
