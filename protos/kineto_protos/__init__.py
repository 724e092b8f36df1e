"""What daemon and clients share: generated messages, addresses, and the notation of durations and sizes."""
