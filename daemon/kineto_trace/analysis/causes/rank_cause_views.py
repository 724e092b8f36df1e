"""The view of what the steps' time of all ranks of a job went to, and on which ranks most and least of it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kineto_trace.analysis.causes.cause_views import OF_THE_HOST, OTHERS, what
from kineto_trace.analysis.causes.host_causes import HOST_TITLES, host_causes
from kineto_trace.analysis.causes.time_causes import CAUSES, TITLES, time_causes
from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

_TITLES = {**TITLES, **HOST_TITLES}


class RankCauses(NamedTuple):
    """What one rank contributes. time_ns: by cause, over its GPUs; gpu_steps: its measured steps times its GPUs.

    what: by cause, what has most of its idle time, and how much (ns). note: about its warm-up; None if it has none.
    on_host: whether it has no GPU activity, so that the causes are those of the host.
    """

    time_ns: Mapping[str, int]
    gpu_steps: int
    what: Mapping[str, tuple[str, int]]
    note: str | None
    on_host: bool = False

    def share(self, causes: Sequence[str]) -> float:
        """Returns the share of these causes in its time, in %."""
        return 100 * sum(self.time_ns.get(cause, 0) for cause in causes) / (sum(self.time_ns.values()) or 1)


def _over_ranks(partials: Sequence[tuple[int, RankCauses]], *, least: float = 0.0) -> Answer:
    """Adds up the causes of all ranks; if some have GPU activity, of these."""
    told = {rank: part for rank, part in partials if any(part.time_ns.values())}
    ranks = {rank: part for rank, part in told.items() if not part.on_host} or told
    time = {cause: sum(part.time_ns.get(cause, 0) for part in ranks.values()) for cause in _TITLES}
    ordered = sorted((cause for cause in _TITLES if time[cause]), key=lambda cause: -time[cause])
    small = [cause for cause in ordered if all(part.share([cause]) < least for part in ranks.values())]
    groups = [[cause] for cause in ordered if cause not in small] + ([small] if small else [])
    whole = sum(time.values())
    steps = sum(part.gpu_steps for part in ranks.values()) if all(part.gpu_steps for part in ranks.values()) else 0
    rows: dict[str, list[object]] = {column.name: [] for column in rank_time_causes.columns}
    for group in groups:
        total = sum(time[cause] for cause in group)
        shares = {rank: part.share(group) for rank, part in ranks.items()}
        low, high = min(shares, key=lambda rank: shares[rank]), max(shares, key=lambda rank: shares[rank])
        known = [part.what[group[0]] for part in ranks.values() if group[0] in part.what] if len(group) == 1 else []
        row = {
            "share_pct": 100 * total / whole,
            "step_us": total / 1e3 / steps if steps else None,
            "least_pct": shares[low],
            "least_rank": low,
            "most_pct": shares[high],
            "most_rank": high,
            "meaning": _TITLES[group[0]] if len(group) == 1 else f"{len(group)} other causes",
            "what": max(known, key=lambda entry: entry[1])[0] if known else None,
            "total_us": total / 1e3,
            "cause": group[0] if len(group) == 1 else OTHERS,
        }
        for name, value in row.items():
            rows[name].append(value)
    notes = [f"rank {rank}: {NO_GPU}" for rank, _ in partials if rank not in ranks]
    notes += [OF_THE_HOST] if any(part.on_host for part in ranks.values()) else []
    return Answer(rows, [*notes, *(f"rank {rank}: {part.note}" for rank, part in ranks.items() if part.note)])


@view(
    "rank_time_causes",
    columns(
        ("share_pct", "float", "%", "share of the time of all GPUs of all ranks, over their measured steps"),
        ("step_us", "float", "us", "mean per measured step of a GPU (or host); missing if a rank has no steps"),
        ("least_pct", "float", "%", "share on the rank with least of it"),
        ("least_rank", "int", "", "that rank"),
        ("most_pct", "float", "%", "share on the rank with most of it"),
        ("most_rank", "int", "", "that rank"),
        ("meaning", "text", "", "what the GPU, or while it was idle the host, did"),
        ("what", "text", "", "operator, call, annotation or Python function with most of it on one rank"),
        ("total_us", "float", "us", "sum over the GPUs of all ranks"),
        ("cause", "text", "", f"short name of the cause, as in time_causes, or {OTHERS}"),
    ),
    reduce=_over_ranks,
)
def rank_time_causes(context: Context) -> RankCauses:
    """What the time of all ranks' steps went to, by the causes of time_causes; they sum to 100 %.

    The shares of a rank are those over all its GPUs. Those with least and most of a cause tell whether it concerns the
    whole job or single ranks; time_causes has the causes of each rank and GPU. If no rank has GPU activity, the causes
    are the parts of the host's steps.

    Options:
    - least: causes with less than this share (in %) on every rank are one row together.
    """
    host = context.get(host_causes)
    if host.causes:
        shown = {each.cause: (each.what, each.total_ns) for each in host.causes if each.what is not None}
        return RankCauses({each.cause: each.total_ns for each in host.causes}, host.steps, shown, None, on_host=True)
    found = context.get(time_causes)
    measured = found.measured().sum(axis=0).tolist() if found.devices else [0] * len(CAUSES)
    most: dict[str, tuple[str, int]] = {}
    for detail in found.details:  # those with the most time first
        text = what(context, detail)
        if text is not None:
            most.setdefault(CAUSES[detail.cause], (text, detail.time_ns))
    times = {cause: ns for cause, ns in zip(CAUSES, measured, strict=True) if ns}
    return RankCauses(times, found.steps.steps * len(found.devices), most, found.steps.note())
