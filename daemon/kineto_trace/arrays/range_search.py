"""For many questions at once: the last element before a place whose value is large enough.

Theory of operation
    Maxima of blocks of 1, 2, 4, … values form a tree. A question climbs from its place to larger blocks on the left
    until one has a value that is large enough, and then descends in it, to the right where possible. All questions
    go together, in as many rounds as the tree has levels.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

NOTHING = -1

Ints = npt.NDArray[np.int64]


def last_reaching(values: Ints, before: npt.NDArray[Any], needed: Ints) -> Ints:
    """For each question the last place < before with values[place] >= needed; NOTHING: none. Places are from 0 on."""
    levels = _maxima(values)
    node = before.astype(np.int64)
    found = np.full(len(node), NOTHING, np.int64)
    at_level = np.full(len(node), NOTHING, np.int64)
    open_ = np.arange(len(node))
    for number, level in enumerate(levels):
        left = node[open_] & 1 == 1  # the block before this one is a left sibling: it has not been looked at
        rows = open_[left]
        rows = rows[level[node[rows] - 1] >= needed[rows]]
        found[rows], at_level[rows] = node[rows] - 1, number
        open_ = open_[at_level[open_] == NOTHING]
        node[open_] >>= 1
    for number in range(len(levels) - 1, 0, -1):
        rows = np.flatnonzero(at_level >= number)
        right = 2 * found[rows] + 1
        found[rows] = np.where(levels[number - 1][right] >= needed[rows], right, right - 1)
    return found


def _maxima(values: Ints) -> list[Ints]:
    """Maxima of blocks of 1, 2, 4, … values, padded to powers of two."""
    size = 1 << max(len(values).bit_length(), 1)
    level = np.full(size, np.iinfo(np.int64).min, np.int64)
    level[: len(values)] = values
    levels = [level]
    while len(level) > 1:
        level = np.maximum(level[::2], level[1::2])
        levels.append(level)
    return levels
