"""Declared schemas: the JSON form is lossless, and what is wrong is named with its place and a remedy."""

import json
from typing import Any

import pytest
from kineto_agent.protocol import schema
from kineto_agent.protocol.schema import Activity, Col, Schema, Texts, from_json, to_json
from kineto_agent.protocol.wire import MAX_FRAME_BYTES
from support.accelerators.npu import KERNEL, NPU, WAIT

DEVICE = NPU._replace(clock="device", tick_ns=2.5)


def changed(kind: int, **values: Any) -> Schema:
    return NPU._replace(records={**NPU.records, kind: NPU.records[kind]._replace(**values)})


def typed(name: str, activity: Activity) -> Schema:
    return NPU._replace(types={**NPU.types, name: activity})


def test_a_schema_survives_its_json_form() -> None:
    text = json.dumps(to_json(DEVICE))
    assert from_json(json.loads(text)) == DEVICE
    assert '"clock"' not in json.dumps(to_json(NPU))  # defaults are left out


def test_a_schema_says_which_table_a_type_has() -> None:
    assert [NPU.table(name) for name in ("kernel", "npu_runtime", "npu_wait", "cuda_runtime")] == [
        "kernel", "cuda_runtime", "npu_wait", "cuda_runtime",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            NPU._replace(name="cpu"),
            "its name is reserved (docs/record-schemas.md lists the reserved names); choose another",
        ),
        (NPU._replace(name="Npu"), "its name must be 2 to 16 lower-case letters and digits and begin with a letter"),
        (NPU._replace(framing="kinds"), "there is no framing 'kinds'; choose one of kind_u32, headed, size_field"),
        (NPU._replace(clock="utc"), "there is no clock 'utc'; choose one of realtime, monotonic"),
        (NPU._replace(tick_ns=float("nan")), "tick_ns is nan; a tick is 1e-6 to 1e9 ns long"),
        (NPU._replace(records={}), "it has 4 types and 0 records; declare 1 to 32 types and 1 to 64 records"),
        (typed("wait", Activity()), "types['wait']: it is neither one of Kineto's types (kernel, "),
        (typed("cuda_runtime", Activity()), "types['cuda_runtime']: it has the same table as 'npu_runtime'"),
        (typed("npu_slow_driver", Activity()), "types['npu_slow_driver']: readers would mistake it for Kineto's"),
        (typed("npu_more", Activity(meaning="More.")), "types['npu_more'].track: there is no track ''"),
        (typed("npu_more", Activity(track="thread")), "types['npu_more'].meaning: a text is missing"),
        (typed("kernel", Activity(track="device")), "types['kernel'].track: Kineto's tables already have one"),
        (
            typed("kernel", Activity((Col("size"),))),
            "types['kernel'].columns['size']: records cannot fill a column of this name in Kineto's table; choose",
        ),
        (
            typed("kernel", Activity((Col("grid_x", "i64"),))),
            "types['kernel'].columns['grid_x']: Kineto's column has the type i32; leave the type out",
        ),
        (
            typed("npu_more", Activity((Col("start", "i64", "a time"),), "thread", "More.")),
            "types['npu_more'].columns['start']: the table already has a column of this name; rename it",
        ),
        (
            typed("npu_more", Activity((Col("x", "int", "a number"),), "thread", "More.")),
            "types['npu_more'].columns['x']: there is no type 'int'; choose one of i8, u8,",
        ),
        (changed(1, type="gpu_memcpy"), "records[1].type: 'gpu_memcpy' is not declared; add it to types"),
        (changed(1, size=60_000), "records[1].size: it is 60000; with this framing a record has 8 to 16384 bytes"),
        (changed(1, size=20), "records[1].fields['end']: bytes 16 to 24 are outside the record's 20 bytes"),
        (
            changed(1, fields={**KERNEL.fields, "x": ("I", 20)}),
            "records[1].fields['x'] overlaps 'end', which ends at byte 24; correct the offset",
        ),
        (changed(1, fields={**KERNEL.fields, "x": ("L", 56)}), "records[1].fields['x']: there is no code 'L'"),
        (changed(1, fields={**KERNEL.fields, "x": ("999s", 0)}), "records[1].fields['x']: there is no code '999s'"),
        (changed(1, time=("begin", "end")), "records[1].time[0]: 'begin' is not a field with the code q or Q"),
        (changed(1, time=("start", "regs")), "records[1].time[1]: 'regs' is not a field with the code q or Q"),
        (changed(1, thread="unit"), "records[1].thread: activities of the type 'kernel' have none; leave it out"),
        (changed(1, device="id"), "records[1].device: 'id' is not an integer field of the record"),
        (changed(1, name="label"), "records[1].name: 'label' is neither an integer field nor a bytes field"),
        (changed(2, texts=Texts()), "records[2].name: activities need names; name a field, or give a text for all of"),
        (changed(2, constants={"why": 1}), "records[2].constants: 'why' is not a numeric column"),
        (changed(2, constants={"weight": 1 << 64}), "records[2].constants['weight']: 1844674407370955161"),
        (changed(2, fields={**WAIT.fields, "weight": ("d", 24), "why": ("H", 4)}), "records[2].fields['weight']: its"),
        (changed(9, sync=("ticks", "host")), "records[9].sync[1]: 'host' is not a field with the code q or Q"),
        (changed(9, type="npu_wait"), "records[9].time[0]: 'start' is not a field"),
        (NPU._replace(records={1 << 32: KERNEL}), "records[4294967296]: a kind is a number from 0 to 4294967294"),
        (changed(2, texts=Texts(values={1: "x"}, space=3)), "records[2].texts: texts come from a space or from"),
        (changed(2, texts=Texts(otherwise="a\nb")), "records[2].texts: 'a\\nb' is longer than 200 characters or not"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(bad: Schema, message: str) -> None:
    with pytest.raises(ValueError, match=r"^schema ") as caught:
        bad.check()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "the schema is not a JSON object of version 1; update kinetod"),
        ({**to_json(NPU), "version": 2}, "the schema is not a JSON object of version 1; update kinetod"),
        ({**to_json(NPU), "color": 1}, "schema is {'name': 'npu'"),
        ({"version": 1, "name": "npu", "types": {}}, "schema.records is missing"),
        ({**to_json(NPU), "name": 3}, "schema.name is 3; expected str"),
        ({**to_json(NPU), "tick_ns": True}, "schema.tick_ns is True; expected float"),
        ({**to_json(NPU), "records": {"one": {}}}, "schema.records['one'] is 'one'; expected int"),
        ({**to_json(NPU), "records": {"1": {"type": "", "size": 8, "fields": [3]}}}, "records['1'].fields is [3]"),
        (
            {**to_json(NPU), "records": {"1": {"type": "", "size": 8, "fields": {"a": ["I"]}}}},
            "schema.records['1'].fields['a'] is ['I']; expected a list of 2",
        ),
        ({**to_json(NPU), "records": {str(kind): {} for kind in range(2000)}}, "at most 1024 members"),
    ],
)  # fmt: skip
def test_json_of_another_form_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match="schema") as caught:
        from_json(value)
    assert message in str(caught.value)


def test_a_schema_that_does_not_fit_into_a_frame_is_refused() -> None:
    values = dict.fromkeys(range(1000), "x" * 100)
    bad = changed(2, texts=Texts(values=values))
    with pytest.raises(ValueError, match=r"its JSON has \d+ bytes, but at most 49152 fit into a frame"):
        bad.check()
    assert schema.MAX_JSON_BYTES < MAX_FRAME_BYTES


def test_values_that_cannot_be_shown_are_refused_like_others() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, 10**5000):
        with pytest.raises(ValueError, match=r"schema.name is a \w+; expected str"):
            from_json({**to_json(NPU), "name": value})
