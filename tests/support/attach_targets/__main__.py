"""Runs one target: `python -m support.attach_targets KIND CONTROL-FILE`; a report in JSON on standard output."""

import importlib
import json
import sys
from typing import Callable, Dict, List

from support.attach_targets.control import Control, End, Surroundings, Target, Wrong

MODULES = ("loops", "long_calls", "machine", "threads", "processes", "asleep")  # the first ones import least
MOST_WRONG = 20


def find(kind: str) -> Callable[[], Target]:
    """The maker of that kind; nothing beyond it is imported. Raises SystemExit."""
    for name in MODULES:
        kinds: Dict[str, Callable[[], Target]] = importlib.import_module("support.attach_targets." + name).KINDS
        if kind in kinds:
            return kinds[kind]
    raise SystemExit("there is no target %r" % kind)


def main() -> int:
    """Its exit status tells nothing about the results: the report does."""
    control = Control(sys.argv[2])
    wrong: List[str] = []
    target = find(sys.argv[1])()
    for_good = sys.argv[1].startswith("for_good")
    if not for_good:
        target.lap()
    surroundings = Surroundings()
    control.ready()
    try:
        while control.running():
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
    print(json.dumps({"wrong": wrong[:MOST_WRONG], "wrong_count": len(wrong)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
