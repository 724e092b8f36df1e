"""What the end of a recording tells the user."""

from typing import Callable, List, Protocol


class StopResult(Protocol):
    """What kc_stop_result and kit_stop_result have in common."""

    names_lost: int
    irregular_records: int
    timed_out: int
    flush_result: int


def stop_warnings(
    title: str, stopped: StopResult, limit_ms: int, calls_unnamed: int, result_text: Callable[[int], str]
) -> List[str]:
    """Warnings for the user, [] if all is well. title: of the library. limit_ms: what the stop was given."""
    warnings = []
    if stopped.timed_out:
        warnings.append("%s did not hand over its last records within %d ms: the trace ends early" % (title, limit_ms))
    if stopped.flush_result != 0:
        text = result_text(stopped.flush_result)
        warnings.append("%s's last flush failed (%s): the trace may end early" % (title, text))
    lost = stopped.names_lost + calls_unnamed
    if lost:
        warnings.append("%d kernel and call names are missing: the string table was full" % lost)
    if stopped.irregular_records:
        warnings.append(
            "%d records were dropped because this %s gives records of one kind in several sizes"
            % (stopped.irregular_records, title)
        )
    return warnings
