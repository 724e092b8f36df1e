"""Starts the agent in a process: from a .pth file, through sitecustomize, by a call, or through a live attach."""
