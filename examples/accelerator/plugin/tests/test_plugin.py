"""What kinetod would refuse, and whether the records are what the library writes."""

import struct

from kinetod.plugins.accelerator import check
from kinetod_pebble import PLUGIN, SCHEMA


def test_kinetod_takes_the_plug_in() -> None:
    check(PLUGIN)


def test_the_records_have_the_layout_of_the_library() -> None:
    layout = struct.Struct("<IIQQIIIIQ")  # struct pebble_record
    assert {record.size for record in SCHEMA.records.values()} == {layout.size}
