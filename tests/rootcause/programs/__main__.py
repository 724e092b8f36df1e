"""Runs one program: `python -m rootcause.programs MODULE [CAUSE]`; without CAUSE it is the control."""

import importlib
import sys

import torch

torch.set_num_threads(1)
torch.manual_seed(7)
importlib.import_module(f"rootcause.programs.{sys.argv[1]}").main(sys.argv[2] if len(sys.argv) > 2 else "")
