"""Rows of the Perfetto viewer: processes, threads, GPU streams, counters.

A process contains its threads, and a group for each of its GPUs with a track per stream. Events of a track that do not
nest go to additional tracks, which are created when all events are known (`overlap`).
"""

import hashlib
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from kineto_trace.formats.perfetto.perfetto_proto import Counter, TrackInfo
from kineto_trace.formats.shared.viewer_rows import row_name

INT32_LIMIT = 1 << 31
GPU_RANK = 1000  # GPUs come after the other tracks of a process
OVERHEAD_RANK = 2000

Numbers = npt.NDArray[np.uint32]


class Tracks:
    """Numbered tracks, in the order in which they were first requested."""

    def __init__(self, owner: str) -> None:
        """owner: a text that differs between any traces that may be combined in one file."""
        self._owner = owner
        self._numbers: dict[Hashable, int] = {}
        self.infos: list[TrackInfo] = []
        self.bases: dict[int, int] = {}  # additional track -> the track whose overlapping events it takes

    def _add(self, key: tuple[Hashable, ...], name: str, parent: int | None = None, **more: object) -> int:
        found = self._numbers.get(key)
        if found is not None:
            return found
        above = 0 if parent is None else self.infos[parent].uuid
        info = TrackInfo(self.uuid(key), name, above)._replace(**more)  # type: ignore[arg-type]
        self._numbers[key] = len(self.infos)
        self.infos.append(info)
        return self._numbers[key]

    def uuid(self, key: Hashable) -> int:
        """Returns a uuid that is stable for the same trace and unique to the track. It is never 0, which means none."""
        digest = hashlib.blake2b(f"{self._owner}\0{key!r}".encode("utf-8", "replace"), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1 | 1

    def process(self, pid: int, name: str, label: str = "", rank: int = 0) -> int:
        """Returns a process, or a group of tracks if `pid` is not a valid process id. rank: order among processes."""
        if 0 < pid < INT32_LIMIT:
            return self._add(("process", pid), name, pid=pid, label=label, rank=rank)
        return self.group(f"process {pid}", name, rank=rank)

    def group(self, key: str, name: str, parent: int | None = None, rank: int = 0) -> int:
        """Returns a track that has only a name; other tracks may be below it."""
        above = 0 if parent is None else self.infos[parent].uuid
        return self._add(("group", above, key), name, parent, rank=rank)

    def thread(self, process: int, tid: int, name: str, rank: int = 0) -> int:
        """Returns a thread of the process, or a group below it if the numbers are not valid for a thread."""
        pid = self.infos[process].pid
        if pid > 0 and 0 < tid < INT32_LIMIT:
            return self._add(("thread", pid, tid), name, pid=pid, tid=tid, rank=rank)
        return self.group(f"thread {tid}", name, process, rank)

    def gpu(self, process: int, device: int) -> int:
        """Returns the group of a GPU."""
        return self.group(f"GPU {device}", f"GPU {device}", process, GPU_RANK + max(device, -1))

    def stream(self, process: int, device: int, row: int) -> int:
        """Returns the track of a GPU stream: `row` as in formats/shared/viewer_rows.py."""
        name = row_name(device, row).rstrip()
        return self.group(f"row {row}", name, self.gpu(process, device), row + 1)

    def counter(self, parent: int, name: str, counter: Counter) -> int:
        """Returns the track of a counter."""
        return self._add(("counter", self.infos[parent].uuid, name), name, parent, counter=counter)

    def overlap(self, track: int, lane: int) -> int:
        """Adds a track for events of `track` that do not nest there."""
        base = self.infos[track]
        name = f"{base.name} (overlap {lane})"
        key = ("overlap", base.uuid, lane)
        number = len(self.infos)
        if base.tid >= 0 or base.pid >= 0:
            number = self._add(key, name, track, rank=lane)
        else:
            self.infos.append(base._replace(uuid=self.uuid(key), name=name))
        self.bases[number] = track
        return number
