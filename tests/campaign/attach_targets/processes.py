"""Targets that make processes all the time."""

import multiprocessing
import os
from typing import Any, Callable, Dict, List

from campaign.attach_targets.control import Target, Wrong, must_be
from campaign.attach_targets.loops import python_work


class Forking(Target):
    """Forks; the child works, its parent too; the exit status tells the child's result."""

    def __init__(self) -> None:
        self._wanted = python_work()

    def lap(self) -> None:
        child = os.fork()
        if child == 0:
            status = 3
            try:
                status = 7 if python_work() == self._wanted else 4
            finally:
                os._exit(status)
        must_be("the sum", python_work(), self._wanted)
        _pid, status = os.waitpid(child, 0)
        must_be("the child's wait status", status, 7 << 8)


def _square(number: int) -> int:
    python_work()
    return number * number


class Pool(Target):
    """Two forked workers of multiprocessing, fed by the main thread; a new pool every few laps."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")
        self._pool: Any = None
        self._laps = 0

    def lap(self) -> None:
        if self._pool is None:
            self._pool = self._context.Pool(2)
        must_be("the squares", self._pool.map(_square, range(40), chunksize=4), [n * n for n in range(40)])
        self._laps += 1
        if self._laps % 20 == 0:
            self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool.join()
            self._pool = None


class _Squares:
    """A data set of torch's kind."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((16,), float(index * index))


class Loader(Target):
    """A DataLoader with two workers; every epoch makes new ones and must give all of the data once."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        data: Any = _Squares()
        self._loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, shuffle=True)

    def lap(self) -> None:
        seen: List[float] = []
        for batch in self._loader:
            if tuple(batch.shape) != (4, 16):
                raise Wrong("a batch has the shape %r" % (batch.shape,))
            seen += batch[:, 3].tolist()
        must_be("the epoch", sorted(seen), [float(n * n) for n in range(64)])


KINDS: Dict[str, Callable[[], Target]] = {"forking": Forking, "workers": Pool, "data_loader": Loader}
