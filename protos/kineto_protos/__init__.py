"""What daemon and clients share: generated messages, addresses, and how people write durations and sizes."""
