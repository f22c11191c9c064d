"""A model whose layers partly keep a recurrent state, through a cluster of mixed shapes: what `transformers`
generates, wherever prompts start and streams go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e_harness import BLOCK_TOKENS, E2eHarness, Heard, Replica, joined, move, prompt, started, until
from paged_model import continued
from state_families import STATE_FAMILIES, write_state_checkpoint

from workers.config import Parallel

pytestmark = pytest.mark.slow  # nine ranks, and a reference

NUM_TOKENS = 60
PROMPT = prompt(5)
# As long, and the same up to the middle of a block.
OTHER = [*PROMPT[:70], *prompt(6)[:30]]


class StateCluster:
    """A prefill replica of two ranks and two stages, a decode replica of three stages, and one of one
    rank."""

    def __init__(self, harness: E2eHarness, model_dir: Path) -> None:
        self.harness = harness
        self._model_dir = model_dir
        self.prefill: Replica
        self.decode: Replica
        self.single: Replica

    async def start(self) -> None:
        cpus = ("cpu",) * 3
        mixed = Parallel(tp=2, pp=2, devices=cpus[:2], layers=(2, 2))
        self.prefill = await self.harness.add("p", "prefill", parallel=mixed)
        self.decode = await self.harness.add(
            "d", "decode", parallel=Parallel(pp=3, devices=cpus, layers=(1, 1, 2))
        )
        self.single = await self.harness.add("s")
        for replica in self.replicas:
            assert [pool.has_states for pool in replica.core.group_pools] == [True]

    @property
    def replicas(self) -> tuple[Replica, Replica, Replica]:
        return self.prefill, self.decode, self.single

    async def run(self, at: Replica, name: str, tokens: list[int], **how: Any) -> Heard:
        submission = self.harness.submission(name, tokens, max_tokens=NUM_TOKENS, **how)
        heard = await self.harness.run(at, submission)
        assert heard.failure is None, heard.failure
        assert heard.sequence() == continued(self._model_dir, tokens, NUM_TOKENS)
        return heard

    async def check_hand_over(self, name: str, tokens: list[int], num_held: int, num_cached: int) -> None:
        """Every block of KV that the target lacks crosses once, and the state once."""
        heard = await self.run(self.prefill, name, tokens, decode=self.decode)
        assert heard.hand_over is not None
        assert heard.prefill is not None
        assert (heard.hand_over.num_held_tokens, heard.prefill.num_cached_tokens) == (num_held, num_cached)
        compatibility = self.single.core.ready[0].compatibility
        num_blocks = -(-len(tokens) // BLOCK_TOKENS) - num_held // BLOCK_TOKENS
        num_bytes = num_blocks * BLOCK_TOKENS * compatibility.token_bytes + compatibility.state_bytes
        assert heard.hand_over.num_moved_bytes == num_bytes

    async def check_turns(self) -> None:
        """Three turns of a chat at one replica: each starts behind the last whole block of the one before."""
        tokens = prompt(8)[:37]
        for turn in range(3):
            heard = await self.run(self.single, f"turn {turn}", tokens)
            assert heard.prefill is not None
            # The last token of an answer is never computed, and the first prompt finds nothing.
            num_before = len(tokens) - 11 if turn else 0
            assert heard.prefill.num_cached_tokens == num_before // BLOCK_TOKENS * BLOCK_TOKENS
            tokens = [*tokens, *heard.sequence(), *prompt(9 + turn)[:11]]

    async def check_migration(self, source: Replica, target: Replica, num_before: int) -> None:
        name = f"{source.core.identity.replica_id} after {num_before}"
        submission = self.harness.submission(name, PROMPT, max_tokens=NUM_TOKENS)
        await joined(source, target)
        heard = await started(self.harness, source, submission, num_before)
        move(submission, source, target)
        await until(lambda: bool(heard.moves), "the move has ended")
        await self.harness.ended(submission)
        assert [ended.error for ended in heard.moves] == [""]
        assert heard.sequence() == continued(self._model_dir, PROMPT, NUM_TOKENS)

    async def check_resumption(self, num_before: int) -> None:
        """Elsewhere, after so many tokens."""
        expected = continued(self._model_dir, PROMPT, NUM_TOKENS)
        submission = self.harness.submission(
            "resumed", PROMPT, decode=self.decode, attempt=1, output=expected[:num_before],
            max_tokens=NUM_TOKENS,
        )  # fmt: skip
        heard = await self.harness.run(self.prefill, submission)
        assert heard.failure is None, heard.failure
        got = [heard.tokens[0][index] for index in range(num_before, NUM_TOKENS)]
        assert got == expected[num_before:]

    async def check_samples(self, at: Replica, **how: Any) -> None:
        """Greedy ones, which are alike, and each of which has a state of its own."""
        submission = self.harness.submission(f"three {how}", PROMPT, num_samples=3, max_tokens=30, **how)
        heard = await self.harness.run(at, submission)
        assert heard.failure is None, heard.failure
        expected = continued(self._model_dir, PROMPT, 30)
        assert [heard.sequence(sample) for sample in range(3)] == [expected] * 3

    async def check_preemption(self) -> None:
        """Of three that run at a replica with KV for two, each has its tokens."""
        few = await self.harness.add("few", engine={"kv_tokens": 288})
        prompts = [prompt(20 + number) for number in range(3)]
        asked = [
            self.harness.submission(f"few {number}", tokens, max_tokens=NUM_TOKENS)
            for number, tokens in enumerate(prompts)
        ]
        for submission in asked:
            few.send(submission)
        for submission, tokens in zip(asked, prompts, strict=True):
            heard = await self.harness.ended(submission)
            assert heard.failure is None, heard.failure
            assert heard.sequence() == continued(self._model_dir, tokens, NUM_TOKENS)
        assert few.core.scheduler.life.num_preemptions > 0

    def check_freed(self) -> None:
        """Nothing is used when nothing runs."""
        for replica in self.replicas:
            assert not any(pool.num_references for pool in replica.core.group_pools)


@pytest.mark.parametrize("family", STATE_FAMILIES)
async def test_a_state_goes_where_its_sequence_goes(family: str, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    write_state_checkpoint(model_dir, family)
    harness = E2eHarness(model_dir)
    async with harness:
        cluster = StateCluster(harness, model_dir)
        await cluster.start()
        await cluster.check_hand_over("first", PROMPT, 0, 0)
        await cluster.check_hand_over("again", PROMPT, 96, 96)
        await cluster.check_hand_over("left the way", OTHER, 64, 64)
        await cluster.check_hand_over("left it there too", [*OTHER[:64], *prompt(7)[:9]], 64, 64)
        await cluster.check_turns()
        await cluster.check_resumption(40)
        await cluster.check_migration(cluster.decode, cluster.single, 25)
        await cluster.check_migration(cluster.single, cluster.decode, 7)
        await cluster.check_samples(cluster.prefill, decode=cluster.decode)
        await cluster.check_samples(cluster.single)
        await cluster.check_preemption()
        await harness.quiet()
        cluster.check_freed()
