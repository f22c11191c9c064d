"""Which ends of a prompt's messages get a snapshot, beside its own end and divergences."""

from __future__ import annotations

import pytest
from staged_engine import ask

from workers.config import EngineConfig
from workers.messages.link import MAX_MESSAGE_ENDS
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.sequence import Request, Sequence
from workers.scheduler.snapshot_policy import SnapshotPolicy

BLOCK_TOKENS = 16


def sequence(num_tokens: int, *message_ends: int) -> Sequence:
    submission = ask("a", [1] * num_tokens, message_ends=message_ends)
    return Request(submission, 0, 0.0, 1).sequences[0]


def wanted(policy: SnapshotPolicy, of: Sequence) -> list[int]:
    return [border for border in range(1, of.num_tokens // BLOCK_TOKENS + 1) if policy.keeps(of, border)]


@pytest.mark.parametrize(
    ("budget", "borders"),
    [
        (0, [62]),
        (1, [6, 62]),
        (2, [6, 57, 62]),
        (3, [6, 31, 57, 62]),
        (16, [6, 18, 31, 57, 62]),
    ],
)
def test_the_first_end_goes_before_all_and_the_last_before_others(budget: int, borders: list[int]) -> None:
    """Those at 905 and 130 are within 64 tokens of ends that go before them."""
    prompt = sequence(1005, 100, 130, 300, 500, 905, 920, 995)
    assert wanted(SnapshotPolicy(BLOCK_TOKENS, most_message_ends=budget), prompt) == borders


def test_a_divergence_is_kept_when_a_second_prompt_parts_there() -> None:
    """It needs no budget, and a chunk of the first one ends there as well."""
    policy, prompts = SnapshotPolicy(BLOCK_TOKENS), [sequence(1005, 100, 995) for _ in range(2)]
    for prompt, kept in zip(prompts, ([62], [40, 62]), strict=True):
        prompt.known_border = 40
        assert policy.end_of_chunk(prompt, 1000) == 40 * BLOCK_TOKENS
        policy.note_divergence(prompt)
        assert wanted(policy, prompt) == kept


def test_the_last_message_ends_the_prompt_unless_that_is_far() -> None:
    policy = SnapshotPolicy(BLOCK_TOKENS)
    assert wanted(policy, sequence(1009, 1000)) == [62]
    assert wanted(policy, sequence(1009, 960)) == [63]
    assert wanted(policy, sequence(20, 10)) == [1], "a border of no block is none"


@pytest.mark.parametrize(("num_blocks", "most"), [(30, 1), (180, 1), (190, 2), (10_000, MAX_MESSAGE_ENDS)])
def test_the_budget_grows_with_the_blocks_of_a_sequence(num_blocks: int, most: int) -> None:
    pools = [GroupPool(64, 500), GroupPool(2, num_blocks, has_states=True)]
    policy = SnapshotPolicy.of_replica(BLOCK_TOKENS, EngineConfig(max_sequences=10), pools)
    prompt = sequence(100 * MAX_MESSAGE_ENDS + 200, *range(100, 100 * MAX_MESSAGE_ENDS + 100, 100))
    assert len(wanted(policy, prompt)) == most + 1
