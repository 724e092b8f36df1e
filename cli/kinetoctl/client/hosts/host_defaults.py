"""What is meant where a command line does not say it; the help texts show it."""

KINETOD_NAMESPACE = "kineto"
HOST_FIELD = "{host}"
ADDRESS_FIELD = "{address}"  # what the cluster says that the host's address is; where it says nothing, its name
DEFAULT_TEMPLATE = f"{HOST_FIELD}:50051"
