"""Finds the daemons that a list of hosts, a Slurm job or Kubernetes pods stand for."""
