"""How many datagrams of a process, and of all processes of a user, are looked at.

Theory of operation
    Token buckets, taken from before anything else is done about a datagram: first the process's, so that one that
    floods uses up only what is its own, then the user's, against one that forks. A libkineto polls every 5 s, and a job
    may start a thousand processes at once. What is remembered is bounded: a user's processes are forgotten together
    once they are too many, of too many users the one that came first, and all of them once they have been quiet. Who is
    forgotten begins with a full bucket.

    Root's processes share one bucket, those of containers that run as root included.
"""

from dataclasses import dataclass, field

PROCESS_PER_S, PROCESS_BURST = 5.0, 20.0
USER_PER_S, USER_BURST = 500.0, 2000.0
MAX_PROCESSES_PER_USER = 4096
MAX_USERS = 4096


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float

    def take(self, now_s: float, per_s: float, burst: float) -> bool:
        self.tokens = min(burst, self.tokens + (now_s - self.at_s) * per_s)
        self.at_s = now_s
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


@dataclass(slots=True)
class _User:
    bucket: _Bucket
    processes: dict[int, _Bucket] = field(default_factory=dict)


class PollLimits:
    """Not thread-safe; times are monotonic seconds."""

    def __init__(self) -> None:
        self._users: dict[int, _User] = {}

    def allows(self, uid: int, pid: int, now_s: float) -> bool:
        """Whether to look at one more datagram of this process."""
        user = self._users.get(uid)
        if user is None:
            if len(self._users) >= MAX_USERS:
                del self._users[next(iter(self._users))]
            user = self._users[uid] = _User(_Bucket(USER_BURST, now_s))
        process = user.processes.get(pid)
        if process is None:
            if len(user.processes) >= MAX_PROCESSES_PER_USER:
                user.processes.clear()
            process = user.processes[pid] = _Bucket(PROCESS_BURST, now_s)
        return process.take(now_s, PROCESS_PER_S, PROCESS_BURST) and user.bucket.take(now_s, USER_PER_S, USER_BURST)

    def forget_quiet(self, now_s: float) -> None:
        """Forgets those whose buckets are full again by now: it makes no difference to them."""
        for uid, user in list(self._users.items()):
            for pid, bucket in list(user.processes.items()):
                if (now_s - bucket.at_s) * PROCESS_PER_S >= PROCESS_BURST:
                    del user.processes[pid]
            if not user.processes and (now_s - user.bucket.at_s) * USER_PER_S >= USER_BURST:
                del self._users[uid]
