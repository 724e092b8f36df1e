"""One name, one concept: a public class name exists once in the products, or is listed here with the reason."""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PRODUCT = ("agent/kineto_agent", "cli/kinetoctl", "daemon/kinetod", "daemon/kineto_trace", "protos/kineto_protos")
_PUBLIC_CLASS = re.compile(r"^class ([A-Za-z]\w*)", re.MULTILINE)
_TWICE = {
    "Finding": "of a check of this host, and of an analysis: both are what users call findings",
    "NotFound": "the daemon's error, and the same at the client",
    "Result": "the message that ends a capture, and the public name of what a view returns",
    "Source": "of activities, as everywhere in the agent, and the public name of where a trace comes from",
}


def names() -> dict[str, list[str]]:
    found = defaultdict(list)
    for package in _PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.stem.endswith("_pb2"):
                continue
            for name in _PUBLIC_CLASS.findall(path.read_text()):
                found[name].append(str(path.relative_to(ROOT)))
    return found


def test_a_class_name_stands_for_one_thing() -> None:
    assert {name: places for name, places in names().items() if len(places) > 1 and name not in _TWICE} == {}
