"""How long a recording lasted."""

from kineto_trace.model.context import Context
from kineto_trace.structure.recording_span import recording_span
from support.trace_files import traces


def test_the_recording_lasts_from_the_first_event_to_the_last() -> None:
    trace = traces.trace(
        {
            "kernel": [{"name": "k", "start": 4_000, "duration": 9_000}],
            "cuda_driver": [{"name": "cuInit", "start": 0, "duration": 50_000}],
        }
    )
    assert recording_span(Context(trace)) == (traces.START_NS + 4_000, traces.START_NS + 13_000)
