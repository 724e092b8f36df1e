"""What a look at the main threads of processes says, in a sentence. Pure.

Theory of operation
    The verdict is about the processes of one job that could be read, without launchers and workers. They are called by
    rank if each has a rank of its own, else by pid. Those that wait in a collective or for the GPU wait for each other
    or for work that was launched before; if there are any, those that do something else come first. Otherwise the few
    come first that do not do what most do. A rank is called missing if the job is larger than what was read.

    One look does not show who has been in a collective before, so a rank "is not in" the one in which others wait. Nor
    does it show the process group: different collectives are reported, not called a mistake. Sends and receives are not
    even reported as different: they come in pairs, which need not include the other ranks.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.output.stack_groups import (
    RUNS,
    TOGETHER,
    ReadProcess,
    collective,
    does,
    gpus_do,
    is_point_to_point,
    line_of,
    place,
    stands,
)

MOST_NAMED = 3  # of ranks, places or collectives in a sentence
_PLURALS = {"is": "are", "has": "have", "does": "do"}


def verdicts(processes: Sequence[ReadProcess]) -> list[str]:
    """One sentence for each job. processes: at least one."""
    jobs: dict[str, list[ReadProcess]] = {}
    for each in _without_helpers(processes):
        jobs.setdefault(each.stacks.process.job_id, []).append(each)
    if len(jobs) == 1:
        return [_of_job(*jobs.values())]
    return [f"{f'Job {job}' if job else 'No job'}: {_of_job(of_job)}" for job, of_job in jobs.items()]


def _of_job(processes: Sequence[ReadProcess]) -> str:
    crowd = _Crowd(processes)
    if not crowd.main:
        if len(processes) > 1:
            return f"None of the {len(processes)} processes could be read."
        return f"Process {processes[0].pid} could not be read."
    sentence = _waiting(crowd) or _few_and_many(crowd)
    if len(processes) > 1 and (missing := crowd.missing()) and missing not in sentence:
        sentence = f"{sentence}; {missing}"
    return f"{sentence[0].upper()}{sentence[1:]}."


def _without_helpers(processes: Sequence[ReadProcess]) -> Sequence[ReadProcess]:
    """Without the children of processes that have a rank, and without their parents if these have none."""
    ranked = [each for each in processes if each.rank is not None]
    pids = {(each.host, each.pid) for each in ranked}
    parents = {(each.host, each.stacks.process.parent_pid) for each in ranked}
    return [
        each
        for each in processes
        if (each.host, each.stacks.process.parent_pid) not in pids
        and not (each.rank is None and (each.host, each.pid) in parents)
    ] or processes


class _Crowd:
    """Processes and how to call them. main: the main thread of each that could be read, in the order of names."""

    def __init__(self, processes: Sequence[ReadProcess]) -> None:
        self._all = sorted(processes, key=lambda each: each.order)
        self._ranked = len({each.rank for each in processes} - {None}) == len(processes)
        self._by_rank = self._ranked and len(processes) > 1
        self._several_hosts = len({each.host for each in processes}) > 1
        self.main = {place: each.main for place, each in enumerate(self._all) if each.main is not None}

    @property
    def nouns(self) -> tuple[str, str]:
        """One and several."""
        return ("rank", "ranks") if self._by_rank else ("process", "processes")

    def count(self, some: Sequence[int]) -> str:
        """`7 ranks`, or `rank 0`."""
        return f"{len(some)} {self.nouns[1]}" if len(some) > 1 else f"{self.nouns[0]} {self._name(some[0])}"

    def every(self, some: Sequence[int]) -> str:
        """`all 8 ranks`, for all that could be read."""
        return f"all {len(some)} {self.nouns[1]}" if len(some) > 2 else f"both {self.nouns[1]}"

    def named(self, some: Sequence[int]) -> str:
        """`rank 1`, `ranks 1 and 2`, `9 ranks (0-5, 8, 11 and 1 more)`."""
        if len(some) == 1:
            return self.count(some)
        if len(some) <= MOST_NAMED:
            return f"{self.nouns[1]} {self.names(some)}"
        return f"{self.count(some)} ({self.names(some)})"

    def names(self, some: Sequence[int]) -> str:
        """`1, 2 and 5`; ranges of ranks as `0-5`."""
        if not self._by_rank:
            return listed([(self._name(each), 1) for each in some])
        return listed(_ranges([self._all[each].rank or 0 for each in some]))

    def _name(self, each: int) -> str:
        process = self._all[each]
        if self._by_rank:
            return str(process.rank)
        return f"{process.pid} on {process.host}" if self._several_hosts else str(process.pid)

    def process(self, each: int) -> ReadProcess:
        """By its place in `main`."""
        return self._all[each]

    def missing(self) -> str:
        """`rank 3 of 8 was not read`, `rank 3 could not be read`; empty if none is known to be missing."""
        sizes = {each.stacks.process.world_size for each in self._all}
        size = sizes.pop()
        ranks = [self._all[each].rank or 0 for each in self.main]
        if sizes or not self._ranked or ranks[0] < 0 or ranks[-1] >= size:
            unread = [place for place in range(len(self._all)) if place not in self.main]
            return f"{self.named(unread)} could not be read" if unread else ""
        read = [-1, *ranks, size]
        gaps = [(before + 1, after - 1) for before, after in zip(read, read[1:], strict=False) if after - before > 1]
        count = sum(last - first + 1 for first, last in gaps)
        if not count:
            return ""
        names = listed([part for first, last in gaps for part in _range(first, last)])
        return f"rank {names} of {size} was not read" if count == 1 else f"ranks {names} of {size} were not read"


def listed(parts: Sequence[tuple[str, int]]) -> str:
    """`0-5, 8, 11 and 7 more`. parts: texts, and how many things each stands for."""
    texts = [text for text, _ in parts[:MOST_NAMED]]
    if more := sum(count for _, count in parts[MOST_NAMED:]):
        texts.append(f"{more} more")
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _ranges(numbers: Sequence[int]) -> list[tuple[str, int]]:
    """Ascending numbers as `listed` takes them."""
    found: list[tuple[str, int]] = []
    first = 0
    for after, number in enumerate(numbers, 1):
        if after == len(numbers) or numbers[after] != number + 1:
            found += _range(numbers[first], number)
            first = after
    return found


def _range(first: int, last: int) -> list[tuple[str, int]]:
    if last - first < 2:
        return [(str(number), 1) for number in range(first, last + 1)]
    return [(f"{first}-{last}", last - first + 1)]


def plural(text: str) -> str:
    """`wait for a lock`, for what several do that one "waits for"; `open or look up`, of two verbs."""
    verb, space, rest = text.partition(" ")
    conjunction, second, more = rest.partition(" ")
    if second and conjunction in ("or", "and"):
        rest = f"{conjunction} {plural(more)}"
    if verb in _PLURALS:
        return f"{_PLURALS[verb]}{space}{rest}"
    return f"{verb.removesuffix('es' if verb.endswith(('ches', 'shes', 'sses')) else 's')}{space}{rest}"


def _each(crowd: _Crowd, some: Sequence[int]) -> str:
    """`rank 1 runs in step (train.py:20) and rank 2 …`, place by place."""
    places: dict[str, list[int]] = {}
    for each in some:
        places.setdefault(stands(crowd.main[each]), []).append(each)
    return listed(
        [
            (f"{crowd.named(there)} {text if len(there) == 1 else plural(text)}", len(there))
            for text, there in places.items()
        ]
    )


def _they(crowd: _Crowd, some: Sequence[int]) -> str:
    """What these do, who have just been named."""
    texts = {stands(crowd.main[each]) for each in some}
    if len(texts) > 1:
        return _each(crowd, some)
    return f"it {texts.pop()}" if len(some) == 1 else f"they {plural(texts.pop())}"


def _waiting(crowd: _Crowd) -> str:
    """The sentence if some wait in a collective or for the GPU; else empty."""
    waiting = [each for each, main in crowd.main.items() if main.wait in TOGETHER]
    if not waiting:
        return ""
    late = [each for each, main in crowd.main.items() if main.wait not in TOGETHER]
    names: dict[str, list[int]] = {}
    for each in waiting:
        if crowd.main[each].wait == pb.WAIT_COLLECTIVE:
            names.setdefault(collective(crowd.main[each]), []).append(each)
    of_all = {name: there for name, there in names.items() if not is_point_to_point(name)}
    if len(of_all) > 1 and "" not in names:
        in_pairs = [each for name, there in names.items() if name not in of_all for each in there]
        sentence = _different_collectives(crowd, of_all, sorted([*late, *in_pairs]))
    elif late:
        sentence = _lateness(crowd, waiting, late, names)
    else:
        return _all_wait(crowd, waiting, names)
    return sentence


def _different_collectives(crowd: _Crowd, names: Mapping[str, Sequence[int]], late: Sequence[int]) -> str:
    fewest_first = sorted(names.items(), key=lambda item: len(item[1]))
    parts = [(f"{crowd.names(there)} in {name}", 1) for name, there in fewest_first]
    sentence = f"{crowd.nouns[1]} wait in different collectives: {listed(parts)}"
    return f"{sentence}; {_each(crowd, late)}" if late else sentence


def _where(crowd: _Crowd, waiting: Sequence[int], names: Collection[str]) -> str:
    """In what these wait. names: of their collectives, of which one may be unknown."""
    places = [f"in {' or '.join(sorted(names)) if '' not in names else 'a collective'}"] if names else []
    if any(crowd.main[each].wait == pb.WAIT_GPU for each in waiting):
        places.append("for the GPU")
    return " or ".join(places)


def _lateness(crowd: _Crowd, waiting: Sequence[int], late: Sequence[int], names: Collection[str]) -> str:
    where, wait = _where(crowd, waiting, names), "waits" if len(waiting) == 1 else "wait"
    one = len(late) == 1
    (name, *more) = names or ("",)
    if name and not more and where == f"in {name}" and not is_point_to_point(name):
        both = f"in the {name} in which {crowd.count(waiting)} {wait}"
        return f"{crowd.named(late)} {'is' if one else 'are'} not {both}: {_they(crowd, late)}"
    do = f"{'does' if one else 'do'} not"
    return f"{crowd.count(waiting)} {wait} {where}, but {crowd.named(late)} {do}: {_they(crowd, late)}"


def _all_wait(crowd: _Crowd, waiting: Sequence[int], names: Collection[str]) -> str:
    return f"{_where_all_wait(crowd, waiting, names)}{_gpus(crowd, waiting)}"


def _gpus(crowd: _Crowd, waiting: Sequence[int]) -> str:
    """What the GPUs do for which these wait, if they all do the same."""
    found = gpus_do(crowd.process(each) for each in waiting if crowd.main[each].wait == pb.WAIT_GPU)
    if len(found) != 1:
        return ""
    ((text, gpus),) = found.items()
    return f"; its GPU {text}" if len(gpus) == len(waiting) == 1 else f"; the GPUs {plural(text)}"


def _where_all_wait(crowd: _Crowd, waiting: Sequence[int], names: Collection[str]) -> str:
    missing = crowd.missing()
    texts = {stands(crowd.main[each]) for each in waiting}
    if len(waiting) == 1:
        sentence = f"{crowd.count(waiting)} {texts.pop()}"
        return f"{missing}; {sentence}" if missing else sentence
    what = plural(texts.pop()) if len(texts) == 1 else f"wait {_where(crowd, waiting, names)}{_at(crowd, waiting)}"
    if missing:
        return f"{missing}; the other {len(waiting)} {what}"
    return f"{crowd.every(waiting)} {what}; no {crowd.nouns[0]} that was read is elsewhere"


def _at(crowd: _Crowd, some: Sequence[int]) -> str:
    """At which lines these stand."""
    frames = [place(crowd.main[each]) for each in some]
    lines = dict.fromkeys(line_of(frame) for frame in frames if frame is not None)
    return f", at {listed([(line, 1) for line in lines])}" if lines else ""


def _few_and_many(crowd: _Crowd) -> str:
    """The sentence if none waits in a collective or for the GPU."""
    everyone = list(crowd.main)
    if len(everyone) == 1:
        return f"{crowd.count(everyone)} {stands(crowd.main[everyone[0]])}"
    kinds = {each: plural(RUNS if does(main) == RUNS else stands(main)) for each, main in crowd.main.items()}
    if len({stands(main) for main in crowd.main.values()}) == 1:
        return f"{crowd.every(everyone)} {plural(stands(crowd.main[everyone[0]]))}"
    (most, number), *_ = Counter(kinds.values()).most_common()
    if number == len(everyone):
        first = place(crowd.main[everyone[0]])
        where = f"; {crowd.count(everyone[:1])}, for example, in {first.function} ({line_of(first)})" if first else ""
        return f"{crowd.every(everyone)} run{where}"
    if 2 * number <= len(everyone):
        return f"{crowd.count(everyone)} are in different places: {_each(crowd, everyone)}"
    many = [each for each in everyone if kinds[each] == most]
    few = [each for each in everyone if kinds[each] != most]
    return f"{_each(crowd, few)}, and {crowd.count(many)} {most}"
