"""Values from random kernels and samples, against plain loops over every nanosecond."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kineto_trace.analysis.counters.attribution import METHODS
from kineto_trace.analysis.counters.hardware_counter_views import by_kernel
from kineto_trace.analysis.counters.sampled_counters import interval_means, sampled_counters
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.model.trace import StringTable, Trace, make_table
from support.counters.brute_force import (
    BruteKernel,
    BruteSample,
    Expected,
    attributed,
    mean_between,
    samples_that_count,
)
from support.trace_files.simulated.sampled_gpu import H200, counter_table
from support.trace_files.traces import START_NS, target

ODD = (math.nan, math.inf, -1.0, 200.0, 103.0)
FACTORS = {"DRAM": 1.0, "Power": 7.0}  # of a kernel's value; the first one is a percentage
NEAR = 1e-4  # of the scale
# Nothing is gained by shrinking what is drawn from a seed.
SEEDED = settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))

Samples = Mapping[tuple[str, int], Sequence[BruteSample]]  # by label and device


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Kernels and samples of a window from 0 to length. missing: time whose kernels were not recorded."""

    length: int
    kernels: Sequence[BruteKernel]
    samples: Samples
    missing: Sequence[tuple[int, int]]


TABLES = st.fixed_dictionaries({
    "seed": st.integers(0, 2**32 - 1),
    "step": st.sampled_from([6, 10, 17, 30]),  # length of a sample
    "steps": st.sampled_from([3, 60, 150, 300]),
    "devices": st.integers(1, 2),
    "streams": st.integers(1, 2),
    "names": st.integers(1, 3),
    "sizes": st.lists(st.sampled_from([0.1, 0.3, 0.6, 1, 4]), min_size=3, max_size=3),  # in samples
    "in_turn": st.booleans(),  # kernels run in a fixed order, as in a training loop
    "idle": st.sampled_from([0, 0.2, 1, 5]),
    "noise": st.sampled_from([0, 0.5, 3]),
    "lost": st.sampled_from([0, 0, 0.1]),
    "odd": st.sampled_from([0, 0, 0.03]),
    "uneven": st.sampled_from([0, 0, 3]),
    "unrecorded": st.booleans(),
})  # fmt: skip


def drawn(about: Mapping[str, Any]) -> Drawn:
    random, length = Random(about["seed"]), about["step"] * about["steps"]
    kernels = [
        kernel
        for device in range(about["devices"])
        for _ in range(about["streams"])
        for kernel in _stream(about, random, device, length)
    ]
    values = {name: [random.choice((0, 5, 20, 50, 80, 100)) for _ in range(2)] for name in "abcd"}
    samples = {
        (label, device): _sampled(about, random, [each for each in kernels if each.device == device], values, factor)
        for label, factor in FACTORS.items()
        for device in range(2)
        if random.random() < 0.85
    }
    first = random.randrange(length)
    missing = [(first, first + length // 5)] if about["unrecorded"] else []
    return Drawn(length=length, kernels=kernels, samples=samples, missing=missing)


def _stream(about: Mapping[str, Any], random: Random, device: int, length: int) -> list[BruteKernel]:
    step, found = about["step"], list[BruteKernel]()
    names = random.sample("abcd", about["names"])
    sizes = {name: [max(1, int(step * size))] for name, size in zip(names, about["sizes"], strict=False)}
    sizes[names[0]] += [4 * sizes[names[0]][0]] * random.randrange(2)
    turns = [random.choice(names) for _ in range(random.choice((2, 3, 5)))]
    now, until = random.choice((0, -3 * step, 5 * step)), random.choice((length + 2 * step, length, length // 2))
    while now < until:
        name = turns[len(found) % len(turns)] if about["in_turn"] else random.choice(names)
        lasts = random.choice(sizes[name])
        lasts += random.randint(0, 1) if about["in_turn"] else random.randint(-lasts // 8, lasts // 8)
        found.append(BruteKernel(name=name, start=now, end=now + lasts, device=device))
        now += max(lasts, 1)
        if about["idle"] and random.random() < 0.7:
            now += int(random.expovariate(1 / (about["idle"] * step)))
    return found


def _sampled(
    about: Mapping[str, Any],
    random: Random,
    kernels: Sequence[BruteKernel],
    values: Mapping[str, Sequence[float]],
    factor: float,
) -> list[BruteSample]:
    """Samples of the largest value that runs, some of them lost, odd, empty, longer or over the one before."""
    step, length = about["step"], about["step"] * about["steps"]
    low, high = -2 * step, length + 5 * step
    active = [0.0] * (high - low)
    for kernel in kernels:
        value = factor * values[kernel.name][kernel.end - kernel.start > step]
        for moment in range(max(kernel.start, low), min(kernel.end, high)):
            active[moment - low] = max(active[moment - low], value)
    found, now = [], random.choice((low, 0, random.randrange(step)))
    while now < length + step:
        lasts = max(1, step + random.randint(-about["uneven"], about["uneven"]))
        lasts *= 1 if not about["uneven"] or random.random() < 0.9 else 4
        value = sum(active[now - low : now - low + lasts]) / lasts + random.gauss(0, about["noise"])
        value = min(max(value, 0.0), 100.0 * factor)
        value = random.choice(ODD) if random.random() < about["odd"] else value
        if random.random() >= about["lost"]:
            found.append(BruteSample(start=now, end=now + lasts, value=value))
        if random.random() < about["odd"]:
            found.append(BruteSample(start=now, end=now, value=1.0))
            now -= lasts // 2
        now += lasts
    if random.random() < 0.2:
        random.shuffle(found)
    return found


def as_trace(about: Drawn) -> Trace:
    strings = StringTable()
    columns = [
        {
            "label": label,
            "device": device,
            "start": START_NS + np.array([each.start for each in samples]),
            "duration": np.array([each.end - each.start for each in samples]),
            "value": np.array([each.value for each in samples]),
        }
        for (label, device), samples in about.samples.items()
        if samples
    ]
    numbers: dict[str, Any] = {
        "start": START_NS + np.array([each.start for each in about.kernels], np.int64),
        "duration": np.array([each.end - each.start for each in about.kernels], np.int64),
        "name": strings.add_all([each.name for each in about.kernels]),
        "device": np.array([each.device for each in about.kernels], np.int64),
    }
    tables = {"counter": counter_table(columns, strings), "kernel": make_table("kernel", len(about.kernels), numbers)}
    missing = tuple((START_NS + low, START_NS + high) for low, high in about.missing)
    return Trace(
        target=target(),
        strings=tuple(strings.strings),
        tables=tables,
        window_start_ns=START_NS,
        window_end_ns=START_NS + about.length,
        devices=(H200,),
        coverage=(SourceCoverage(source="cupti", kinds=("kernel",), missing=missing),) if missing else (),
    )


def expected(about: Drawn) -> dict[tuple[int, str, str], Expected]:
    """What plain loops say, by device, label and name."""
    return {
        (device, label, name): said
        for (label, device), samples in about.samples.items()
        if samples_that_count(samples, percent=label == "DRAM")
        for name, said in attributed(
            [each for each in about.kernels if each.device == device],
            samples,
            (0, about.length),
            percent=label == "DRAM",
            missing=about.missing,
        ).items()
    }


def agree(about: Drawn) -> set[str]:
    """Compares all values of all kernels; returns by which methods they were found."""
    trace, seen = as_trace(about), set()
    said = expected(about)
    for device in by_kernel(Context(trace)):
        for row, group in enumerate(device.group.tolist()):
            for at, track in enumerate(device.tracks):
                wanted = said.pop((device.device, track.label, trace.strings[group]))
                assert int(device.total_ns[row]) == wanted.total_ns
                assert float(device.shared_pct[row]) == pytest.approx(wanted.shared_pct)
                if wanted.close:
                    continue
                seen.add(wanted.method)
                assert METHODS[int(device.method[row, at])] == wanted.method, (wanted, device.why[row, at])
                assert bool(device.why[row, at]) == (wanted.method == METHODS[0])
                found = [float(each[row, at]) for each in (device.value, device.error, device.residual)]
                scale = 100 * FACTORS[track.label]
                assert found == pytest.approx(
                    [wanted.value, wanted.error, wanted.residual], rel=1e-3, abs=NEAR * scale, nan_ok=True
                )
    assert not said
    return seen


@given(TABLES)
@settings(SEEDED, max_examples=60)
def test_kernels_have_the_values_that_plain_loops_find(about: Mapping[str, Any]) -> None:
    assert agree(drawn(about)) <= set(METHODS)


def test_the_tables_lead_to_values_of_every_method() -> None:
    usual = {"step": 10, "steps": 300, "devices": 2, "streams": 1, "names": 2, "in_turn": False,
             "idle": 0.2, "noise": 0.5, "lost": 0, "odd": 0.03, "uneven": 0, "unrecorded": False}  # fmt: skip
    sizes = ([4, 4, 4], [0.6, 0.3, 1], [0.3, 0.6, 1])
    seen = {
        method for each in sizes for seed in range(3) for method in agree(drawn({"seed": seed, "sizes": each, **usual}))
    }
    assert seen == set(METHODS)


@given(TABLES)
@settings(SEEDED, max_examples=30)
def test_means_over_intervals_are_those_of_every_nanosecond_in_them(about: Mapping[str, Any]) -> None:
    tables, random = drawn({**about, "steps": min(about["steps"], 60)}), Random(about["seed"])
    start = np.array([random.randint(-50, tables.length) for _ in range(8)])
    end = start + np.array([random.randint(-5, tables.length // 2) for _ in range(8)])
    number = np.array([random.randint(-1, 2) for _ in range(8)])
    for track in sampled_counters(Context(as_trace(tables))):
        samples = samples_that_count(tables.samples[track.label, track.device], percent=track.unit == "%")
        found = interval_means(track, START_NS + start, START_NS + end, number, 3)
        for group in range(3):
            spans = [(int(low), int(high)) for low, high, own in zip(start, end, number, strict=True) if own == group]
            mean, covered = mean_between(samples, spans)
            assert int(found.covered_ns[group]) == covered
            assert float(found.mean[group]) == pytest.approx(mean, abs=1e-6, nan_ok=True)
