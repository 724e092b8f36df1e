"""What a trace says of itself is told from its head, whatever that holds."""

import json

from kineto_trace.open import trace_source
from kineto_trace.open.trace_source import TraceOrigin, origin_in


def head(pid: int) -> bytes:
    events = [{"name": "process_name", "ph": "M", "pid": pid}]
    return json.dumps({"kinetod": {"capture_id": "c1"}, "host_name": "h", "traceEvents": events}).encode()


def test_a_head_names_the_process_and_the_capture() -> None:
    assert origin_in(head(7)) == TraceOrigin(process="h 7", capture="c1")


def test_a_pid_with_thousands_of_digits_is_none() -> None:
    assert origin_in(head(7).replace(b": 7", b": " + b"7" * 6000)) == TraceOrigin(capture="c1")


def test_a_head_that_repeats_a_key_is_not_read_again_and_again() -> None:
    repeated = b'"kinetod":{' * 1000
    assert origin_in(repeated + head(7)) == TraceOrigin()
    few = b'"kinetod":{' * (trace_source._PLACES - 1)
    assert origin_in(few + head(7)).capture == "c1"
