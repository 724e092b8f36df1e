"""The pods of this node as the API server knows them: namespace and name by UID.

Only metadata is requested, and from the API server's cache: a UID never gets another name.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote

import msgspec

from kinetod.base.fair_slots import payer
from kinetod.base.safe_text import clean
from kinetod.kubernetes.api_server import ApiServer

KEEP_S = 5.0
LEAST_S = 0.5  # between two questions, also where somebody asks for a pod that is not there
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_MAX_CHARS = 253


class _Metadata(msgspec.Struct, frozen=True):
    uid: str
    namespace: str
    name: str


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Metadata


class _Pods(msgspec.Struct, frozen=True):
    items: tuple[_Pod, ...] = ()


Pods = Mapping[str, tuple[str, str]]


class NodePods:
    """Asks for the pods of one node."""

    def __init__(self, api: ApiServer, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        selector = quote(f"spec.nodeName={node}", safe="")
        self._path = f"/api/v1/pods?fieldSelector={selector}&resourceVersion=0"
        self._api = api
        self._clock = clock
        self._asking = asyncio.Lock()
        self._asked = float("-inf")
        self._pods: Pods = {}

    async def current(self, wanted: Iterable[str] = ()) -> Pods:
        """(namespace, name) by UID, at most KEEP_S old; asks again if a wanted one is unknown. Raises ApiError."""
        async with self._asking:
            age = self._clock() - self._asked
            if age >= KEEP_S or (age >= LEAST_S and not self._pods.keys() >= set(wanted)):
                found = await self._ask()
                self._pods = {
                    each.metadata.uid: (
                        clean(each.metadata.namespace, _MAX_CHARS),
                        clean(each.metadata.name, _MAX_CHARS),
                    )
                    for each in found.items
                }
                self._asked = self._clock()
            return self._pods

    async def _ask(self) -> _Pods:
        """Asks once for all who wait, so it takes nobody's turn."""
        whose = payer.set("")
        try:
            return await self._api.get(self._path, _Pods, accept=_METADATA_ONLY)
        finally:
            payer.reset(whose)
