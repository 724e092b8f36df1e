"""For any CPython from 3.9 on: prints the line tables of the functions in some files, and what they mean, as JSON.

A list of [kind, first line, table as hexadecimal text, [[first offset, offset behind it, line or null], ...]].
"""

import dis
import json
import sys
import types
from pathlib import Path
from typing import Any, Iterator, List, Tuple


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


def described(code: Any) -> Tuple[int, bytes, List[Any]]:
    if sys.version_info < (3, 10):
        starts = list(dis.findlinestarts(code))
        ends = [offset for offset, _ in starts[1:]] + [len(code.co_code)]
        return 9, code.co_lnotab, [[start, end, line] for (start, line), end in zip(starts, ends)]
    return 10 if sys.version_info < (3, 11) else 11, code.co_linetable, [list(span) for span in code.co_lines()]


found = []
for path in sys.argv[1:]:
    with Path(path).open(encoding="utf-8") as file:
        for each in nested(compile(file.read(), path, "exec")):
            kind, table, spans = described(each)
            found.append([kind, each.co_firstlineno, table.hex(), spans])
print(json.dumps(found))
