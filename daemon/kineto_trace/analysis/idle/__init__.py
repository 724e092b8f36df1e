"""Shows when GPUs are idle, and why."""
