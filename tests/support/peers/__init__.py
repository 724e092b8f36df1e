"""Servers that the product talks to: Kubernetes, Slurm, object stores, webhooks' receivers."""
