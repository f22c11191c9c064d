"""A router whose replicas report what a test wants."""

from __future__ import annotations

from typing import Literal

from kvtransfer.common.clock import ManualClock
from kvtransfer.kv_events import BlocksStored, KvEvents, KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.config import RouterConfig
from router.messages import Decision, ReplicaLoad, RouteRequest
from router.policies.cheapest_choice import recompute
from router.service import RouterService

BLOCK_TOKENS = 16
Tier = Literal["device", "dram", "nvme"]


def keys_of(prompt: str, num_blocks: int) -> tuple[bytes, ...]:
    return tuple(f"{prompt}:{index}".encode() for index in range(num_blocks))


class RouterHarness:
    """A router with replicas named by role: p0, p1 (prefill), d0 (decode), b0 (both)."""

    def __init__(self, *replicas: str, config: RouterConfig | None = None) -> None:
        self.clock = ManualClock(100.0)
        self.router = RouterService(config or RouterConfig(), BLOCK_TOKENS, self.clock, seed=7)
        self.num_requests = 0
        self.sequences: dict[str, int] = {}
        for replica in replicas:
            self.join(replica)

    def join(self, replica: str, epoch: int = 1) -> None:
        role = {"p": "prefill", "d": "decode", "b": "both"}[replica[0]]
        self.router.add_replica(ReplicaIdentity(replica, epoch), role)
        self.router.tree.apply_snapshot(KvSnapshot(ReplicaIdentity(replica, epoch), 0, ()))
        self.sequences[replica] = 0
        self.load(replica, epoch=epoch)

    def load(
        self,
        replica: str,
        backlog: int = 0,
        running: int = 0,
        free: int = 1000,
        epoch: int = 1,
        load_tok_s: dict[str, float] | None = None,
        max_sequences: int = 0,
        **others: float,
    ) -> None:
        """Report a load; `others` are further fields of it."""
        self.router.loads.on_load(
            ReplicaLoad(
                identity=ReplicaIdentity(replica, epoch),
                received_at=self.clock.now(),
                num_running=running,
                num_waiting=0,
                num_landings=0,
                num_backlog_tokens=backlog,
                num_free_blocks=free,
                num_total_blocks=1000,
                prefill_tok_s=10_000.0,
                decode_step_s=0.02,
                transfer_tok_s=100_000.0,
                load_tok_s=load_tok_s or {},
                max_sequences=max_sequences,
                **others,  # type: ignore[arg-type]
            )
        )

    def store(self, replica: str, keys: tuple[bytes, ...], tier: Tier = "device") -> None:
        self.sequences[replica] += 1
        events = KvEvents(
            ReplicaIdentity(replica, 1), self.sequences[replica], (BlocksStored(b"", keys, tier),), ()
        )
        assert self.router.tree.apply_events(events)

    def route(
        self,
        keys: tuple[bytes, ...] = (),
        num_tokens: int = 1000,
        excluded: tuple[str, ...] = (),
        pinned_prefill: str = "",
        pinned_decode: str = "",
        *,
        prefers_capacity: bool = False,
        decodes: bool = True,
        is_queued: bool = False,
        limited_group: str = "",
    ) -> Decision:
        """Route a request, that of a group with a limit where it has one."""
        self.num_requests += 1
        facts = RequestFacts(
            tenant="t",
            sharing_group=limited_group,
            kv_share=0.5 if limited_group else 1.0,
            pooling=None if decodes else "last",
        )
        decision = self.router.route(
            RouteRequest(
                request_id=f"q{self.num_requests}",
                facts=facts,
                block_keys=keys,
                num_tokens=num_tokens,
                max_new_tokens=32,
                excluded=excluded,
                pinned_prefill=pinned_prefill,
                pinned_decode=pinned_decode,
            ),
            is_queued=is_queued,
            prefers_capacity=prefers_capacity,
        )
        assert recompute(decision) == (decision.prefill, decision.decode)
        assert self.router.explain(decision.request_id) is decision
        return decision
