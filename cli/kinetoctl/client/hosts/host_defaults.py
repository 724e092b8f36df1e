"""Defaults of the command line that the help texts show."""

KINETOD_NAMESPACE = "kineto"
HOST_FIELD = "{host}"
ADDRESS_FIELD = "{address}"  # the host's address in the cluster; its name if the cluster knows none
DEFAULT_TEMPLATE = f"{HOST_FIELD}:50051"
