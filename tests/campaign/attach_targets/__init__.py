"""Processes to attach to, each of which checks itself: `python -m campaign.attach_targets KIND CONTROL-FILE`."""
