"""The recurrent network beside a table in memory, of which it reads rows after each step.

The memory is taken away from outside: the control reads the same table, but from memory.
"""

from rootcause.programs import services


def main(planted: str) -> None:
    """Train; `planted` changes nothing here."""
    services.main("look_up")
