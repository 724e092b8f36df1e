"""What a capture warns of on a machine that is busy, whatever is tested."""

import re
from collections.abc import Iterable

_MISSING = r"(samples|readings) of [\d.]+ ms are missing, in \d+ places?"
_DROPPED = r"\d+ samples? (was|were) dropped because they were not stored fast enough"
LOST = re.compile(
    rf"(hardware counters|power and clocks) of GPU \d+: ({_MISSING}|{_DROPPED}|{_MISSING}; {_DROPPED})"
    r"|\d+ of \d+ stack samples were left out: the stacks changed while they were read"
    r"|the sampling rate of stacks dropped from \d+ Hz to .*"
)


def without_losses(warnings: Iterable[str]) -> list[str]:
    """The warnings but those of samples that a busy machine loses."""
    return [each for each in warnings if not LOST.fullmatch(each)]
