"""What daemon and clients share: messages, addresses, Kineto's configuration, durations and sizes as text."""
