"""Carries the bootstrap, the agent and the collector over a private channel into the target."""
