"""One trace against itself: its steps in two halves have no changes, and what is scaled by 20 % is found."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from kineto_trace.analysis.diff.diff_views import (
    CHANGES,
    SLOWER,
    compare,
    compare_jobs,
    diff_call_paths,
    diff_kernel_names,
    diff_operators,
    diff_step_times,
    diff_steps,
)
from kineto_trace.analysis.diff.step_noise import ERROR_RATE, StepSamples
from kineto_trace.model.context import Context
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.view_api.view import View
from support.trace_files.h200 import DATA
from support.trace_files.step_traces import of_steps

RANKS = range(4)


@cache
def recorded(rank: int) -> Context:
    return Context(open_trace(DATA / "ddp4" / f"rank{rank}.json.gz"))


def share_of_changes(of: View, samples: StepSamples) -> list[float]:
    """For each way to halve the steps the share of rows that are called changed."""
    steps = range(len(samples.steps))
    shares = []
    for half in itertools.combinations(steps, len(steps) // 2):
        rest = [step for step in steps if step not in half]
        found = compare_jobs(of, [of_steps(samples, half)], [of_steps(samples, rest)])
        shares.append(float(np.isin(found.values("verdict"), CHANGES).mean()))
    return shares


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(view, id=view.name, marks=[] if view is diff_kernel_names else pytest.mark.slow)
        for view in (diff_step_times, diff_operators, diff_kernel_names, diff_call_paths)
    ],
)
def test_halves_of_a_recording_have_no_more_changes_than_the_error_rate(of: View) -> None:
    shares = [share for rank in RANKS for share in share_of_changes(of, of.partial(recorded(rank)))]
    assert np.mean(shares) <= ERROR_RATE
    assert np.mean(np.array(shares) > 0) <= 2 * ERROR_RATE


def test_kernels_and_step_times_of_ranks_that_do_the_same_differ_within_the_noise() -> None:
    shares = []
    for first, second in itertools.combinations(RANKS, 2):
        found = compare(diff_kernel_names, recorded(first), recorded(second))
        shares.append(np.isin(found.values("verdict"), CHANGES).mean())
        assert diff_steps(recorded(first), recorded(second)).rows()[0]["verdict"] == "within noise"
    assert np.mean(shares) <= ERROR_RATE


@pytest.mark.parametrize("rank", [0, *(pytest.param(rank, marks=pytest.mark.slow) for rank in RANKS[1:])])
def test_a_kernel_that_takes_a_fifth_more_is_found_and_nothing_else(rank: int) -> None:
    samples = diff_kernel_names.partial(recorded(rank))
    noise = samples.us.std(1, ddof=1) / samples.us.mean(1)
    steady = [row for row in np.argsort(-samples.us.sum(1)).tolist() if noise[row] < 0.01][:8]
    assert len(steady) == 8
    missed, wrong = 0, 0
    for row in steady:
        us = samples.us.copy()
        us[row] *= 1.2
        found = compare_jobs(diff_kernel_names, [samples], [replace(samples, us=us)])
        slower = {row["name"] for row in found.rows() if row["verdict"] == SLOWER}
        missed += samples.names[row][0] not in slower
        wrong += len(slower - {samples.names[row][0]})
    assert (missed <= 1, wrong) == (True, 0), missed
