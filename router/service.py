"""The interface of the router: reports of replicas go in, decisions come out. One gateway, test or simulator
owns it, and uses it from one thread."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from kvtransfer.common.clock import Clock
from kvtransfer.common.recent_map import RecentMap
from kvtransfer.messages import ReplicaIdentity
from router.block_history import BlockHistory
from router.block_holder import PrefixPrediction
from router.config import RouterConfig
from router.current_load import CurrentLoad
from router.errors import NoReplicaError
from router.load import LoadTracker
from router.load_views import LoadView, OwnLoads, OwnPlacements, PlacementObservers, ReportedLoads
from router.make_decision import make_decision
from router.membership import Members, hashed
from router.messages import (
    Candidate,
    Candidates,
    Decision,
    RouteRequest,
    TimeLimit,
)
from router.missed_blocks import find_misses
from router.native import load_kernel
from router.placements import Placement, PlacementObserver
from router.policies.cheapest_choice import Choice, choose, cost_of
from router.policies.consistent_hash import affinity_key
from router.policies.cost_policy import NEVER_FITS_S, decode_candidate
from router.policies.known_policies import make_policy
from router.policies.replica_cost import RouteQuery, View, replica_costs
from router.price_table import PriceTable
from router.radix import Expectation, PrefixTree

# A waiting request moves to other replicas only if that gains at least this much.
_LEAST_GAIN_S = 0.005
# How many decisions `explain` remembers.
NUM_DECISIONS_KEPT = 1024


class RouterService:
    """Places requests on replicas.

        on_events, on_snapshot --> PrefixTree --\\
        on_load ----------------> LoadTracker -----+--> policy --> candidates --> choose --> decide: Decision
        add, remove, set_leaving -> Members ----/                                            |
        on_prefilled, on_finished --> LoadTracker <------ placement, prediction <---------- place
        route_move -------------> Members, PrefixTree, LoadTracker --> a decode replica for a running stream

    A routed request counts at once as load, and its prompt as cached on the replica that computes it. A burst
    of requests with one prefix therefore follows the first of them until the queue there costs more than the
    prefix saves. The decode replica counts as having the prompt only from the first token on, when the KV is
    there.

    The parts are public, for reading and for calls that concern one part alone: the replicas that may be
    chosen (`members`), the load of each (`loads`), and the blocks that each has (`tree`).

    Among equal costs the replica wins at which the fewest tokens were placed: in an idle cluster replicas
    take turns, which fills all caches. With a `salt`, the id of the gateway, and other gateways, a hash of it
    and of the request decides instead, so that gateways which see equal costs at the same time choose
    different replicas. The requests of a session have one hash at all gateways.
    """

    def __init__(
        self,
        config: RouterConfig,
        block_tokens: int,
        clock: Clock,
        seed: int,
        *,
        salt: str = "",
        observer: PlacementObserver | None = None,
        history: BlockHistory | None = None,
    ) -> None:
        """With a `history`, `with_misses` says why blocks of a prompt were not cached."""
        self._salt = salt
        self._config = config
        self._block_tokens = block_tokens
        self._clock = clock
        self._kernel = load_kernel()
        self._history = history
        self.tree = PrefixTree(clock, config.prediction_ttl_s, self._kernel, history)
        own = OwnPlacements() if config.policy == "predicted_only" else None
        self._own = own
        if own is not None:
            observer = own if observer is None else PlacementObservers(own, observer)
        self.loads = LoadTracker(clock, observer, self._on_dropped)
        # The loads by which choices are priced; whether replicas can take more is seen in `loads`.
        self._priced_loads: LoadView = self.loads
        if own is not None:
            self._priced_loads = OwnLoads(self.loads, own)
        elif config.policy == "reported_only":
            self._priced_loads = ReportedLoads(self.loads)
        self.members = Members(config, block_tokens, self.loads)
        self._policy = make_policy(
            config, seed, turn_of=self.members.turn, num_cached_blocks=self.tree.num_reported
        )
        self._decisions: RecentMap[str, Decision] = RecentMap(NUM_DECISIONS_KEPT)
        # The prices of the members as of `_table_version`; None: not computed yet.
        self._table: PriceTable | None = None
        self._table_version = 0
        # The placements that wait in the gateway, with what the tree expects of each; and those for which the
        # tree expects nothing yet (`_expect_held`).
        self._expected: dict[Placement, Expectation] = {}
        self._to_expect: dict[Placement, None] = {}
        # What the tree predicts of the placements that were sent and have no first token yet.
        self._predicted: dict[Placement, PrefixPrediction] = {}
        # Whether other gateways place requests at the same replicas.
        self._is_shared = False

    def add_replica(self, identity: ReplicaIdentity, role: str) -> None:
        """Add a replica that takes requests, or change its role. Of a new epoch nothing is known yet."""
        self.members.add(identity, role)
        self.tree.add_replica(identity)
        self.loads.add_replica(identity, role)

    def remove_replica(self, replica_id: str) -> None:
        """Remove a replica that is gone, with its load, its blocks and its bit in the tree."""
        self.members.remove(replica_id)
        self.tree.remove_replica(replica_id)
        self.loads.remove_replica(replica_id)

    def set_shared(self, is_shared: bool) -> None:
        """Note whether other gateways place requests at the same replicas. If so, decisions state the backlog
        from which another replica would be better (`Decision.most_backlog_tokens`)."""
        self._is_shared = is_shared

    def route(
        self,
        request: RouteRequest,
        *,
        is_queued: bool = False,
        waits: Mapping[str, float] | None = None,
        queued_part: float = 1.0,
        prefers_capacity: bool = False,
    ) -> Decision:
        """Choose replicas as `decide` does, and `place` the request there."""
        decision = self.decide(
            request, waits=waits, queued_part=queued_part, prefers_capacity=prefers_capacity
        )
        self.place(request, decision, is_queued=is_queued)
        return decision

    def decide(
        self,
        request: RouteRequest,
        *,
        waits: Mapping[str, float] | None = None,
        queued_part: float = 1.0,
        prefers_capacity: bool = False,
        limit: TimeLimit | None = None,
    ) -> Decision:
        """Choose replicas without counting the request there, which `place` does. A request that is placed
        already is priced as if it were not.

        `waits` maps replicas to the seconds for which the request would wait there. At the others, and for a
        place among the decoding sequences, the request waits for `queued_part` of the work that gateways
        hold. With `prefers_capacity`, replicas that can take the request now come before all others, whatever
        they cost. With a `limit`, those that keep it come before the rest. Raises `NoReplicaError`, which
        names the missing side."""
        return self._decide(request, waits, queued_part, limit, prefers_capacity=prefers_capacity)[0]

    def improve(
        self,
        request: RouteRequest,
        decision: Decision,
        *,
        waits: Mapping[str, float] | None = None,
        queued_part: float = 1.0,
        limit: TimeLimit | None = None,
    ) -> Decision | None:
        """Choose other replicas for a request that waits for those of `decision`. Returns None unless they
        are better by as much as a move is worth, or in time where those are not. Like `decide`, counts
        nothing, and raises `NoReplicaError`."""
        better, gain_s = self._decide(request, waits, queued_part, limit, before=decision)
        return better if gain_s > _LEAST_GAIN_S else None

    def place(self, request: RouteRequest, decision: Decision, *, is_queued: bool = False) -> None:
        """Count the request at the replicas of the decision, and no longer where it was counted before. A
        request that `is_queued` waits in the gateway until `on_submitted`."""
        query = self._query(request)
        compute_id = decision.compute_id
        needed_tokens = query.num_tokens - decision.decode_cached_tokens + query.num_growth_tokens
        for replica_id in filter(None, (decision.prefill, decision.decode)):
            computed = query.num_tokens - decision.prefill_cached_tokens if replica_id == compute_id else 0
            decoded = needed_tokens if replica_id == decision.decode else 0
            self.members.chosen(replica_id, computed + decoded)
        placement = Placement(
            request_id=request.request_id,
            compute_id=compute_id,
            decode_id=decision.decode if decision.prefill else "",
            block_keys=request.left_keys,
            num_prefill_tokens=query.num_tokens - decision.prefill_cached_tokens,
            num_new_blocks=-(-needed_tokens // query.block_tokens),
            num_sequences=query.num_samples,
            routed_at=self._clock.now(),
            is_queued=is_queued,
            prefill_s=decision.prediction.prefill_s / self.loads.state(compute_id).rates.correction,
            load_s=decision.prediction.load_s,
            limited_group=request.facts.limited_group,
        )
        self.loads.on_routed(placement)
        self._predict_computed(placement)
        self._keep(decision)

    def route_move(self, request: RouteRequest) -> str:
        """Choose the decode replica to which a running stream moves, and count the stream there instead of at
        its present replica. Report the end of the move with `on_prefilled`, or its failure with
        `on_finished`. Ignores pins and policies. Raises `NoReplicaError` if there is none."""
        decode_ids = self.members.move_ids(request)
        query = self._query(request)
        match = self.tree.match(request.block_keys, self._most_reused(request))
        view = View(match, {}, 1.0, self._clock.now() - self._config.stale_load_s)
        replicas = replica_costs(query, self._states(decode_ids), view)
        priced = [
            (decode_candidate(query, replica, self._config.decode_steps), replica.state.num_sequences)
            for replica in replicas
        ]
        chosen, _ = min(
            priced, key=lambda item: (item[0].cost_s, item[1], item[0].uncached_tokens), default=(None, 0)
        )
        if chosen is None or chosen.cost_s >= NEVER_FITS_S:
            raise self.members.no_target(request)
        needed_tokens = chosen.uncached_tokens + query.num_growth_tokens
        self.members.chosen(chosen.replica_id, needed_tokens)
        self.loads.on_routed(
            Placement(
                request_id=request.request_id,
                compute_id="",
                decode_id=chosen.replica_id,
                block_keys=request.left_keys,
                num_prefill_tokens=0,
                num_new_blocks=-(-needed_tokens // query.block_tokens),
                num_sequences=query.num_samples,
                routed_at=self._clock.now(),
            )
        )
        return chosen.replica_id

    def on_submitted(self, request_id: str) -> None:
        """Note that a request that waited in the gateway was sent to its replicas."""
        placement = self.loads.on_submitted(request_id)
        if placement is not None:
            self._predict_computed(placement)

    def has_capacity(self, request_id: str) -> bool:
        """Return whether the replicas of a placed request can take it now."""
        return not self.blocked_side(request_id)

    def blocked_side(self, request_id: str) -> Literal["", "prefill", "decode"]:
        """Return which side of a placed request cannot take it now; "": both can (`Members.blocked_side`)."""
        placement = self.loads.placement(request_id)
        return "" if placement is None else self.members.blocked_side(placement)

    def waits_for_share(self, request_id: str) -> bool:
        """Return whether a placed request would have capacity if its sharing group had no limit
        (`Members.waits_for_share`)."""
        placement = self.loads.placement(request_id)
        return placement is not None and self.members.waits_for_share(placement)

    def on_refused(self, replica_id: str) -> None:
        """Note that the replica has refused a request. It counts as full until its next report."""
        self.members.on_refused(replica_id, self._clock.now())

    def on_prefilled(self, request_id: str, steps_s: float = 0.0) -> None:
        """Note the first token of a request: its prompt is computed, and the decode side has the KV.
        `steps_s` is how long the steps of the replica until then should have taken, as the replica says; 0:
        not known."""
        placement = self.loads.on_prefilled(request_id, steps_s=steps_s)
        if placement is None:
            return
        self._predicted.pop(placement, None)
        if placement.decode_id:
            self._predict(placement.decode_id, placement)

    def on_finished(self, request_id: str) -> None:
        """Stop counting a request, or an attempt of it, that has ended in any way. `place` does this itself
        for an earlier attempt."""
        self.loads.on_finished(request_id)

    def on_remote_routed(self, placement: Placement, *, is_predicted: bool) -> None:
        """Count a request that another gateway has placed. With `is_predicted` its prompt counts as cached,
        too, as in `place`."""
        self.loads.on_routed(placement)
        if is_predicted:
            self._predict_computed(placement)
            if placement.decode_id and placement.prefilled_at is not None:
                self._predict(placement.decode_id, placement)

    def on_remote_prefilled(
        self, gateway_id: str, request_id: str, prefilled_at: float, *, is_predicted: bool
    ) -> None:
        """Note the first token of another gateway's request, as `on_prefilled` does."""
        placement = self.loads.on_prefilled(request_id, gateway_id, prefilled_at)
        if placement is None:
            return
        self._predicted.pop(placement, None)
        if placement.decode_id and is_predicted:
            self._predict(placement.decode_id, placement)

    def on_remote_finished(self, gateway_id: str, request_id: str) -> None:
        """Stop counting a request of another gateway."""
        self.loads.on_finished(request_id, gateway_id)

    def remove_gateway(self, gateway_id: str) -> None:
        """Stop counting all requests of another gateway, which has left or is not heard any more. Replicas
        compute their prompts nevertheless."""
        self._predicted = {it: each for it, each in self._predicted.items() if it.gateway_id != gateway_id}
        self.loads.remove_gateway(gateway_id)

    def own_placements(self) -> Iterator[Placement]:
        """Return the unfinished placements of this gateway, oldest first."""
        return self.loads.own_placements()

    @property
    def num_placements(self) -> int:
        """The number of unfinished placements of all gateways."""
        return self.loads.num_placements

    def num_cached_blocks(self, block_keys: Sequence[bytes]) -> int:
        """Return how many of the leading blocks are on one replica's device or in the store of its node, for
        the replica that has the most."""
        return self.tree.match(block_keys).most_blocks

    def explain(self, request_id: str) -> Decision | None:
        """Return the last decision for the request, if it is among the latest `NUM_DECISIONS_KEPT`."""
        return self._decisions.get(request_id)

    def with_misses(
        self, decision: Decision, block_keys: tuple[bytes, ...], num_prompt_tokens: int
    ) -> Decision:
        """Return the decision with the reason for each of the prompt's blocks that is computed, as of now.
        Call it once, when the request is submitted."""
        if self._history is None:
            return decision
        keys = block_keys[: (max(num_prompt_tokens, 1) - 1) // self._block_tokens]
        num_cached = min(decision.prefill_cached_tokens // self._block_tokens, len(keys))
        misses = find_misses(
            self.tree, self._history, decision.compute_id, keys, num_cached, self._clock.now()
        )
        return replace(
            decision,
            missed=misses.runs,
            achievable_tokens=max(decision.prefill_cached_tokens, misses.num_achievable * self._block_tokens),
        )

    def check(self) -> None:
        """Assert the invariants of tree and load tracker, that all expected placements are queued, and that
        predictions are kept of those alone whose prompts are being computed."""
        for placement in (*self._expected, *self._to_expect):
            assert placement.is_queued
            assert self.loads.find(placement.request_id, placement.gateway_id) is placement
        for placement in self._predicted:
            assert not placement.is_queued
            assert placement.prefilled_at is None
            assert self.loads.find(placement.request_id, placement.gateway_id) is placement
        self.tree.check()
        self.loads.check()
        if self._own is not None:
            self._own.check()

    def _most_reused(self, request: RouteRequest) -> int:
        """Return how many of its blocks a request can reuse: it computes at least its last token."""
        return (max(request.num_tokens, 1) - 1) // self._block_tokens

    def _query(self, request: RouteRequest) -> RouteQuery:
        return RouteQuery(
            num_tokens=max(request.num_tokens, 1),
            num_growth_tokens=request.max_new_tokens * request.num_samples,
            num_samples=request.num_samples,
            block_tokens=self._block_tokens,
            skip_prefill_tokens=self._config.skip_prefill_tokens,
            affinity_key=affinity_key(
                request.facts.session, request.block_keys, self._block_tokens, request.request_id
            ),
            may_stay=not (request.pinned_prefill and request.facts.decodes)
            or request.pinned_prefill == request.pinned_decode,
            kv_share=request.facts.kv_share,
        )

    def _decide(
        self,
        request: RouteRequest,
        waits: Mapping[str, float] | None,
        queued_part: float,
        limit: TimeLimit | None,
        *,
        prefers_capacity: bool = False,
        before: Decision | None = None,
    ) -> tuple[Decision, float]:
        """Decide as if the request were counted nowhere. Return the decision, and by how many seconds it is
        better than `before` (infinite if that is not possible any more)."""
        placement = self.loads.suspend(request.request_id)
        if placement is not None:
            self._withdraw(placement)
            if self._own is not None:
                self._own.on_finished(placement)
        try:
            self._expect_held()
            match = self.tree.match(request.block_keys, self._most_reused(request))
            oldest = self._clock.now() - self._config.stale_load_s
            view = View(match, waits or {}, queued_part, oldest, limit)
            found = self._choose(request, view, prefers_capacity, before)
            if found is None and limit is not None:
                found = self._choose(request, view._replace(limit=None), prefers_capacity, before)
            if found is None:
                raise NoReplicaError(f"no second replica beside the pinned {request.pinned_prefill}")
            return found
        finally:
            if placement is not None:
                self.loads.resume(placement)
                if self._own is not None:
                    self._own.on_routed(placement)
                if placement.is_queued:
                    self._expect_later(placement)

    def _choose(
        self,
        request: RouteRequest,
        view: View,
        prefers_capacity: bool,
        before: Decision | None,
    ) -> tuple[Decision, float] | None:
        """Return the cheapest decision within the limit, and by how many seconds it is better than `before`;
        None: there is none."""
        query = self._query(request)
        candidates: Sequence[Candidate]
        gain_s = float("inf")
        # Only a choice among all replicas by cost is priced by the table, and names a bound of the backlog.
        is_free_choice = self._config.policy == "tandem" and not (
            prefers_capacity
            or request.excluded
            or request.pinned_prefill
            or request.pinned_decode
            or not request.facts.decodes
        )
        table = self._current_table(request) if is_free_choice else None
        if table is not None:
            choice, gain_s, candidates = self._cheapest(table, request, query, view, before)
        else:
            prefill_ids, decode_ids = self.members.sides(request, self._order(request))
            prefills = replica_costs(query, self._states(prefill_ids), view)
            decodes = replica_costs(query, self._states(decode_ids), view)
            candidates = priced = self._policy.candidates(query, prefills, decodes)
            if prefers_capacity:
                candidates = priced = self._with_capacity(request, query, priced)
            choice = choose(priced, finds_other=self._is_shared and is_free_choice, limit=view.limit)
            if choice is not None and before is not None:
                gain_s = cost_of(priced, before.prefill, before.decode, view.limit) - choice.cost_s
        if choice is None:
            return None
        name = request.request_id, self._config.policy
        decision = make_decision(name, query, choice, candidates, view, self._priced_loads)
        return decision, gain_s

    def _predict_computed(self, placement: Placement) -> None:
        """Count the prompt as cached where it is computed: for `prediction_ttl_s` or, if the request is
        queued, while it waits. The latter begins only with the next decision, since most are sent before
        that."""
        if placement.is_queued:
            self._expect_later(placement)
            return
        prediction = self._predict(placement.compute_id, placement)
        if prediction is not None and placement.prefilled_at is None:
            self._predicted[placement] = prediction
        self._withdraw(placement)

    def _predict(self, replica_id: str, placement: Placement) -> PrefixPrediction | None:
        """Count the prompt as cached there for a while, unless only reports count."""
        if self._config.policy == "reported_only":
            return None
        return self.tree.predict(replica_id, placement.block_keys)

    def _expect_later(self, placement: Placement) -> None:
        if self._config.policy != "reported_only":
            self._to_expect[placement] = None

    def _expect_held(self) -> None:
        for placement in self._to_expect:
            expectation = self.tree.expect(placement.compute_id, placement.block_keys)
            if expectation is not None:
                self._expected[placement] = expectation
        self._to_expect.clear()

    def _withdraw(self, placement: Placement) -> None:
        """Stop expecting the prompt of a placement that was queued: it was sent, moved or has ended."""
        self._to_expect.pop(placement, None)
        if (expectation := self._expected.pop(placement, None)) is not None:
            self.tree.withdraw(expectation)

    def _on_dropped(self, placement: Placement) -> None:
        """Expect nothing more of a placement that is over. Before its first token, such as where its replica
        has sent the request back, it leaves no more than what its replica has reported."""
        if placement.is_queued:
            self._withdraw(placement)
        if (prediction := self._predicted.pop(placement, None)) is not None:
            self.tree.retract(prediction)

    def _order(self, request: RouteRequest) -> Iterable[str]:
        """Return all replicas, in the order in which those of equal cost are chosen."""
        seed = self._seed(request)
        if seed is None:
            return self.members
        return sorted(self.members, key=lambda replica_id: hashed(replica_id, seed))

    def _with_capacity(
        self, request: RouteRequest, query: RouteQuery, candidates: list[Candidate]
    ) -> list[Candidate]:
        """Return the candidates that can take the request now, or all if those allow no choice."""
        limited_group = request.facts.limited_group

        def has_capacity(candidate: Candidate) -> bool:
            name = candidate.replica_id
            computes, decodes = candidate.side != "decode", candidate.side != "prefill"
            return (not computes or self.members.can_compute(name, limited_group)) and (
                not decodes or self.members.can_decode(name, query.num_samples, query.num_tokens)
            )

        able = [candidate for candidate in candidates if has_capacity(candidate)]
        return candidates if choose(able) is None else able

    def _seed(self, request: RouteRequest) -> int | None:
        """Return the seed of the hash by which replicas of equal cost are ordered; None: by what was placed
        there."""
        if not self._salt or not (self._is_shared or request.facts.session):
            return None
        return zlib.crc32((request.facts.session or f"{self._salt} {request.request_id}").encode())

    def _states(self, ids: Iterable[str]) -> list[tuple[str, CurrentLoad]]:
        return [(each, self._priced_loads.state(each)) for each in ids]

    def _current_table(self, request: RouteRequest) -> PriceTable | None:
        """Return the prices of all replicas that take requests; None: there is no compiled code here."""
        if self._kernel is None:
            return None
        members, table = self.members, self._table
        if table is None or self._table_version != members.version:
            prefills, decodes = map(set, members.sides(request, members.ids))
            self._table = table = PriceTable(
                self._kernel,
                self._config,
                self._block_tokens,
                self.loads,
                self.tree,
                [each for each in members.ids if each in prefills or each in decodes],
                (prefills, decodes),
                members.num_placed_tokens,
            )
            self._table_version = members.version
        table.refresh()
        return table

    def _cheapest(
        self,
        table: PriceTable,
        request: RouteRequest,
        query: RouteQuery,
        view: View,
        before: Decision | None,
    ) -> tuple[Choice | None, float, Candidates]:
        """Choose among all replicas that take requests, by the policy `tandem`. Return the choice, by how
        many seconds it is better than `before`, and the candidates, which are made when they are read."""
        seed = self._seed(request)
        choice = table.cheapest(
            query,
            view.match,
            view.waits,
            view.queued_part,
            view.oldest,
            seed,
            finds_other=self._is_shared,
            before=None if before is None else (before.prefill, before.decode),
            limit=view.limit,
        )
        gain_s = choice.gain_s if choice is not None else 0.0
        states, turns, policy = list(table.states), list(table.turns), self._policy

        def made() -> list[Candidate]:
            ranks = turns if seed is None else [hashed(each, seed) for each in table.ids]
            order = sorted(range(len(ranks)), key=ranks.__getitem__)
            sides = (
                replica_costs(query, [(table.ids[row], states[row]) for row in order if side[row]], view)
                for side in table.sides
            )
            return policy.candidates(query, *sides)

        return choice, gain_s, Candidates(made)

    def _keep(self, decision: Decision) -> None:
        self._decisions.put(decision.request_id, decision)
