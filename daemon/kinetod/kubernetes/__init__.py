"""What kinetod knows of Kubernetes."""
