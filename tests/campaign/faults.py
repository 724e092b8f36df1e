"""Kills at random moments of captures under load, and everything else that goes wrong on a host. Prints figures.

    python tests/campaign/faults.py [MOMENTS [FAULT ...]]

MOMENTS (default 200) are shared by the kills (`faults_kills`); each of the other faults (`faults_host`,
`faults_peers`) has a tenth of that number. After each moment, the daemon (started again if it was killed) serves
within 5 s, every capture has a true verdict, every DONE trace verifies, and every file in the store belongs to a
capture. At the end of each fault, the daemon has no more descriptors than before, and no more memory than the
allocator itself keeps. The full disk needs root. Raises AssertionError at the first violation. FAULT: only these
faults, which share MOMENTS.
"""

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaign.parts.faults import Site, site
from campaign.parts.faults_host import (
    fill_disk,
    on_small_disk,
    remove_sockets,
    remove_store,
    set_clock,
    with_own_clock,
)
from campaign.parts.faults_kills import KILLS
from campaign.parts.faults_peers import silent_connections, slow_agent, slow_client, with_short_deadline

MOMENTS = 200
WARM_UP = 4
AGENTS = 3
Moment = Callable[[Site, random.Random], None]
Ground = Callable[[], contextlib.AbstractContextManager[tuple[Site, Moment]]]


@contextlib.contextmanager
def _on(host: contextlib.AbstractContextManager[Site], moment: Moment) -> Iterator[tuple[Site, Moment]]:
    with host as running:
        yield running, moment


@contextlib.contextmanager
def _own_clock() -> Iterator[tuple[Site, Moment]]:
    with with_own_clock() as (host, clock):
        yield host, lambda each, chance: set_clock(each, clock, chance)


OTHERS: dict[str, Ground] = {
    "disk full": lambda: _on(on_small_disk(), fill_disk),
    "store removed": lambda: _on(site(), remove_store),
    "clock set": _own_clock,
    "sockets removed": lambda: _on(site(), remove_sockets),
    "slow client": lambda: _on(with_short_deadline(), slow_client),
    "slow agent": lambda: _on(with_short_deadline(), slow_agent),
    "silent connections": lambda: _on(with_short_deadline(), silent_connections),
}
FAULTS: dict[str, Ground] = {
    **{name: partial(lambda kill: _on(site(agents=AGENTS), kill), kill) for name, kill in KILLS.items()},
    **OTHERS,
}


def run(name: str, count: int) -> Site:
    """Runs that many moments on one host; compares its figures with those taken once it is warm."""
    chance = random.Random(f"{name} {count}")
    with FAULTS[name]() as (host, moment):
        for number in range(-WARM_UP, count):
            if number == 0:
                host.note_before()
                host.tally.moments = host.tally.hits = 0
            moment(host, chance)
            host.forget()
        host.note_after()
    return host


def main() -> int:
    """Runs the campaign; prints the figures to standard output."""
    moments = int(sys.argv[1]) if len(sys.argv) > 1 else MOMENTS
    chosen = {name: -(-moments // len(sys.argv[2:])) for name in sys.argv[2:]} or {
        **dict.fromkeys(KILLS, -(-moments // len(KILLS))),
        **dict.fromkeys(OTHERS, -(-moments // 10)),
    }
    began = time.monotonic()
    for name, count in chosen.items():
        print(f"{name}: {run(name, count).tally}", flush=True)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
