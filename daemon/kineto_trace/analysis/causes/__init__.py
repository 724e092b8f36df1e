"""Divides the time of training steps among named causes that sum to 100 %."""
