"""What the GPUs of this host do: read by the vendors' libraries in a process of its own."""
