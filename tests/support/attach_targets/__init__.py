"""Processes to attach to, each of which checks itself: `python -m support.attach_targets KIND CONTROL-FILE`."""
