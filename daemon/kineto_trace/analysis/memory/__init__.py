"""Shows what was allocated, when, by whom, and for which tensors."""
