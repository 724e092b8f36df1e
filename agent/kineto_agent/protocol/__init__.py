"""Defines what the agent and the daemon exchange: the messages of the link and the layout of the shared memory."""
