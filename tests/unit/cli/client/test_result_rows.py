import math
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from kinetoctl.client.result_rows import exact


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (0.1, 0.1),
        (math.nan, None),
        (math.inf, None),
        (2**63, 2**63),
        (Decimal("12"), 12),
        (Decimal("1.5"), 1.5),
        (b"\x01\xff", "01ff"),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        ({"a": [math.nan, 1]}, {"a": [None, 1]}),
        (None, None),
    ],
)
def test_values_for_programs(value: Any, plain: Any) -> None:
    assert exact(value) == plain
