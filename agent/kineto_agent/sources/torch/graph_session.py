"""Sends the captured CUDA graphs (graph_captures.py) to the daemon at the end of a recording.

Theory of operation
    Graphs are mostly captured before a recording, some during it. So there is no recording of them: one session,
    created when everything else has stopped, writes all of them into its own arena.
"""

from typing import Any, Dict, Optional

from kineto_agent.protocol.records import GRAPH_NODES_FORMAT
from kineto_agent.sources.file_arena import BUFFER_BYTES, FileArena
from kineto_agent.sources.interface import SourceCounts, SourceOutcome
from kineto_agent.sources.torch.graph_captures import CAPTURES, GraphCaptures, KeptGraphs

NAME = "graphs"


class GraphNodesSession:
    """A SourceSession that is not selected by activity type."""

    format = GRAPH_NODES_FORMAT
    yields = False

    def __init__(self, kept: KeptGraphs, buffer_limit_bytes: int) -> None:
        """Create the arena. Raises SourceError."""
        self.metadata: Dict[str, Any] = {"dtypes": kept.dtypes, "left_out": kept.left_out}
        self._graphs = kept.graphs
        size = sum(map(len, kept.graphs))
        self._arena = FileArena(NAME, min(size + BUFFER_BYTES, buffer_limit_bytes))
        self.arena_fd = self._arena.fd

    def start(self) -> None:
        """Write the graphs."""
        for graph in self._graphs:
            self._arena.write(graph)

    def counts(self) -> SourceCounts:
        """Counts of the written graphs."""
        return self._arena.counts()

    def stop(self) -> SourceOutcome:
        """Publish the rest."""
        self._arena.finish()
        return SourceOutcome(self.counts(), {}, [], detach_ns=0, cpu_ns=0)

    def give_way(self) -> None:
        """Do nothing: it uses no library."""

    def close(self) -> None:
        """Free the arena."""
        self._arena.close()


def session(buffer_limit_bytes: int, captures: GraphCaptures = CAPTURES) -> Optional[GraphNodesSession]:
    """Return a session for all graphs known now; None if there are none. Raises SourceError."""
    kept = captures.kept()
    return GraphNodesSession(kept, buffer_limit_bytes) if kept.graphs or kept.left_out else None
