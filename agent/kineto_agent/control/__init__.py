"""Carries out the daemon's requests: the link to the daemon, the state machine of a capture, and the thread that
drives the sources.
"""
