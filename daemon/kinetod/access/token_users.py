"""Callers with a Kubernetes token: who they are, and which pods on this node they may trace.

Theory of operation
    The API server identifies a user (TokenReview). They may trace the pods into which it would let them `kubectl exec`
    (SubjectAccessReview: create pods/exec on that very pod). Only pods on this node are reviewed, and only the named
    ones if a request names pods. If the API server does not answer, nobody is admitted.

    All forwarded ports end at one address, so callers are not counted by it: a call's token is checked first, taking
    turns by connection, and the call then counts for its user. Invalid tokens count together, by the address.

    Captures, quotas and limits all belong to a uid. The store gives each Kubernetes user a permanent number beyond the
    uids of Linux (Store.number_of).
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from kinetod.access.peers import Peer
from kinetod.base.errors import Exhausted, NotIdentified, NotPermitted, Reason
from kinetod.base.fair_slots import FairSlots, fair_share_key
from kinetod.base.safe_text import clean
from kinetod.kubernetes.api_server import ApiError, NodePods, Reviews, User
from kinetod.permissions.caller_limits import less
from kinetod.permissions.role_policy import Caller, Role

TOKEN_KEY = "authorization"  # noqa: S105  # the name of gRPC metadata
MAX_TOKEN_CHARS = 64 << 10
REVIEWS_AT_ONCE = 4  # threads of the API server client; the others are for users already known
INTRODUCED_AT_ONCE = 16  # per connection
_PREFIX = "Bearer "
_MAX_NAME_CHARS = 256


class KubernetesUsers:
    """Identifies Kubernetes users. number_of: a user's number on this host; audiences: as configured."""

    def __init__(
        self,
        reviews: Reviews,
        pods: NodePods,
        *,
        number_of: Callable[[str], Awaitable[int]],
        audiences: Callable[[], Sequence[str]],
    ) -> None:
        self._reviews = reviews
        self._pods = pods
        self._number_of = number_of
        self._audiences = audiences
        self._turns = FairSlots(REVIEWS_AT_ONCE, spare=1)
        self._introducing = Counter[str]()  # number of waiting calls, by connection

    async def introduce(self, connection: str, auth: Mapping[str, Iterable[bytes]]) -> str:
        """Asks the API server for the token's user, in turns by connection; returns a name or "".

        Raises Exhausted, and NotPermitted if the API server cannot be asked.
        """
        with contextlib.suppress(NotIdentified):
            token, audiences = _token(auth), self._audiences()
            if self._introducing[connection] >= INTRODUCED_AT_ONCE:
                raise Exhausted(
                    Reason.TOO_MANY_CALLS,
                    f"{self._introducing[connection]} calls on this connection are waiting for their tokens "
                    "to be checked; wait a moment",
                )
            fair_share_key.set(connection)
            self._introducing[connection] += 1
            try:
                async with self._turns.turn():
                    await self._reviews.user(token, audiences)
            except ApiError as exc:
                raise _unavailable(exc) from exc
            finally:
                less(self._introducing, connection)
        return self.known(auth)

    def known(self, auth: Mapping[str, Iterable[bytes]]) -> str:
        """The name of the token's user, if it was looked up recently, or ""."""
        with contextlib.suppress(NotIdentified):
            user = self._reviews.known_user(_token(auth), self._audiences())
            return clean(user.name, _MAX_NAME_CHARS) if user is not None else ""
        return ""

    async def caller(self, peer: Peer, auth: Mapping[str, Iterable[bytes]], wanted: Collection[str] | None) -> Caller:
        """The user of this token. wanted: UIDs of the requested pods; empty means all on this node, None no pods.

        A refusal of an identified user is in the caller's `refusal`. Raises NotIdentified, NotPermitted.
        """
        try:
            user = await self._reviews.user(_token(auth), self._audiences())
        except ApiError as exc:
            raise _unavailable(exc) from exc
        if user is None:
            raise NotIdentified(
                Reason.NOT_IDENTIFIED,
                "the API server did not accept this token: it may have expired, or be for another audience "
                "(access.kubernetes_audiences)",
            )
        name, may_exec, refusal = clean(user.name, _MAX_NAME_CHARS), frozenset[str](), None
        try:
            may_exec = await self._may_exec(user, wanted) if wanted is not None else may_exec
        except NotPermitted as exc:
            refusal = exc
        except ApiError as exc:
            text = f"cannot determine what the Kubernetes user {name} is allowed to trace: {exc}"
            refusal = NotPermitted(Reason.KUBERNETES_UNAVAILABLE, text)
        return Caller(
            uid=await self._number_of(user.name),
            user=name,
            roles=frozenset({Role.PODS}),
            via=peer.via,
            address=peer.address,
            pods=may_exec,
            refusal=refusal,
        )

    async def _may_exec(self, user: User, wanted: Collection[str]) -> frozenset[str]:
        """The wanted pods that may be entered. Raises ApiError, and NotPermitted if there are pods but none may be."""
        known = await self._pods.current(wanted)
        asked = [uid for uid in known if not wanted or uid in wanted]
        answers = await asyncio.gather(*(self._reviews.may_exec(user, *known[uid]) for uid in asked))
        allowed = frozenset(uid for uid, may in zip(asked, answers, strict=True) if may)
        if wanted and asked and not allowed:
            raise NotPermitted(
                Reason.POD_EXEC_NEEDED,
                f"the Kubernetes user {clean(user.name, _MAX_NAME_CHARS)} is not allowed to create "
                f"pods/exec on {'this pod' if len(asked) == 1 else f'any of these {len(asked)} pods'}; tracing needs "
                "that permission: check it with `kubectl auth can-i create pods --subresource=exec`",
            )
        return allowed


def _unavailable(error: ApiError) -> NotPermitted:
    return NotPermitted(Reason.KUBERNETES_UNAVAILABLE, f"the caller cannot be identified: {error}")


def _token(auth: Mapping[str, Iterable[bytes]]) -> str:
    """The token of a call. Raises NotIdentified."""
    for value in auth.get(TOKEN_KEY, ()):
        text = value.decode("ascii", "replace")
        token = text.removeprefix(_PREFIX).strip()
        if text.startswith(_PREFIX) and token and len(token) <= MAX_TOKEN_CHARS:
            return token
    raise NotIdentified(
        Reason.NOT_IDENTIFIED,
        "this address identifies callers by a Kubernetes token, but the call has none; send `authorization: Bearer "
        "TOKEN` as metadata, or let kinetoctl send it (--kube, or KINETO_TOKEN_FILE)",
    )
