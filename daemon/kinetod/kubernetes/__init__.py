"""Asks the Kubernetes API server and the kubelet about pods, tokens and devices."""
