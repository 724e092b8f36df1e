"""The C library of this process, for calls that Python does not have. `ctypes.get_errno` has their error.

There is one object for all, since making one costs more than most calls. So what a module says about the types of a
function holds for every other one.
"""

import ctypes

LIBC = ctypes.CDLL(None, use_errno=True)
