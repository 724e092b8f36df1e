"""Other tools that profile GPUs on this host: who they are, and what they are in the way of."""
