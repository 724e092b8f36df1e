"""Means of samples over time, weighted by their lengths. Pure."""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class SampleMeans:
    """Sums samples up. A value that is NaN or infinite counts as none, for its metric only."""

    metrics: int
    start_ns: int = 0
    end_ns: int = 0
    samples: int = 0
    _sums: npt.NDArray[np.float64] = field(init=False)
    _lengths: npt.NDArray[np.float64] = field(init=False)
    _maxima: npt.NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self._sums, self._lengths = np.zeros(self.metrics), np.zeros(self.metrics)
        self._maxima = np.full(self.metrics, -np.inf)

    def add(self, rows: npt.NDArray[np.void]) -> None:
        """Adds rows as `row_type` lays them out, in the order of time."""
        if not len(rows):
            return
        lengths = (rows["end_ns"] - rows["start_ns"]).astype(np.float64)[:, None]
        values = rows["values"].astype(np.float64)
        there = np.isfinite(values) & (lengths > 0)
        self._sums += np.where(there, values * lengths, 0.0).sum(axis=0)
        self._lengths += np.where(there, lengths, 0.0).sum(axis=0)
        self._maxima = np.maximum(self._maxima, np.where(there, values, -np.inf).max(axis=0))
        self.start_ns = self.start_ns or int(rows["start_ns"][0])
        self.end_ns = int(rows["end_ns"][-1])
        self.samples += len(rows)

    def means(self) -> list[float]:
        """One for each metric; NaN where no sample had a value."""
        return [
            float(total / length) if length else math.nan
            for total, length in zip(self._sums, self._lengths, strict=True)
        ]

    def maxima(self) -> list[float]:
        """Likewise the largest values."""
        return [float(value) if math.isfinite(value) else math.nan for value in self._maxima]
