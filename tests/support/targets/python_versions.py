"""Tests that are repeated under every Python of this machine."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest

OWN = "%d.%d" % sys.version_info[:2]


def other_versions_slow(executables: Sequence[str]) -> list[Any]:
    """Parameters of a test. Only that of the Python which runs the tests is part of `make test`."""
    if len(executables) == 1:
        return list(executables)
    return [path if OWN in path else pytest.param(path, marks=pytest.mark.slow) for path in executables]
