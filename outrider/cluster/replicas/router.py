"""Routes requests that begin alike to the same replica, as a router of Ray Serve.

Ray asks the replicas in the order given here, and takes the first that has room; it queues the
request where none has.

https://docs.ray.io/en/latest/serve/advanced-guides/custom-request-router.html
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from outrider.cluster.replicas.calls import Call
from outrider.cluster.replicas.prefix import ranked


class PrefixRouter(RequestRouter):
    """Prefers replicas by the prefix of the request's prompt; without one, in random order."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        names = {each.replica_id.unique_id: each for each in candidate_replicas}
        key = None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # wait where all are busy
            key = next((each.key for each in pending_request.args if isinstance(each, Call)), None)
        if key is None:
            order = random.sample(list(names), len(names))
        else:
            order = ranked(key, names)
        return [[names[name]] for name in order]
