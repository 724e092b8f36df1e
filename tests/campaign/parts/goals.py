"""Figures of a campaign and their limits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """One figure and its upper limit; None: shown only."""

    name: str
    value: float
    limit: float | None = None

    @property
    def met(self) -> bool:
        return self.limit is None or self.value <= self.limit

    def __str__(self) -> str:
        goal = "" if self.limit is None else f"   goal <= {self.limit:<6g} {'ok' if self.met else 'MISSED'}"
        return f"{self.name:<56}{self.value:>10.2f}{goal}"
