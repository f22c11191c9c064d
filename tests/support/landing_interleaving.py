"""Random events on both sides of the landing protocol, for tests of every interleaving."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from landing_world import BLOCK, World, request

from kvtransfer.peer_messages import LandingRequest

NUMBERS = st.integers(0, 2)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), NUMBERS, st.integers(1, 80)),
        st.tuples(st.just("compute"), NUMBERS, st.sampled_from([16, 32, 48, 80])),
        st.tuples(st.sampled_from(["stop", "abort", "cancel"]), NUMBERS, st.just(0)),
        st.tuples(st.sampled_from(["handle", "write"]), st.integers(0, 3), st.integers(1, 3)),
        st.tuples(st.sampled_from(["run", "wire"]), st.integers(0, 3), st.integers(1, 9)),
        st.tuples(st.sampled_from(["hear writer", "hear target"]), st.integers(0, 3), st.integers(1, 9)),
        st.tuples(st.sampled_from(["writers", "targets"]), st.just(0), st.just(0)),
        st.tuples(st.just("time"), st.integers(0, 12), st.just(0)),
        st.tuples(st.sampled_from(["flip", "fail", "freeze", "thaw", "die"]), st.integers(0, 3), st.just(0)),
        st.tuples(st.sampled_from(["breaks", "notices", "connects"]), st.just(0), st.just(0)),
    ),
    min_size=8,
    max_size=60,
)


def block_key(number: int, index: int) -> bytes:
    """Return the key of a full block of request `number`."""
    return bytes([number, index])


class Interleaving:
    """Carries out random events on a world."""

    def __init__(self, world: World, num_keys: int = 0) -> None:
        """The prompts of all requests have `num_keys` block keys, or fewer where they are short."""
        self.world = world
        self.num_keys = num_keys
        self.sizes: dict[int, int] = {}
        self.computed: dict[int, int] = {}

    def do(self, kind: str, number: int, amount: int) -> None:
        world = self.world
        writer = world.writers[number % len(world.writers)]
        target = world.targets[number % len(world.targets)]
        match kind:
            case "ask" if number not in self.sizes and world.is_linked:
                self.sizes[number] = amount
                world.ask(self._wanted(number, amount))
                if amount % 2:  # half of the landings are granted before anything else happens
                    while world.deliver_to_decode() or world.deliver_to_prefill():
                        pass
            case "grow" if number not in self.sizes and world.is_linked:
                self.sizes[number] = amount
                wanted = self._wanted(number, amount, is_growing=True)
                self.computed[number] = len(wanted.block_keys) * BLOCK
                world.ask(wanted)
            case "compute" if number in self.sizes:
                done = min(max(amount, self.computed.get(number, 0)), self.sizes[number])
                self.computed[number] = done
                world.compute(number, done)
            case "end" if world.push.has_caught_up(f"r{number}", 0):
                self._end_early(number, amount)
            case "stop":
                world.do_push(world.push.stop(f"r{number}", 0, "cancelled", world.now))
            case "abort":
                world.do_landing(world.landing.abort(bytes([number]) * 16, "test"))
            case "cancel":
                world.do_landing(world.landing.cancel(f"r{number}", 0))
            case "handle":
                repeat(amount, writer.handle)
            case "write":
                repeat(amount, writer.write)
            case "run":
                repeat(amount, target.run)
            case "wire":
                repeat(amount, world.deliver_to_decode, world.deliver_to_prefill)
            case "hear writer":
                repeat(amount, lambda: world.hear_writer(writer.rank))
            case "hear target":
                repeat(amount, lambda: world.hear_target(target.rank))
            case "writers":
                world.writers_work()
            case "targets":
                world.targets_work()
            case "time":
                world.now += number
                world.tick()
            case "flip":
                writer.num_flips += 1
            case "fail":
                writer.fail()
            case "freeze" | "thaw":
                writer.is_frozen = kind == "freeze" or not writer.is_alive
            case "die":
                writer.die()
            case "breaks":
                world.link_breaks()
            case "notices":
                world.decode_notices()
            case "connects":
                world.connect()

    def _wanted(self, number: int, num_tokens: int, *, is_growing: bool = False) -> LandingRequest:
        num_keys = min(self.num_keys, (num_tokens - 1 if is_growing else num_tokens) // BLOCK)
        keys = tuple(block_key(number, index) for index in range(num_keys))
        return request(number, num_tokens, block_keys=keys, is_growing=is_growing)

    def _end_early(self, number: int, num_more: int) -> None:
        """End a growing sequence that has been written so far, at most `num_more` tokens later."""
        world, computed = self.world, self.computed.get(number, 0)
        wanted = world.asked[bytes([number]) * 16]
        if wanted.is_growing and computed < self.sizes[number]:
            num_tokens = min(computed + max(1, num_more), self.sizes[number])
            world.push.end_at(f"r{number}", 0, num_tokens)
            world.num_handed_over[f"r{number}"] = self.sizes[number] = num_tokens

    def end(self) -> None:
        """Whoever notices something late notices it now; requests end; leases run out."""
        world = self.world
        if any(not writer.is_alive for writer in world.writers):
            world.prefill_dies()
        world.decode_notices()
        world.settle()
        for number in self.sizes if world.prefill_lives else ():
            world.do_push(world.push.stop(f"r{number}", 0, "end of the test", world.now))
        for _ in range(3):
            if any(writer.is_frozen for writer in world.writers):  # it does not even close its connections
                world.connect()
            world.settle()
            world.decode_notices()
            world.now += 100.0
            world.tick()


def repeat(times: int, *steps: Callable[[], bool]) -> None:
    for step in steps * times:
        step()
