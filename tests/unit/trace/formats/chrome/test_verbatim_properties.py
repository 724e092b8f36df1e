import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kineto_trace.model.activity_tables import CATEGORIES, KINDS
from support.trace_files.chrome_files import back, load, written

KEYS = sorted({arg.key for args in KINDS.values() for arg in args} | {"Call stack", "blocks per SM", "", 'a"b\\'})
CATEGORY_NAMES = [("cuda" + text) if end else text for text, end, _kind in CATEGORIES]

texts = st.text(max_size=12) | st.sampled_from(["[memory]", "N/A", "\ud800", "stream 7", "C:\\Users", "\x00"])
integers = (
    st.integers(-(2**31), 2**32)
    | st.integers(-(2**64), 2**65)
    | st.sampled_from([0, -1, 2**16, 2**31, 2**32 - 1, 2**53 + 1, 2**62, -(2**62), 2**63 - 1, 2**63, 2**64 - 1])
)
floats = st.floats(allow_nan=False) | st.sampled_from([0.0, -0.0, 0.1, 1e22, 5e-324, 0.242424, 54.229209764170456])
scalars = st.none() | st.booleans() | integers | floats | texts
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(texts, st.lists(scalars, max_size=1), max_size=2)
times = (
    st.integers(0, 10**9)
    | st.integers(0, 10**15).map(lambda ns: ns / 1000)
    | st.sampled_from([4306452651095.381, 0.8, 1621401187223005.5625, -3.5, 1e300, 123456789.123456789])
)
args = st.dictionaries(st.sampled_from(KEYS) | texts, values | st.lists(integers, min_size=3, max_size=3), max_size=4)
known_members: dict[str, Any] = {
    "ph": st.sampled_from("XXXXiMCsftbe") | texts,
    "cat": st.sampled_from(CATEGORY_NAMES) | texts,
    "name": texts | values,
    "pid": integers | texts | values,
    "tid": integers | texts | values,
    "ts": times | values,
    "dur": times | values,
    "id": integers | texts | values,
    "args": args | values,
    "s": st.sampled_from(["t", "g", "p"]) | values,
    "bp": st.just("e") | values,
}


def _event(members: dict[str, Any], name: str, more: Any, backwards: bool) -> dict[str, Any]:
    found = {**members, name: more} if name not in members else members
    return dict(reversed(found.items())) if backwards else found


events = st.builds(_event, st.fixed_dictionaries({}, optional=known_members), texts, scalars, st.booleans())


def typed(value: Any) -> Any:
    """With the types of numbers, which == does not look at; the order of members is not kept."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return (type(value), repr(value)) if isinstance(value, float) else (type(value), value)


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(
    st.lists(events, max_size=2),
    st.dictionaries(texts.filter(lambda key: key != "traceEvents"), values, max_size=1),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_a_document_comes_back_as_it_was(
    rows: list[dict[str, Any]], head: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps({**head, "traceEvents": [{"ph": "M"}, *rows]}, ensure_ascii=ascii_only, indent=indent)
    if not ascii_only:
        text = text.encode("utf-8", "replace").decode()  # half characters cannot be in a file
    assert typed(back(text)) == typed(json.loads(text))


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(st.lists(events, min_size=1, max_size=2))
def test_what_was_written_is_written_again_byte_for_byte(rows: list[dict[str, Any]]) -> None:
    once = written(load(json.dumps([{"ph": "M"}, *rows])))
    assert written(load(once)) == once
