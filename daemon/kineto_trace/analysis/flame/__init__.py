"""Flame graphs: stacks with the time that they took, merged, in their order of time, and from one function's side."""
