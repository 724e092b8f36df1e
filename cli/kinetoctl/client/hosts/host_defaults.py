"""Defaults of the command line that the help texts show."""

from kineto_protos.endpoints import USUAL_PORT

KINETOD_NAMESPACE = "kineto"
HOST_FIELD = "{host}"
ADDRESS_FIELD = "{address}"  # the host's address in the cluster; its name if the cluster knows none
DEFAULT_TEMPLATE = f"{HOST_FIELD}:{USUAL_PORT}"
