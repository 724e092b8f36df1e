"""Checks a caller's request for counters, field by field. Pure except `with_plan`, which asks kinetod-counters."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration

from kinetod.base.errors import InvalidRequest, Reason, invalid
from kinetod.counters.counter_client import CounterClient
from kinetod.counters.interface import (
    DEFAULT_INTERVAL_NS,
    OVERVIEW,
    SETS,
    CounterCode,
    CounterError,
    WantedCounters,
    check_interval,
    checked_wanted,
)

MAX_SAMPLES = 1_000_000  # per GPU in a trace: about 320 MB of rows with eight metrics
PLAN_S = 5.0
_MAX_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """What to sample. interval_ns: 0: each GPU's default. silent: kinetod-counters did not answer within PLAN_S."""

    wanted: WantedCounters
    interval_ns: int
    silent: bool = False


def checked_sampling(set_name: str, metrics: Sequence[str], interval_ns: int, path: str = "") -> SamplingRequest:
    """The request, with the default in place of an empty set. path: of the fields. Raises InvalidRequest."""
    wanted = WantedCounters(set_name=set_name or ("" if metrics else OVERVIEW), metrics=tuple(metrics))
    try:
        checked_wanted(wanted, tuple(SETS))
    except CounterError as exc:
        raise invalid(f"{path}set" if set_name else f"{path}metrics", exc.reason) from exc
    if any(len(name) > _MAX_NAME_CHARS for name in wanted.metrics):
        raise invalid(f"{path}metrics", f"a name is longer than {_MAX_NAME_CHARS} characters")
    try:
        if interval_ns:
            check_interval(interval_ns)
    except CounterError as exc:
        raise invalid(f"{path}interval_ns", exc.reason) from exc
    return SamplingRequest(wanted, interval_ns)


def checked_counters(spec: pb.CaptureSpec) -> SamplingRequest | None:
    """The counters that a capture requests; None: none. Raises InvalidRequest."""
    if not spec.HasField("counters"):
        return None
    asked = spec.counters
    request = checked_sampling(asked.set, asked.metrics, asked.interval_ns, "spec.counters.")
    length_ns = spec.duration_ns + spec.warmup_ns
    interval_ns = request.interval_ns or DEFAULT_INTERVAL_NS
    if length_ns > MAX_SAMPLES * interval_ns:
        least_ns = -(-length_ns // MAX_SAMPLES)
        raise invalid(
            "spec.counters.interval_ns",
            f"{format_duration(length_ns)} at {format_duration(interval_ns)} are more than the {MAX_SAMPLES:,} "
            f"samples that a trace can have; use {format_duration(least_ns)} or longer",
        )
    return request


async def with_plan(client: CounterClient, request: SamplingRequest) -> SamplingRequest:
    """Returns the request, noting whether kinetod-counters answers.

    Raises InvalidRequest for counters that no GPU of this host can measure in one pass. Other problems with counters
    are no reason to refuse a capture, which runs without them.
    """
    try:
        async with asyncio.timeout(PLAN_S):
            with contextlib.suppress(CounterError):
                await _check_plan(client, request)
    except TimeoutError:
        return replace(request, silent=True)
    return request


async def _check_plan(client: CounterClient, request: SamplingRequest) -> None:
    """Raises InvalidRequest or CounterError if the request cannot be measured."""
    refused: CounterError | None = None
    for gpu in {each.chip: each for each in (await client.gpus()).gpus if not each.problem}.values():
        try:
            await client.plan(gpu.uuid, request.wanted)
        except CounterError as exc:
            if exc.code is not CounterCode.INVALID_METRIC:
                raise
            refused = exc
        else:
            return
    if refused is not None:
        field = "spec.counters.metrics" if request.wanted.metrics else "spec.counters.set"
        raise InvalidRequest(Reason.COUNTERS_INVALID_METRIC, f"{field}: {refused.reason}", field=field)
