"""Live traces of programs whose threads run in interpreters with a GIL of their own. The campaign makes many."""

from pathlib import Path

import pytest
from campaign.parts.attach_harness import version_of
from support.service.daemon import Daemon
from support.targets.own_gil import ALL_INSIDE, UNTOUCHED, own_gil_target, pythons_with_own_gils

pytestmark = pytest.mark.slow

every_python = pytest.mark.parametrize("python", pythons_with_own_gils(), ids=version_of)
NOT_THERE = (
    "calls in sub-interpreters were not recorded: exact calls cover the main interpreter only; leave out "
    "--with-stack=trace to have the stacks of all interpreters sampled"
)


@every_python
def test_stacks_of_all_interpreters_are_sampled_and_the_program_goes_on(daemon: Daemon, python: Path) -> None:
    with own_gil_target(python) as target:
        traces = [target.trace(daemon, "1s", []) for _ in range(3)]
        assert [(trace.verdict, trace.inside) for trace in traces] == [("VERDICT_DONE", ALL_INSIDE)] * 3
        assert target.finish() == UNTOUCHED


@every_python
def test_exact_calls_leave_other_interpreters_alone_and_say_so(daemon: Daemon, python: Path) -> None:
    with own_gil_target(python) as target:
        traces = [target.trace(daemon, "300ms", ["--with-stack=trace"]) for _ in range(3)]
        assert [(trace.verdict, NOT_THERE in trace.warnings) for trace in traces] == [("VERDICT_DONE", True)] * 3
        assert target.finish() == UNTOUCHED
