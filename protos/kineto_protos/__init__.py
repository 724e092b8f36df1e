"""Shared by daemon and clients: messages, addresses, Kineto's configuration, durations and sizes as text."""
