"""One program of the zoo, in this process: python child.py NAME FOLDER [--device cpu] [--most-s 1800] [--rank 0]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[2])
sys.path[0] = TESTS  # not this folder: its modules have common names

from gpu.zoo import catalog  # noqa: E402 - found through the line above
from gpu.zoo.life import SKIPPED, WRONG, Life, Skip, Wrong  # noqa: E402


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--most-s", type=float, default=1800)
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    run = catalog.load()[options.name].run
    assert run is not None
    sys.path.remove(TESTS)
    life = Life(options.folder, options.device, options.most_s, options.rank)
    try:
        run(life)
    except Skip as exc:
        life.event("skip", reason=str(exc))
        return SKIPPED
    except Wrong as exc:
        life.event("wrong", what=str(exc), iteration=life.count)
        return WRONG
    if options.rank == 0:
        life.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
