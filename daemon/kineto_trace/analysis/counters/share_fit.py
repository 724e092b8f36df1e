"""Values of groups from samples that are longer than what runs in them: bounded least squares with its evidence.

Theory of operation
    The value of a sample is taken as the mean of the values of what ran in it, weighted by the share of its length:
    y = A x, with a column of A for each group, for each set of groups at once, and for idle time, so that each row of A
    sums to 1. Samples weigh as much as they are long. x is the least-squares solution with 0 <= x <= 100 for
    percentages and x >= 0 for others (coordinate descent on the normal equations, which are positive semidefinite: it
    converges for any A).

    What one may say of x is told by the unbounded problem. N = A'WA. The value of a combination c'x (c: one column, or
    a mean over several) has as much evidence as 1 / (c' N⁺ c) samples that lie in it alone. Collinear columns, such as
    those of kernels that always run in the same proportion, have next to none, however much time they take: this is
    their share squared, less what the other columns explain of it (the variance inflation). Its variance is the larger
    one of two: that of equal errors, σ² c'N⁺c, and the sandwich with each sample's own error over one less its leverage
    (HC3), which holds if groups differ in how well one value describes them.

    Memory is bounded: A is made in blocks of BLOCK samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.counters.device_tiles import Pieces

BLOCK = 8192  # samples
_TINY = 1e-9  # of the largest eigenvalue: what is smaller is 0
_WITHIN = 1e-4  # of a combination that lies in a direction of which nothing is known
_WHOLE = 0.999  # share of a sample that lies in the columns of one combination
_STEPS = 200  # of the descent, at most
_SETTLED = 1e-6  # of the scale of the values

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Observed(NamedTuple):
    """value: [sample, metric]. weight: of each sample; 1: of a usual one. upper: of each metric, the most it can be."""

    pieces: Pieces
    value: Floats
    weight: Floats
    upper: Floats
    columns: int


@dataclass(frozen=True, slots=True)
class ShareFit:
    """What least squares say.

    value, error: [combination, metric], the standard error infinite where nothing tells. samples: of each combination,
    how many samples that lie in it alone would tell as much. residual: [column, metric], the root mean square of what
    the fit leaves of samples, weighted by the share of the column. whole, whole_length, whole_mean, whole_error: of the
    samples that lie in the columns of a combination alone their number, the sum of their weights, and their mean by
    weight and its standard error. partner: the column that is told apart from each one least; itself: none.
    """

    value: Floats
    error: Floats
    samples: Floats
    residual: Floats
    whole: Ints
    whole_length: Floats
    whole_mean: Floats
    whole_error: Floats
    partner: Ints


def _blocks(observed: Observed) -> Iterator[tuple[slice, Floats]]:
    """Yields the rows of A, some at a time."""
    count, pieces, columns = len(observed.value), observed.pieces, observed.columns
    borders = np.searchsorted(pieces.sample, np.arange(0, count + BLOCK, BLOCK))
    for place, first in enumerate(range(0, count, BLOCK)):
        rows = min(BLOCK, count - first)
        own = slice(int(borders[place]), int(borders[place + 1]))
        at = (pieces.sample[own] - first) * columns + pieces.column[own]
        shares = np.bincount(at, pieces.share[own], rows * columns).astype(np.float64)
        yield slice(first, first + rows), shares.reshape(rows, columns)


def fit(observed: Observed, combinations: Floats) -> ShareFit:
    """Returns the values of combinations of columns: [column, combination], whose sums over the columns are 1."""
    columns, metrics = observed.columns, observed.value.shape[1]
    scale = np.maximum(np.abs(observed.value).max(axis=0, initial=0), 1e-300)
    normal, right = np.zeros((columns, columns)), np.zeros((columns, metrics))
    parts = (combinations > 0).astype(np.float64)
    whole, of_whole = np.zeros((3, parts.shape[1])), np.zeros((2, parts.shape[1], metrics))
    for rows, shares in _blocks(observed):
        value = observed.value[rows] / scale
        weighted = shares * observed.weight[rows, None]
        normal += shares.T @ weighted
        right += weighted.T @ value
        inside = (shares @ parts >= _WHOLE).astype(np.float64)
        heavy = inside * observed.weight[rows, None]
        whole += np.stack([each.sum(axis=0) for each in (inside, heavy, heavy**2)])
        of_whole += np.stack([heavy.T @ value, heavy.T @ value**2])
    inverse, unknown = _inverse(normal)
    freedom = max(len(observed.value) - columns + unknown.shape[1], 1)
    solved = _bounded(normal, right, inverse @ right, observed.upper / scale)
    spread = inverse @ combinations
    informed = np.einsum("ck,ck->k", combinations, spread)
    left, variance, residual = np.zeros(metrics), np.zeros((combinations.shape[1], metrics)), np.zeros_like(right)
    for rows, shares in _blocks(observed):
        weight = observed.weight[rows, None]
        rest = observed.value[rows] / scale - shares @ solved
        leverage = weight[:, 0] * np.einsum("sc,sc->s", shares @ inverse, shares)
        left += (weight * rest**2).sum(axis=0)
        residual += shares.T @ rest**2
        influence = (shares * weight) @ spread
        variance += (influence**2).T @ (rest / np.maximum(1 - leverage, 1e-3)[:, None]) ** 2
    variance = np.maximum(variance, informed[:, None] * (left / freedom)[None, :])
    hidden = np.abs(unknown.T @ combinations).max(axis=0, initial=0) > _WITHIN
    variance[hidden] = np.inf
    share = np.maximum(_sums(observed), 1e-300)
    number, heavy, squares = whole
    mean, square = of_whole / np.maximum(heavy, 1e-300)[:, None]
    several = number / np.maximum(number - 1, 1) * squares / np.maximum(heavy**2, 1e-300)
    return ShareFit(
        value=(combinations.T @ solved) * scale,
        error=np.sqrt(variance) * scale,
        samples=np.where(hidden, 0.0, 1 / np.maximum(informed, 1e-300)),
        residual=np.sqrt(residual / share[:, None]) * scale,
        whole=number.astype(np.int64),
        whole_length=heavy,
        whole_mean=mean * scale,
        whole_error=np.sqrt(np.maximum(square - mean**2, 0) * several[:, None]) * scale,
        partner=_partners(normal, inverse, unknown),
    )


def _sums(observed: Observed) -> Floats:
    found: Floats = np.bincount(observed.pieces.column, observed.pieces.share, observed.columns).astype(np.float64)
    return found


def _inverse(normal: Floats) -> tuple[Floats, Floats]:
    """A generalized inverse, and the directions in which x may go without a change of A x: [column, direction]."""
    if not len(normal):
        return normal, normal
    diagonal = np.sqrt(np.maximum(np.diag(normal), 0))
    used = diagonal > 0
    by = 1 / np.where(used, diagonal, 1)
    values, vectors = np.linalg.eigh(normal * by[:, None] * by[None, :])
    kept = values > _TINY * max(float(values.max(initial=0)), 1e-300)
    scaled = vectors[:, kept] * by[:, None]
    lost = vectors[:, ~kept] * by[:, None]
    lost /= np.maximum(np.linalg.norm(lost, axis=0), 1e-300)
    return (scaled / values[kept]) @ scaled.T, lost


def _bounded(normal: Floats, right: Floats, begin: Floats, upper: Floats) -> Floats:
    """The least-squares solution in [0, upper] of each metric: [column, metric]."""
    found = np.clip(np.nan_to_num(begin), 0, upper)
    diagonal = np.diag(normal)
    used = np.flatnonzero(diagonal > 0).tolist()
    gradient = normal @ found - right
    for _ in range(_STEPS):
        moved = 0.0
        for column in used:
            better = np.clip(found[column] - gradient[column] / diagonal[column], 0, upper)
            change = better - found[column]
            most = float(np.abs(change).max())
            if most > 0:
                gradient += np.outer(normal[:, column], change)
                found[column] = better
                moved = max(moved, most)
        if moved <= _SETTLED:
            break
    return found


def _partners(normal: Floats, inverse: Floats, unknown: Floats) -> Ints:
    """For each column the one with which its value is exchanged most easily, by their covariance."""
    count = len(normal)
    if not count:
        return np.empty(0, np.int64)
    loose = inverse + (unknown @ unknown.T) * (float(np.abs(inverse).max(initial=0)) + 1) * 1e3
    deviation = np.sqrt(np.maximum(np.diag(loose), 1e-300))
    correlation = np.abs(loose / deviation[:, None] / deviation[None, :])
    np.fill_diagonal(correlation, 0)
    best = correlation.argmax(axis=1)
    return np.where(correlation.max(axis=1) > 0.5, best, np.arange(count))
