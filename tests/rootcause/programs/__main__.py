"""Runs one program: `python -m rootcause.programs MODULE CAUSE [DEVICE]`; an empty CAUSE is the control.

Programs for a GPU (gpu.MODULE) need DEVICE, "cuda" or "cpu", and set torch up themselves: not all of them use it.
"""

import importlib
import sys

name, *arguments = sys.argv[1:]
if not name.startswith("gpu."):
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(7)
importlib.import_module(f"rootcause.programs.{name}").main(*(arguments or [""]))
