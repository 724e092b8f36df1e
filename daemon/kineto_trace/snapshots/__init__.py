"""Reads CUDA memory snapshots of torch, and computes results from them."""
