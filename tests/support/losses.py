"""What a capture warns of on a machine that is busy, whatever is tested."""

import re
from collections.abc import Iterable

_MISSING = r"[\d.]+ [mµn]?s of (samples|readings) are missing, in \d+ places?"
_DROPPED = r"\d+ samples? (was|were) dropped because they were not stored fast enough"
_AT_AN_END = r"samples of the (first|last) [\d.]+ \w+ are missing"
LOST = re.compile(
    rf"(hardware counters|power and clocks) of GPU \d+: ({_MISSING}|{_DROPPED}|{_MISSING}; {_DROPPED})"
    rf"|(hardware counters|power and clocks) of GPU \d+: {_AT_AN_END}(; {_AT_AN_END})?"
    r"|hardware counters: sampling began late; samples from the beginning may be missing"
    r"|power and clocks of GPU \d+: there are no samples"
    r"|power and clocks: nothing was read; reading had not begun when the recording ended"
    r"|\d+ of \d+ stack samples were left out: the stacks changed while being read"
    r"|the stack sampling rate dropped from \d+ Hz to .*"
)


def without_losses(warnings: Iterable[str]) -> list[str]:
    """The warnings but those of samples that a busy machine loses."""
    return [each for each in warnings if not LOST.fullmatch(each)]
