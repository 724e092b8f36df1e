"""Tells what Python ran: frames, samples and the use of threads."""
