"""Any order of events, with repetitions and losses, gives a prefix of the truth and exactly one terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from request_state_harness import (
    D0,
    D1,
    P0,
    P1,
    Effect,
    Fail,
    Finish,
    MoveAt,
    RecordedRequest,
    Route,
    RouteMove,
    ScheduleMove,
    Submit,
    cut,
    decision,
    delta,
    handed_over,
    ids_of,
    make_request,
    prefilled,
    read_of,
    truth,
)
from slow_cases import examples

from cluster.gateway.request_state import RequestPhase
from cluster.gateway.sample_output import OutputDelta, PromptLogprobsDelta
from kvtransfer.messages import ReplicaIdentity
from router.messages import RouteRequest
from workers.messages.link import (
    HandOverReport,
    HandOverTarget,
    Move,
    MoveEnded,
    PrefillReport,
    PromptLogprobs,
    RequestFailed,
    Submission,
    TokenDelta,
)
from workers.messages.sampling import TokenLogprob

News = TokenDelta | PrefillReport | HandOverReport | RequestFailed | MoveEnded | PromptLogprobs


@dataclass
class World:
    """Replicas that always tell the truth, wires that delay, repeat and break, and what the client saw."""

    data: st.DataObject
    request: RecordedRequest
    stops: tuple[str, ...]
    now: float = 0.0
    wires: list[tuple[ReplicaIdentity, News]] = field(default_factory=list)
    # The numbers of the submissions that are not superseded.
    current: set[int] = field(default_factory=set)
    routes: list[Route | ScheduleMove] = field(default_factory=list)
    num_moves: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    terminals: list[Finish | Fail] = field(default_factory=list)

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert not self.terminals, "an effect after the terminal"
            if isinstance(effect, ScheduleMove):
                self.routes.append(effect)
            elif isinstance(effect, RouteMove):
                self.route_move(effect.request)
            elif isinstance(effect, MoveAt):
                self.move(effect.replica, effect.move)
            elif isinstance(effect, Route):
                self.routes.append(effect)
                self.current.clear()
            elif isinstance(effect, Submit):
                self.current.add(effect.submission.attempt)
                self.wires.extend(self.answer(effect.replica, effect.submission))
            elif isinstance(effect, OutputDelta):
                self.see(effect)
            elif isinstance(effect, PromptLogprobsDelta):
                assert not self.tokens, "it comes before the first token"
                assert effect.first_index == len(self.prompt_logprobs) + 1
                self.prompt_logprobs += effect.logprobs.unpacked()
            elif isinstance(effect, Finish | Fail):
                self.terminals.append(effect)

    def see(self, emit: OutputDelta) -> None:
        got = self.tokens.setdefault(emit.sample, [])
        assert emit.first_index == len(got)
        assert emit.sample not in self.finishes
        got.extend(ids_of(emit.tokens))
        count, text, _ = cut(truth(emit.sample, self.request.prepared.sampling.max_tokens), self.stops)
        self.texts[emit.sample] = self.texts.get(emit.sample, "") + emit.text
        assert got == truth(emit.sample, count)[: len(got)]
        assert text.startswith(self.texts[emit.sample])
        if emit.finish:
            self.finishes[emit.sample] = emit.finish

    def answer(
        self, replica: ReplicaIdentity, submission: Submission
    ) -> Iterator[tuple[ReplicaIdentity, TokenDelta | PrefillReport | HandOverReport | PromptLogprobs]]:
        attempt, total = submission.attempt, submission.sampling.max_tokens
        yield replica, prefilled(attempt)
        if (num_top := submission.sampling.num_prompt_logprobs) is not None:
            first, end = 1, len(submission.prompt) // 4
            while first < end:
                count = self.data.draw(st.integers(1, end - first))
                yield replica, read_of(first, first + count, attempt, num_top)
                first += count
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

    def move(self, source: ReplicaIdentity, order: Move) -> None:
        """The source hands over what it has not told yet, from some token on; or it keeps it."""
        target, name = order.target.identity, (order.request_id, order.attempt)
        assert target != source
        rest = [
            it
            for it in self.wires
            if it[0] == source and isinstance(it[1], TokenDelta) and it[1].attempt == order.attempt
        ]
        if not rest or self.data.draw(st.booleans()):
            self.wires.append((source, MoveEnded(*name, target, "no free blocks")))
            return
        rest.sort(key=lambda it: it[1].first_index)  # type: ignore[union-attr]
        moved = rest[self.data.draw(st.integers(0, len(rest) - 1)) :]
        self.wires = [it for it in self.wires if it not in moved]
        first = moved[0][1].first_index  # type: ignore[union-attr]
        self.wires.append((source, MoveEnded(*name, target)))
        self.wires.append((target, replace(handed_over(order.attempt), first_index=first)))
        self.wires.extend((target, message) for _, message in moved)
        self.num_moves += 1

    def deliver(self, position: int, keep: bool) -> None:
        source, message = self.wires[position]
        if isinstance(message, MoveEnded):  # a Link keeps its order: this comes after the tokens from there
            before = [it for it in self.wires if it[0] == source and isinstance(it[1], TokenDelta)]
            position = self.wires.index(before[0]) if before else position
            source, message = self.wires[position]
        elif isinstance(message, HandOverReport):
            keep = False
        elif isinstance(message, PromptLogprobs) or (
            isinstance(message, TokenDelta) and message.first_index == 0
        ):  # so do these
            before = [it for it in self.wires if it[0] == source and isinstance(it[1], PromptLogprobs)]
            before = [it for it in before if it[1].attempt == message.attempt]
            position = self.wires.index(before[0]) if before else position
            source, message = self.wires[position]
        if not keep or isinstance(message, MoveEnded):
            self.wires.pop(position)
        if isinstance(message, TokenDelta):
            if message.attempt not in self.current:  # what an old attempt says must not matter
                message = delta(message.sample, message.first_index, 1, 1, message.attempt, shift=7)
            self.take(self.request.on_delta(source, message, self.now))
        elif isinstance(message, PromptLogprobs):
            if message.attempt not in self.current:
                message = read_of(1, 2, message.attempt, 1)
            self.take(self.request.on_prompt_logprobs(source, message, self.now))
        elif isinstance(message, PrefillReport):
            self.take(self.request.on_prefilled(message, self.now))
        elif isinstance(message, HandOverReport):
            self.take(self.request.on_handed_over(source, message, self.now))
        elif isinstance(message, MoveEnded):
            self.take(self.request.on_move_ended(source, message, self.now))
        else:
            self.take(self.request.on_failed(source, message, self.now))

    def route(self) -> None:
        route = self.routes.pop(0)
        if isinstance(route, ScheduleMove):
            self.take(self.request.on_move_time(self.now))
            return
        request = route.request
        choices = [it for it in (P0, P1, None) if it is None or it.replica_id not in request.excluded]
        decodes = [it for it in (D0, D1) if it.replica_id not in request.excluded]
        if not decodes:
            self.take(self.request.on_no_route("no decode replica", 0.1, self.now))
            return
        prefill, decode = self.data.draw(st.sampled_from(choices)), self.data.draw(st.sampled_from(decodes))
        target = HandOverTarget(decode, "a")
        self.take(self.request.on_routed(decision(prefill, decode), prefill, target, self.now))

    def route_move(self, wanted: RouteRequest) -> None:
        targets = [it for it in (D0, D1, P0) if it.replica_id not in wanted.excluded]
        target = self.data.draw(st.sampled_from(targets)) if targets else None
        place = HandOverTarget(target, "a") if target else None
        self.take(self.request.on_move_routed(place, self.now))

    def leave(self) -> None:
        """Streams shall leave a replica, or may stay there after all."""
        replica, may_stay = self.data.draw(st.sampled_from([D0, D1])), self.data.draw(st.integers(0, 4)) == 0
        self.take(self.request.on_streams(replica, may_stay, self.now))

    def disturb(self) -> None:
        replica = self.data.draw(st.sampled_from([P0, P1, D0, D1]))
        if self.data.draw(st.booleans()):
            self.wires = [entry for entry in self.wires if entry[0] != replica]
            self.take(self.request.on_lost(replica, "reset", self.now))
        else:
            attempt = self.data.draw(st.integers(1, 12))
            code = self.data.draw(st.sampled_from(["refused", "peer", "internal", "leaving"]))
            self.wires.append((replica, RequestFailed("r", attempt, code, "why", 0.1)))


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_any_order_of_events_gives_a_prefix_of_the_truth_and_one_terminal(data: st.DataObject) -> None:
    play(data, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)), num_leavings=0)


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_log_probabilities_of_the_prompt_come_once_in_order_and_first(data: st.DataObject) -> None:
    play(data, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4)), num_leavings=0, num_read=12)


@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_a_stream_that_moves_gives_the_same_and_has_one_terminal(data: st.DataObject) -> None:
    play(data, 1, data.draw(st.integers(4, 16)), num_leavings=4)


def play(data: st.DataObject, n: int, max_tokens: int, num_leavings: int, num_read: int = 0) -> None:
    """With `num_read` tokens of the prompt, their log-probabilities are asked for."""
    stops = data.draw(st.sampled_from([(), ("ab",), ("ca", "bcd"), ("dd", "d")]))
    request = make_request(
        n=n,
        max_tokens=max_tokens,
        stops=() if num_leavings else stops,
        num_prompt_tokens=num_read or 3,
        num_prompt_logprobs=2 if num_read else None,
    )
    world = World(data, request, () if num_leavings else stops)
    num_disturbances = data.draw(st.integers(0, 2 if num_leavings else 6))
    world.take(request.start(0.0))
    while not world.terminals:
        world.now += 0.01
        choice = data.draw(st.integers(0, 9))
        if choice == 0 and num_disturbances:
            num_disturbances -= 1
            world.disturb()
        elif choice in (2, 3) and num_leavings:
            num_leavings -= 1
            world.leave()
        elif world.routes:
            world.route()
        else:
            assert world.wires, "nothing is under way, and no terminal"
            world.deliver(data.draw(st.integers(0, len(world.wires) - 1)), keep=choice == 1)
    assert request.phase is RequestPhase.ENDED
    (terminal,) = world.terminals
    if isinstance(terminal, Finish):
        expected = read_of(1, num_read).logprobs.unpacked() if num_read else []
        assert world.prompt_logprobs == expected
        for index in range(n):
            count, text, finish = cut(truth(index, max_tokens), world.stops)
            assert world.tokens[index] == truth(index, count)
            assert (world.texts[index], world.finishes[index]) == (text, finish)
    for source, message in world.wires:
        if isinstance(message, TokenDelta):
            assert request.on_delta(source, message, world.now) == []
    assert request.on_lost(D0, "late", world.now) == request.on_deadline(world.now) == []
