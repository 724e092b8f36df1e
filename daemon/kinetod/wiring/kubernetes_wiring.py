"""Builds the parts that talk to Kubernetes, as far as the settings enable them."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from kinetod.access.token_users import KubernetesUsers
from kinetod.attach_helper.helper_client import HelperService
from kinetod.base.errors import StartError
from kinetod.config.settings import Config, Settings
from kinetod.kubernetes.api_server import ApiServer, address_in
from kinetod.kubernetes.node_pods import NodePods
from kinetod.kubernetes.pod_names import KubeletGpuHolders, PodNames
from kinetod.kubernetes.pod_resources import KubeletClient
from kinetod.kubernetes.token_reviews import Reviews


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """The Kubernetes parts that others use; None if not configured."""

    holders: KubeletGpuHolders | None = None
    users: KubernetesUsers | None = None
    names: PodNames | None = None


def make_kubernetes(
    settings: Settings,
    helper: HelperService | None,
    number_of: Callable[[str], Awaitable[int]],
    stack: contextlib.AsyncExitStack,
    environ: Mapping[str, str] = os.environ,
) -> Kubernetes:
    """Builds the parts; nothing is asked yet. number_of: the number of a Kubernetes user. Raises StartError."""
    config = settings.current
    holders = pods = users = None
    if config.pod_resources:
        connect = helper.kubelet if helper is not None else None
        holders = KubeletGpuHolders(KubeletClient(config.kubelet_socket, connect=connect).gpus)
    if config.kubernetes:
        api = _api(config, environ)
        stack.push_async_callback(asyncio.to_thread, api.close)
        pods = NodePods(api, config.node_name)
        users = KubernetesUsers(
            Reviews(api),
            pods,
            number_of=number_of,
            audiences=lambda: settings.current.kubernetes_audiences,
        )
    if holders is None and pods is None:
        return Kubernetes()
    return Kubernetes(holders, users, PodNames(holders, pods.current if pods is not None else None))


def _api(config: Config, environ: Mapping[str, str]) -> ApiServer:
    try:
        return ApiServer(address_in(environ), config.account_dir)
    except ValueError as exc:
        raise StartError(f"access.kubernetes: {exc}") from exc
