"""What is changed in the simulation of a job."""

from dataclasses import replace

import numpy as np
from kineto_trace.analysis.distributed.rank_simulation import Simulation, rank_work
from kineto_trace.collectives.rank_matching import match
from support.trace_files.simulated.training_job import Op, SimulatedJob, launched_ahead, simulate


def simulation(job: SimulatedJob) -> Simulation:
    works = [simulate(job).context(rank).get(rank_work) for rank in range(job.ranks)]
    return Simulation(match([(rank, work.found) for rank, work in enumerate(works)]), works)


def test_a_gpu_that_is_faster_than_those_that_wait_keeps_its_times() -> None:
    found = simulation(launched_ahead(late=15_000.0, slow=1.15))
    chains = found.chains
    inside = (chains.rank == 1) & (chains.entry >= 0)
    changed = found.with_median_work(1)
    assert np.array_equal(changed[inside & ~chains.host], chains.before[inside & ~chains.host])
    assert changed[inside & chains.host].sum() < chains.before[inside & chains.host].sum() / 2


def test_what_a_host_has_too_much_is_taken_off_its_longest_stretch() -> None:
    found = simulation(launched_ahead(late=15_000.0))
    own = (found.chains.rank == 1) & (found.chains.entry >= 0) & found.chains.host
    less = (found.chains.before - found.with_median_work(1))[own]
    assert np.count_nonzero(less > 1_000) == 7  # one stretch in each step but the first one
    assert less[less > 1_000].min() > 14_000_000


def test_a_host_that_waits_in_a_copy_to_pageable_memory_goes_on_when_the_copy_is_over() -> None:
    job = launched_ahead()
    one = job.program[: len(job.program) // 8]
    fetch = (Op(kind="fetch", us=(9_000.0, 9_000.0)), Op(kind="host", us=(5_000.0, 5_000.0)))
    short = (Op(kind="fetch", us=(2.0, 2.0)),) * 3  # what such a call takes if it does not wait
    found = simulation(replace(job, program=(*short, *one[:-2], *fetch, *one[-2:]) * 8))
    assert found.error < 0.001
    assert found.measured_ns > 7 * 30_000_000
