"""Ten thousand traces of processes that become another user's by execve meanwhile; as root.

    .venv/bin/python tests/campaign/exec_race.py [--tries 10000] [--seed N]

The tries cover both deployments: a daemon of root, and a front end without rights beside the privileged helper, as
two users. In each, half of the tries change the process at an exact step, at which the daemon or its helper waits
(support/stepped.py); the other half change it at a random moment, at which nothing waits. The process becomes bob's
or root's; a third of them have agents that connect by themselves. Prints what became of the tries, and everything
that must not happen: a trace with the other user's functions, code of ours in the other user's program, a capture of
another user's process, or a line of the audit log that names the wrong user. Exit status 1 if there is anything.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaign.parts.exec_race import ADA, BOB, ROOT_DAEMON, WITH_HELPER, Race
from support.service.stepped import DAEMON_STEPS

LONGEST_S = 0.25  # from the request to the end of a capture
REPORT_EVERY = 500
MOST_UNREACHED = 0.1  # share of the tries at a step; beyond it the steps do not fit the code


class Tally:
    """Outcomes of the tries, counted by several threads."""

    def __init__(self) -> None:
        self.results: dict[str, Counter[str]] = {}
        self.wrong: list[str] = []
        self.unreached = self.changed = self.tries = 0
        self._lock = threading.Lock()

    def one(self, race: Race, kind: str, step: str, chance: random.Random) -> None:
        """Makes one try."""
        uid, agent = chance.choice((BOB, 0)), chance.random() < (1 / 3 if step in (*DAEMON_STEPS, "") else 0)
        delay_s = chance.random() * LONGEST_S if not step else 0.0
        outcome = race.attempt(step, uid=uid, agent=agent, delay_s=delay_s)
        with self._lock:
            self.tries += 1
            self.changed += outcome.changed
            self.unreached += not outcome.reached
            self.results.setdefault(f"{race.deployment}, {kind}", Counter())[outcome.result] += 1
            how = f"{race.deployment}, step {step or f'random after {delay_s * 1000:.1f} ms'}, uid {uid}, agent {agent}"
            self.wrong += [f"{how}: {each}" for each in outcome.wrong]
            if self.tries % REPORT_EVERY == 0:
                print(f"{self.tries} tries, {self.changed} changed in time, {len(self.wrong)} wrong", flush=True)


def check_audit(race: Race, tally: Tally) -> None:
    """Every process that the log says was traced was ada's; what was refused is bob's, root's, or ada's still: in the
    middle of an execve, when the new program's memory is there and its user not yet.
    """
    for line in race.audited():
        targets = line.get("targets") or []
        assert isinstance(targets, list)
        if line["decision"] == "allowed" and any(target["uid"] != ADA for target in targets):
            tally.wrong.append(f"{race.deployment}: the audit log allowed {line}")
        if line.get("reason") == "NOT_YOUR_PROCESS" and line.get("target_uid", BOB) not in (ADA, BOB, 0):
            tally.wrong.append(f"{race.deployment}: the audit log names the wrong user: {line}")


def run(deployment: str, tries: int, seed: int, tally: Tally, *, steps: bool) -> None:
    """Makes the given number of tries, one after the other."""
    chance = random.Random(seed)
    with Race(deployment, steps=steps) as race:
        names = list(race.steps_of) if steps else [""]
        for number in range(tries):
            step = names[number % len(names)]
            tally.one(race, "at a step" if steps else "at random", step, chance)
        check_audit(race, tally)


def main() -> int:
    """Runs the campaign; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    options = parser.parse_args()
    print(f"seed {options.seed}")
    tally, began = Tally(), time.monotonic()
    threads = [
        threading.Thread(
            target=run, args=(deployment, options.tries // 4, options.seed + number, tally), kwargs={"steps": steps}
        )
        for number, (deployment, steps) in enumerate(
            (deployment, steps) for steps in (True, False) for deployment in (ROOT_DAEMON, WITH_HELPER)
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kind, results in sorted(tally.results.items()):
        listed = ", ".join(f"{count} {result}" for result, count in results.most_common())
        print(f"{kind}: {sum(results.values())} tries: {listed}")
    print(
        f"{tally.tries} tries in {time.monotonic() - began:.0f} s; in {tally.changed} the other user's program ran "
        f"before the end, {tally.unreached} did not come to their step; wrong: {len(tally.wrong)}"
    )
    for each in tally.wrong[:50]:
        print(f"WRONG {each}")
    if tally.unreached > MOST_UNREACHED * options.tries / 2:
        print(f"{tally.unreached} tries did not come to their step: the campaign says nothing about those steps")
        return 1
    return 1 if tally.wrong or tally.tries < options.tries // 4 * 4 else 0


if __name__ == "__main__":
    sys.exit(main())
