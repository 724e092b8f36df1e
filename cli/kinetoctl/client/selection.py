"""Which processes of a host are selected."""

from dataclasses import asdict, dataclass

from kineto_protos.v1 import profiler_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Conditions that a process must meet, all of them; an empty field is no condition.

    The fields are those of Selector in profiler.proto.
    """

    pids: tuple[int, ...] = ()
    children: bool = False  # with pids: their descendants too
    command_regex: str = ""
    user: str = ""
    ranks: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    job_ids: tuple[str, ...] = ()
    job_step: str = ""
    pod_uids: tuple[str, ...] = ()
    container_ids: tuple[str, ...] = ()
    helpers: bool = False  # not a condition: includes launchers and DataLoader workers

    def __bool__(self) -> bool:
        return any(value for name, value in asdict(self).items() if name not in ("children", "helpers"))

    def to_proto(self) -> pb.Selector:
        """The selector of a request to the daemon."""
        return pb.Selector(**asdict(self))
