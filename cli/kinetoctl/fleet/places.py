"""Where a capture of many hosts runs."""

from dataclasses import dataclass

from kineto_protos.v1 import profiler_pb2 as pb


@dataclass(frozen=True, slots=True)
class Place:
    """One daemon to ask, and what to select there.

    host: its name for people; address: gRPC address of its daemon; selector: what is meant on this host, to which
    the conditions of the command line are added.
    """

    host: str
    address: str
    selector: pb.Selector
