"""agent/native/kit/vendor.h says the same as kineto_agent/protocol/records.py."""

import re

from kineto_agent.protocol import records
from support.machine.native import COLLECTOR

HEADER = (COLLECTOR / "kit" / "vendor.h").read_text()


def number(name: str) -> int:
    found = re.search(rf"#define {name} (\w+?)u?\b(?! *\w)", HEADER)
    assert found is not None
    return int(found.group(1), 0)


def test_texts_have_the_same_kind() -> None:
    assert number("KIT_KIND_TEXT") == records.KIND_TEXT


def test_the_first_string_space_of_vendors_is_the_same() -> None:
    assert number("KIT_FIRST_SPACE") == records.FIRST_VENDOR_SPACE


def test_the_arenas_own_spaces_lie_below_those_of_vendors() -> None:
    own = [value for name, value in vars(records).items() if name.startswith("SPACE_")]
    assert max(own) < records.FIRST_VENDOR_SPACE


def test_a_header_has_the_same_fields() -> None:
    fields = re.findall(r"(uint32_t) (\w+);", HEADER.split("struct kit_header {")[1].split("};")[0])
    assert fields == [("uint32_t", "kind"), ("uint32_t", "bytes")]
    assert records.HEADED_RECORD.size == records.HEADED_ALIGNMENT == 8
