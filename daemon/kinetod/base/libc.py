"""The C library of this process, for calls that Python lacks. `ctypes.get_errno` returns their error.

All modules share one object, because creating one costs more than most calls. So the types that a module declares for a
function apply to every other module.
"""

import ctypes

LIBC = ctypes.CDLL(None, use_errno=True)
