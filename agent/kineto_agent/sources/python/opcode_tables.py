"""Which opcodes of the running interpreter stand for which instruction, so that bytecode can be read out of process.

The interpreter specialises bytecode while it runs: opcodes are replaced by others that have no stable numbers. Python's
own module dis knows them. It is never imported here: torch and inspect have done so, and without it nothing is told.
"""

import sys
from typing import Any, Dict, List, Optional


def opcode_table() -> Optional[Dict[str, List[int]]]:
    """For each instruction the units of cache that follow it, then its opcodes; None if they are not known.

    From 3.11 on. Instrumented opcodes, which profilers and debuggers put in place, are not among them.
    """
    dis = sys.modules.get("dis")
    try:
        return _table(dis) if dis is not None and sys.version_info >= (3, 11) else None
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return None  # another release keeps them in another way


def _table(dis: Any) -> Dict[str, List[int]]:
    caches = dis._inline_cache_entries
    counts = dict(zip(dis.opname, caches)) if isinstance(caches, list) else caches
    table: Dict[str, List[int]] = {}
    for name, number in dis._all_opmap.items():
        if number < 256 and not name.startswith("INSTRUMENTED_") and name != "ENTER_EXECUTOR":
            base = dis.deoptmap.get(name, name)
            table.setdefault(base, [int(counts.get(base, 0))]).append(int(number))
    return table
