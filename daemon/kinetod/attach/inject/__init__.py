"""Stops one thread of the target, makes it call one function and releases it."""
