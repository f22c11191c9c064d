"""Any order of events, with repetitions and losses, gives a prefix of the truth and exactly one terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from journey_house import (
    D0,
    D1,
    P0,
    P1,
    cut,
    decision,
    delta,
    handed_over,
    ids_of,
    make_journey,
    prefilled,
    truth,
)

from cluster.gateway.actions import Action, Emit, Fail, Finish, Route, Submit
from cluster.gateway.journey import Journey, JourneyState
from kvtransfer.messages import ReplicaIdentity
from workers.messages import (
    HandOverReport,
    HandOverTarget,
    PrefillReport,
    RequestFailed,
    Submission,
    TokenDelta,
)


@dataclass
class World:
    """Replicas that always tell the truth, wires that delay, repeat and break, and what the client saw."""

    data: st.DataObject
    journey: Journey
    stops: tuple[str, ...]
    now: float = 0.0
    wires: list[tuple[ReplicaIdentity, TokenDelta | PrefillReport | HandOverReport | RequestFailed]] = field(
        default_factory=list
    )
    current: set[int] = field(default_factory=set)
    """The numbers of the submissions that are not superseded."""
    routes: list[Route] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    terminals: list[Finish | Fail] = field(default_factory=list)

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            assert not self.terminals, "an action after the terminal"
            if isinstance(action, Route):
                self.routes.append(action)
                self.current.clear()
            elif isinstance(action, Submit):
                self.current.add(action.submission.attempt)
                self.wires.extend(self.answer(action.replica, action.submission))
            elif isinstance(action, Emit):
                self.see(action)
            elif isinstance(action, Finish | Fail):
                self.terminals.append(action)

    def see(self, emit: Emit) -> None:
        got = self.tokens.setdefault(emit.sample, [])
        assert emit.first_index == len(got)
        assert emit.sample not in self.finishes
        got.extend(ids_of(emit.tokens))
        count, text, _ = cut(truth(emit.sample, self.journey.plan.sampling.max_tokens), self.stops)
        self.texts[emit.sample] = self.texts.get(emit.sample, "") + emit.text
        assert got == truth(emit.sample, count)[: len(got)]
        assert text.startswith(self.texts[emit.sample])
        if emit.finish:
            self.finishes[emit.sample] = emit.finish

    def answer(
        self, replica: ReplicaIdentity, submission: Submission
    ) -> Iterator[tuple[ReplicaIdentity, TokenDelta | PrefillReport | HandOverReport]]:
        attempt, total = submission.attempt, submission.sampling.max_tokens
        yield replica, prefilled(attempt)
        source = replica
        for state in submission.samples:
            first = len(state.output) // 4
            assert ids_of(state.output) == truth(state.index, first)
            yield replica, delta(state.index, first, 1, total, attempt)
        if submission.decode is not None:
            source = submission.decode.identity
            yield source, handed_over(attempt)
        for state in submission.samples:
            first = len(state.output) // 4 + 1
            while first < total:
                count = self.data.draw(st.integers(1, total - first))
                yield source, delta(state.index, first, count, total, attempt)
                first += count

    def deliver(self, position: int, keep: bool) -> None:
        source, message = self.wires[position] if keep else self.wires.pop(position)
        if isinstance(message, TokenDelta):
            if message.attempt not in self.current:  # what an old attempt says must not matter
                message = delta(message.sample, message.first_index, 1, 1, message.attempt, shift=7)
            self.take(self.journey.on_delta(source, message, self.now))
        elif isinstance(message, PrefillReport):
            self.take(self.journey.on_prefilled(message, self.now))
        elif isinstance(message, HandOverReport):
            self.take(self.journey.on_handed_over(message, self.now))
        else:
            self.take(self.journey.on_failed(source, message, self.now))

    def route(self) -> None:
        request = self.routes.pop(0).request
        choices = [it for it in (P0, P1, None) if it is None or it.replica_id not in request.excluded]
        decodes = [it for it in (D0, D1) if it.replica_id not in request.excluded]
        if not decodes:
            self.take(self.journey.on_no_route("no decode replica", 0.1, self.now))
            return
        prefill, decode = self.data.draw(st.sampled_from(choices)), self.data.draw(st.sampled_from(decodes))
        target = HandOverTarget(decode, "a")
        self.take(self.journey.on_routed(decision(prefill, decode), prefill, target, self.now))

    def disturb(self) -> None:
        replica = self.data.draw(st.sampled_from([P0, P1, D0, D1]))
        if self.data.draw(st.booleans()):
            self.wires = [entry for entry in self.wires if entry[0] != replica]
            self.take(self.journey.on_lost(replica, "reset", self.now))
        else:
            attempt = self.data.draw(st.integers(1, 12))
            code = self.data.draw(st.sampled_from(["refused", "peer", "internal"]))
            self.wires.append((replica, RequestFailed("r", attempt, code, "why", 0.1)))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_order_of_events_gives_a_prefix_of_the_truth_and_one_terminal(data: st.DataObject) -> None:
    n, max_tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    stops = data.draw(st.sampled_from([(), ("ab",), ("ca", "bcd"), ("dd", "d")]))
    journey = make_journey(n=n, max_tokens=max_tokens, stops=stops)
    world = World(data, journey, stops)
    num_disturbances = data.draw(st.integers(0, 6))
    world.take(journey.start(0.0))
    while not world.terminals:
        world.now += 0.01
        choice = data.draw(st.integers(0, 9))
        if choice == 0 and num_disturbances:
            num_disturbances -= 1
            world.disturb()
        elif world.routes:
            world.route()
        else:
            assert world.wires, "nothing is under way, and no terminal"
            world.deliver(data.draw(st.integers(0, len(world.wires) - 1)), keep=choice == 1)
    assert journey.state is JourneyState.ENDED
    (terminal,) = world.terminals
    if isinstance(terminal, Finish):
        for index in range(n):
            count, text, finish = cut(truth(index, max_tokens), stops)
            assert world.tokens[index] == truth(index, count)
            assert (world.texts[index], world.finishes[index]) == (text, finish)
    for source, message in world.wires:
        if isinstance(message, TokenDelta):
            assert journey.on_delta(source, message, world.now) == []
    assert journey.on_lost(D0, "late", world.now) == journey.on_deadline(world.now) == []
