"""What a cluster tells of itself, for the part `served` of `benchmarks.gpu`: landings of KV, and one replica
more."""

from __future__ import annotations

import asyncio
import statistics

from benchmarks.served import Service
from cluster.api.admin_client import AdminClient
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from kvtransfer.common.clock import SystemClock

CLOCK = SystemClock()
# Prompts that are landed, one at a time, after one that is not counted.
_NUM_LANDINGS = 8
_POLL_S = 0.1
_MOST_START_S = 120.0


async def landing_ms(service: Service, num_tokens: int) -> float:
    """Return the milliseconds from the end of a prompt's computation until the decode replica has its KV, the
    median of some prompts of `num_tokens` that share nothing, on an idle cluster."""
    found: list[float] = []
    async with Client(service.address) as client, AdminClient(service.admin_address) as admin:
        for number in range(_NUM_LANDINGS + 1):
            # Ids of bytes, which every tokenizer here has, and which differ from the first token on.
            prompt = [(number * 31 + at * (2 * number + 1)) % 251 + 2 for at in range(num_tokens)]
            stream = client.generate(prompt, GenerateOptions(max_tokens=4, ignore_eos=True, seed=number))
            async for _ in stream:
                pass
            explained = await admin.explain(stream.request_id)
            name_to_ms = {event.name: event.at_ms for event in explained.timeline}
            found.append(name_to_ms["handed over"] - name_to_ms["prefilled"])
    return statistics.median(found[1:])


async def added_replica_s(service: Service, pool: str) -> float:
    """Return the seconds from the order of one replica more in a pool that has one until both run."""
    async with AdminClient(service.admin_address) as admin, asyncio.timeout(_MOST_START_S):
        began_at = CLOCK.now()
        await admin.scale({pool: 2})
        while True:
            try:
                pools = (await admin.scale({}, dry_run=True)).pools
                if any(it.name == pool and dict(it.states) == {"RUNNING": 2} for it in pools):
                    return CLOCK.now() - began_at
            except CallError:
                pass  # the gateway looks at Ray Serve, which is busy: it is asked again
            await asyncio.sleep(_POLL_S)
