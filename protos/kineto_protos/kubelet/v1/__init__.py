"""Version 1 of the pod-resources API, generated from pod_resources.proto."""
