"""Reads CUDA memory snapshots of torch, and computes and names what they show."""
