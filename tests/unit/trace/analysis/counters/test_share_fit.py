"""Least squares over shares of samples, and what it may be trusted with."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kineto_trace.analysis.counters.device_tiles import Pieces
from kineto_trace.analysis.counters.share_fit import BLOCK, Observed, ShareFit, fit

Floats = npt.NDArray[np.float64]


def fitted(shares: Floats, value: Floats, *, upper: float = 100.0, combinations: Any = None) -> ShareFit:
    """shares: [sample, column]; value: of each sample."""
    sample, column = np.nonzero(shares)
    pieces = Pieces(sample, column, shares[sample, column])
    observed = Observed(pieces, value[:, None], np.ones(len(value)), np.array([upper]), shares.shape[1])
    return fit(observed, np.eye(shares.shape[1]) if combinations is None else combinations)


def drawn(count: int, columns: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).dirichlet(np.ones(columns), count)


def test_values_are_found_from_samples_that_mix_them() -> None:
    shares, true = drawn(500, 4), np.array([93.0, 18.0, 60.0, 0.5])
    found = fitted(shares, shares @ true)
    assert found.value[:, 0] == pytest.approx(true, abs=1e-3)
    assert found.residual.max() < 1e-3


def test_values_stay_in_their_bounds_where_noise_would_lead_out() -> None:
    random = np.random.default_rng(2)
    shares, true = drawn(300, 3), np.array([100.0, 0.0, 50.0])
    found = fitted(shares, shares @ true + 3 * random.standard_normal(300))
    assert found.value.min() >= 0 and found.value.max() <= 100
    free = fitted(shares, shares @ np.array([5e9, 0.0, 1e9]), upper=np.inf)
    assert free.value[:, 0] == pytest.approx([5e9, 0, 1e9], abs=1e6)


def test_collinear_columns_have_no_evidence_but_their_sum_has() -> None:
    shares = drawn(400, 2)
    half = np.stack([shares[:, 0] * 0.25, shares[:, 0] * 0.75, shares[:, 1]], axis=1)  # the first two in proportion
    true = np.array([80.0, 40.0, 10.0])
    together = np.array([[0.25, 0.75, 0.0]]).T
    apart, both = fitted(half, half @ true), fitted(half, half @ true, combinations=together)
    assert apart.samples[:2].tolist() == [0, 0] and np.isinf(apart.error[:2]).all()
    assert apart.partner[:2].tolist() == [1, 0]
    assert apart.samples[2] > 10 and apart.value[2, 0] == pytest.approx(10, abs=1e-3)
    assert both.value[0, 0] == pytest.approx(50, abs=1e-3)
    assert both.samples[0] > 10 and both.error[0, 0] < 1


def test_nearly_collinear_columns_have_next_to_none() -> None:
    random, shares = np.random.default_rng(3), drawn(400, 2)
    jitter = shares[:, 0] * 0.001 * random.standard_normal(400)
    near = np.stack([shares[:, 0] * 0.25 + jitter, shares[:, 0] * 0.75 - jitter, shares[:, 1]], axis=1)
    assert fitted(near, near @ np.array([80.0, 40.0, 10.0])).samples[:2].max() < 0.01


def test_a_column_in_one_sample_alone_is_not_taken_as_certain() -> None:
    shares = np.vstack([np.column_stack([drawn(200, 2), np.zeros(200)]), [[0.5, 0.4, 0.1]]])
    noise = 0.5 * np.random.default_rng(5).standard_normal(201)
    found = fitted(shares, shares @ np.array([30.0, 60.0, 90.0]) + noise)
    assert found.samples[2] < 0.1 and found.error[2, 0] > 3


def test_no_samples_and_no_columns_are_no_error() -> None:
    nothing = fitted(np.zeros((0, 2)), np.zeros(0))
    assert nothing.samples.tolist() == [0, 0]
    one = fitted(np.array([[0.5, 0.5]]), np.array([40.0]))
    assert np.isfinite(one.value).all() and one.samples.tolist() == [0, 0]


@pytest.mark.parametrize("heavy", [False, True])
def test_the_intervals_hold_what_they_promise(heavy: bool) -> None:
    """Over 200 draws, with equal errors and with one column whose values spread: 95 % of the intervals, about."""
    random, true, held = np.random.default_rng(7), np.array([70.0, 20.0, 40.0]), []
    for _ in range(200):
        shares = random.dirichlet(np.ones(3), 150)
        spread = np.array([8.0 if heavy else 0.0, 0.0, 0.0])
        noise = random.standard_normal(150) + (shares * spread * random.standard_normal((150, 3))).sum(axis=1)
        found = fitted(shares, shares @ true + noise)
        held.append(np.abs(found.value[:, 0] - true) <= 1.96 * found.error[:, 0])
    assert np.mean(held) >= 0.92
    assert np.mean(held, axis=0).min() >= 0.90


def test_samples_of_several_blocks_count_alike() -> None:
    shares, true = drawn(2 * BLOCK + 5, 2), np.array([75.0, 25.0])
    found = fitted(shares, shares @ true)
    assert found.value[:, 0] == pytest.approx(true, abs=1e-3)


def test_samples_that_lie_in_one_column_as_a_whole_are_told() -> None:
    found = fitted(np.array([[1.0, 0], [1, 0], [0.5, 0.5], [0, 1]]), np.array([80.0, 90, 50, 10]))
    assert found.whole.tolist() == [2, 1]
    assert found.whole_mean[:, 0].tolist() == pytest.approx([85, 10])
