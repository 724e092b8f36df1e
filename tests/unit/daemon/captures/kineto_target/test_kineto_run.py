"""What libkineto is told to call its file."""

from kinetod.captures.kineto_target.kineto_run import new_destination


def test_nobody_can_guess_the_name() -> None:
    first, second = new_destination("c1"), new_destination("c1")
    assert first.path.startswith("/tmp/kinetod-c1-")
    assert (first.stem != second.stem, first.trace_id != second.trace_id) == (True, True)
    assert 0 <= first.trace_id < 1 << 63
