"""Runs one target: `python -m campaign.attach_targets KIND CONTROL-FILE [LAPS]`; prints a report in JSON."""

import importlib
import json
import sys
from typing import Callable, Dict, List

from campaign.attach_targets.control import LAPS, Control, End, Surroundings, Target, Wrong

# The first ones import least.
MODULES = (
    "loops",
    "long_calls",
    "machine",
    "threads",
    "processes",
    "asleep",
    "instruments",
    "replaced",
    "scarce",
    "limits",
    "torch_run",
)
MOST_WRONG = 20


def find(kind: str) -> Callable[[], Target]:
    """The maker of that kind; nothing beyond it is imported. Raises SystemExit."""
    for name in MODULES:
        kinds: Dict[str, Callable[[], Target]] = importlib.import_module("campaign.attach_targets." + name).KINDS
        if kind in kinds:
            return kinds[kind]
    raise SystemExit("there is no target %r" % kind)


def main() -> int:
    """Its exit status tells nothing about the results: the report does."""
    control = Control(sys.argv[2])
    wrong: List[str] = []
    target = find(sys.argv[1])()
    most_laps = int(sys.argv[3]) if len(sys.argv) > 3 else None
    for_good = sys.argv[1].startswith("for_good")
    if not for_good:
        target.lap()
    surroundings = Surroundings()
    control.ready()
    try:
        while control.running() and control.words[LAPS] != most_laps:
            try:
                target.lap()
            except Wrong as error:
                wrong.append(str(error))
    except End:
        pass
    for check in (surroundings.check, target.close):
        try:
            check()
        except Wrong as error:
            wrong.append(str(error))
    print(json.dumps({"wrong": wrong[:MOST_WRONG], "wrong_count": len(wrong), "result": target.result()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
