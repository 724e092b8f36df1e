"""Translates gRPC calls into calls of the daemon's parts, and their errors into gRPC statuses."""
