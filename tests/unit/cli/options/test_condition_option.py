"""Conditions on what a GPU does, on the command line."""

import re

import pytest
from google.protobuf.descriptor import FieldDescriptor
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client.gpu_condition import FIGURES, GpuCondition
from kinetoctl.options.condition_option import parse_gpu_condition

S = 10**9


@pytest.mark.parametrize(
    ("text", "figure", "below", "limit", "lasts_s"),
    [
        ("sm_active<30%", "sm_active", True, 0.3, 5),
        (" sm_active < 0.3 for 10s ", "sm_active", True, 0.3, 10),
        ("utilization>95% for 500ms", "utilization", False, 0.95, 0.5),
        ("power_watts>650.5 for 2min", "power_watts", False, 650.5, 120),
        ("nvlink_transmit_bytes_per_second<1e9", "nvlink_transmit_bytes_per_second", True, 1e9, 5),
    ],
)
def test_a_condition_has_a_figure_a_limit_and_how_long_it_has_to_hold(
    text: str, figure: str, below: bool, limit: float, lasts_s: float
) -> None:
    found = parse_gpu_condition(text)
    assert found == GpuCondition(figure=figure, below=below, limit=limit, lasts_ns=int(lasts_s * S))
    assert found.holds(limit - 0.01) == below and found.holds(limit + 0.01) != below and not found.holds(limit)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected NAME<NUMBER"),
        ("sm_active", "expected NAME<NUMBER"),
        ("sm_active=30%", "expected NAME<NUMBER"),
        ("sm_active<30% for", "expected NAME<NUMBER"),
        ("sm_active<1.2.3", "the number '1.2.3'"),
        ("sm_active<1e999", "the number '1e999'"),
        ("sm_activity<30%", "a GPU has no figure 'sm_activity'; there are utilization, "),
        ("sm_active<30", "sm_active is a share: give its limit from 0% to 100%"),
        ("sm_active<-1%", "sm_active is a share"),
        ("power_watts>90%", "power_watts is no share"),
        ("sm_active<30% for 0s", "expected a duration above zero"),
        ("sm_active<30% for soon", "soon"),
    ],
)
def test_what_is_wrong_with_a_condition_is_told(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        parse_gpu_condition(text)


def test_a_condition_is_shown_as_people_read_it() -> None:
    assert str(parse_gpu_condition("sm_active<0.3 for 90s")) == "sm_active < 30 % for 1 min 30 s"
    assert str(parse_gpu_condition("power_watts>650")) == "power_watts > 650 for 5 s"


def test_every_figure_that_grows_and_falls_is_there() -> None:
    fields = pb.GpuSample.DESCRIPTOR.fields
    measured = {each.name for each in fields if each.type == FieldDescriptor.TYPE_DOUBLE}
    assert set(FIGURES) == measured - {"power_limit_watts"}
