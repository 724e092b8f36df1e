"""Builds the part of a Perfetto trace that has the table `counter`: counter tracks with units, below their GPUs."""

import json
from collections.abc import Callable

import numpy as np

from kineto_trace.formats.perfetto.packet_sections import PacketPart
from kineto_trace.formats.perfetto.perfetto_proto import UNIT_UNSPECIFIED, Counter
from kineto_trace.formats.perfetto.perfetto_tracks import Tracks
from kineto_trace.formats.shared.counter_series import HardwareSeries, series_points
from kineto_trace.formats.shared.native_packets import DOUBLE_COUNTER
from kineto_trace.model.trace import Trace

Place = tuple[int, str, str]  # the track above a counter's, and the counter's pid and tid in a Chrome trace, as JSON


def hardware_counters(
    trace: Trace, tracks: Tracks, ids: dict[int, list[str]], place: Callable[[HardwareSeries], Place]
) -> list[PacketPart]:
    """Returns one part with all points of all series, or none. Adds to `ids` what their rows are in a Chrome trace."""
    times, values, codes, numbers = [], [], [], []
    categories: dict[str, int] = {}
    for series, points in series_points(trace):
        above, pid, tid = place(series)
        track = tracks.counter(above, series.title, Counter(UNIT_UNSPECIFIED, series.unit))
        ids[track] = [pid, tid, json.dumps(series.shown), json.dumps("")]
        code = [categories.setdefault(text, len(categories)) for text in series.categories()]
        times.append(points.time)
        values.append(points.value)
        codes.append(np.array(code, np.int32)[points.what])
        numbers.append(np.full(len(points.time), track, np.uint32))
    if not times:
        return []
    start = np.concatenate(times)
    part = PacketPart(
        type=DOUBLE_COUNTER,
        category=np.concatenate(codes),
        categories=list(categories),
        start=start,
        end=start,
        track=np.concatenate(numbers),
        name=None,
        value=np.concatenate(values),
    )
    return [part]
