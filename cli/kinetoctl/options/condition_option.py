"""Conditions on what a GPU does, on the command line: `sm_active<30% for 10s`. Pure."""

import math
import re

from kineto_protos.options import Parsed

from kinetoctl.base.value_types import parse_positive_duration_ns
from kinetoctl.client.gpu_condition import DEFAULT_LASTS_NS, FIGURES, SHARES, GpuCondition

_FORM = "NAME<NUMBER or NAME>NUMBER, with or without `for DURATION`, for example 'sm_active<30% for 10s'"
_CONDITION = re.compile(
    r"\s*(?P<figure>\w+)\s*(?P<sign>[<>])\s*(?P<limit>[-+.\deE]+)\s*(?P<percent>%?)(?:\s+for\s+(?P<lasts>\S+))?\s*"
)


def parse_gpu_condition(text: str) -> GpuCondition:
    """Raises ValueError."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(f"expected {_FORM}, got {text!r}")
    figure = match["figure"]
    if figure not in FIGURES:
        raise ValueError(f"a GPU has no figure {figure!r}; there are {', '.join(FIGURES)}")
    try:
        limit = float(match["limit"])
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ValueError(f"expected {_FORM}, got the number {match['limit']!r}")
    if match["percent"] and figure not in SHARES:
        raise ValueError(f"{figure} is no share: give its limit without %")
    limit = limit / 100 if match["percent"] else limit
    if figure in SHARES and not 0 <= limit <= 1:
        raise ValueError(f"{figure} is a share: give its limit from 0% to 100%, or from 0 to 1")
    lasts_ns = parse_positive_duration_ns(match["lasts"]) if match["lasts"] else DEFAULT_LASTS_NS
    return GpuCondition(figure=figure, below=match["sign"] == "<", limit=limit, lasts_ns=lasts_ns)


GPU_CONDITION = Parsed("condition", parse_gpu_condition)
