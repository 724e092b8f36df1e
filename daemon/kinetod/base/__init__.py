"""Holds small parts that know nothing of the daemon's work: errors, log set-up, metrics, file locks and fair queues."""
