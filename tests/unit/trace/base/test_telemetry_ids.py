import pytest
from kineto_trace.base.telemetry_ids import TraceContext, split_name

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_a_traceparent_names_a_trace_and_a_span() -> None:
    assert TraceContext.parse(VALID) == TraceContext(TRACE, SPAN)


def test_a_later_version_may_say_more() -> None:
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-00-more") == TraceContext(TRACE, SPAN)


@pytest.mark.parametrize(
    "text",
    [
        "",
        VALID.upper(),
        VALID + "-more",  # version 00 has four members
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        VALID + "\n",
    ],
)
def test_what_is_no_traceparent_names_none(text: str) -> None:
    assert TraceContext.parse(text) is None


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (f"request traceparent={VALID}", "request"),
        (f"request, traceparent: {VALID}", "request,"),
        (f"traceparent={VALID}", "traceparent"),
    ],
)
def test_the_name_of_an_annotation_may_end_in_one(name: str, shown: str) -> None:
    assert split_name(name) == (shown, TraceContext(TRACE, SPAN))


@pytest.mark.parametrize("name", ["step", VALID, f"xtraceparent={VALID}", f"traceparent={VALID} x", "traceparent=00-1"])
def test_any_other_name_stays_as_it_is(name: str) -> None:
    assert split_name(name) == (name, None)
