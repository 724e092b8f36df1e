"""Stacks of frames with what each took itself: every call by itself, and equal stacks merged."""
