"""The HLO instruction behind an activity, as arguments in JSON: {"hlo_op": …, "hlo_module": …}, without the braces.

Their names are those of XLA's own profiles, so that users of XProf find them again: hlo_op, hlo_module. op_name is the
path of the JAX operation ("jit(update)/jvp()/dot_general"), source the line of the program that it came from.
"""

import json

from kineto_trace.model.trace import NO_STRING, StringTable

KEYS = ("hlo_op", "hlo_module", "op_name", "source")
MOST_TEXT = 300  # characters of a value
MOST_DISTINCT = 200_000  # texts of one trace


class HloArguments:
    """Turns the values of KEYS into numbers of ready-made texts. full: values did not fit any more."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._numbers: dict[tuple[str, ...], int] = {}
        self.full = False

    def number(self, *values: str) -> int:
        """Returns the number of the text in the string table; NO_STRING if all values are empty."""
        found = self._numbers.get(values)
        if found is not None:
            return found
        if len(self._numbers) >= MOST_DISTINCT:
            self.full = True
            return NO_STRING
        members = [
            f"{json.dumps(key)}:{json.dumps(value[:MOST_TEXT], ensure_ascii=False)}"
            for key, value in zip(KEYS, values, strict=False)
            if value
        ]
        found = self._numbers[values] = self._strings.add(",".join(members)) if members else NO_STRING
        return found
