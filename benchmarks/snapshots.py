"""What each part of the policy for snapshots of states saves: `python -m benchmarks.snapshots`.

Drawn chats run through the scheduler, with its pools and its policy, in virtual time: no model computes, and
the answers are those that were drawn. Sizes are those of Qwen3-Next 80B on one device with 16 GB for KV: a
state takes as much memory as 191 blocks of 16 tokens, and a quarter of the memory for KV is for snapshots.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.drawn_chats import END, ChatDrawer, ChatTurn, DrawnChat
from cluster.bench.virtual_replica import EngineModel
from kvtransfer.blocks.keys import extend_keys
from workers.config import EngineConfig
from workers.messages.link import MAX_MESSAGE_ENDS, SampleState, Submission
from workers.messages.rank_channel import StepPlan, StepReport
from workers.messages.sampling import SamplingParams
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.sequence import Sequence
from workers.scheduler.snapshot_policy import SnapshotPolicy
from workers.scheduler.group_pool import GroupPool

BLOCK_TOKENS = 16
NUM_BLOCKS = 40_000
MAX_SEQUENCES = 16
# The blocks of states that running sequences need, and a snapshot for each 764 blocks of KV.
NUM_STATES = 3 * MAX_SEQUENCES + 2 + NUM_BLOCKS // 764
STEPS = EngineModel(base_s=0.01, sequence_s=0.0001, context_s=0.0, token_s=4e-5)
# Agents ask several times for each question: so many chats of theirs stand for one of a person.
_AGENTS = 0.2
_ROOT_KEY = b"root"


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the policy that are on. Of `message_ends` a prompt keeps so many."""

    prompt_ends: bool = True
    divergences: bool = True
    message_ends: int = 0
    every_tokens: int = 0


class PartialPolicy(SnapshotPolicy):
    """A policy some of whose parts are off."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(BLOCK_TOKENS, parts.every_tokens, parts.message_ends)
        self._parts = parts

    def _divergences(self, sequence: Sequence) -> Iterable[int]:
        return super()._divergences(sequence) if self._parts.divergences else ()

    def _ends_of_prompt(self, sequence: Sequence) -> Iterable[int]:
        return super()._ends_of_prompt(sequence) if self._parts.prompt_ends else ()


class VirtualEngine:
    """A scheduler whose plans take virtual time, and whose answers are known."""

    def __init__(self, policy: SnapshotPolicy) -> None:
        config = EngineConfig(max_batch_tokens=4096, chunk_tokens=4096, max_sequences=MAX_SEQUENCES)
        self.scheduler = Scheduler(
            config,
            BlockPool(NUM_BLOCKS, BLOCK_TOKENS),
            eos_token_ids=(END,),
            max_context_tokens=1 << 20,
            group_pools=[GroupPool(2, NUM_STATES, has_states=True)],
            snapshots=policy,
        )
        self.num_computed_tokens = 0
        self.num_steps = 0
        self.ttfts_s: list[float] = []
        self.now = 0.0
        self._answers: dict[int, np.ndarray] = {}
        self._arrivals: dict[str, float] = {}
        self._slot_to_answer: dict[int, tuple[np.ndarray, int]] = {}

    def submit(self, number: int, turn: ChatTurn, *, says_ends: bool) -> None:
        """Queue the request, which arrives now."""
        prompt = turn.prompt.astype("<u4").tobytes()
        ends = turn.message_ends
        ends = (ends[0], *ends[1:][1 - MAX_MESSAGE_ENDS :])
        self._answers[number] = turn.answer
        self._arrivals[str(number)] = self.now
        submission = Submission(
            *(str(number), 1, "", "", 0, prompt, _ROOT_KEY),
            extend_keys(_ROOT_KEY, prompt, BLOCK_TOKENS),
            (SampleState(0, number),),
            SamplingParams(max_tokens=len(turn.answer) + 1),
            *(None, None),
            message_ends=ends if says_ends else (),
        )
        self.scheduler.submit(submission, self.now)

    def step(self) -> list[int] | None:
        """Run one step; return the requests that ended, None if there was nothing to do."""
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return None
        num_decodes = len(plan.decodes) // 4
        num_prompt_tokens = plan.num_tokens - num_decodes
        self.num_computed_tokens += num_prompt_tokens
        self.num_steps += 1
        self.now += STEPS.step_s(num_decodes, 0, num_prompt_tokens)
        outcome = self.scheduler.settle(StepReport(plan.step, self._sampled(plan), 0.0, 0.0), self.now)
        assert not outcome.failures
        for prompt in outcome.prompts:
            self.ttfts_s.append(self.now - self._arrivals[prompt.request_id])
        return [int(delta.request_id) for delta in outcome.tokens if delta.finish]

    def _sampled(self, plan: StepPlan) -> bytes:
        """Return the next token of the answer of each slot that samples."""
        for start in plan.starts:
            for it in start.samples:
                self._slot_to_answer[it.slot] = self._answers[it.seed], it.num_output_tokens
        tokens: list[int] = []
        for slot in plan.sample_slots:
            answer, index = self._slot_to_answer[slot]
            tokens.append(int(answer[index]))
            self._slot_to_answer[slot] = answer, index + 1
        return np.asarray(tokens, "<u4").tobytes()


def run(chats: list[DrawnChat], engine: VirtualEngine, *, says_ends: bool) -> dict[str, Any]:
    """Let all chats run to their end; return what was reused and what was computed."""
    waiting = [(chat.begins_at, number) for number, chat in enumerate(chats)]
    heapq.heapify(waiting)
    next_turn = [0] * len(chats)
    request_to_chat: dict[int, int] = {}
    num_prompt_tokens = 0
    while waiting or not engine.scheduler.is_idle:
        while waiting and waiting[0][0] <= engine.now:
            _, number = heapq.heappop(waiting)
            turn = chats[number].turns[next_turn[number]]
            request_to_chat[len(request_to_chat)] = number
            engine.submit(len(request_to_chat) - 1, turn, says_ends=says_ends)
            num_prompt_tokens += len(turn.prompt)
        ended = engine.step()
        if ended is None:
            engine.now = max(engine.now, waiting[0][0])
        for number in (request_to_chat[request] for request in ended or ()):
            next_turn[number] += 1
            if next_turn[number] < len(chats[number].turns):
                think_s = chats[number].turns[next_turn[number]].think_s
                heapq.heappush(waiting, (engine.now + think_s, number))
    engine.scheduler.check()
    counts = engine.scheduler.life.tables.snapshot_counts
    return {
        "prompt_tokens": num_prompt_tokens,
        "hit": round(1 - engine.num_computed_tokens / num_prompt_tokens, 4),
        "recomputed": round(counts.num_recomputed_tokens / num_prompt_tokens, 4),
        "prompts_behind_all_cached": round(counts.num_hits / (counts.num_hits + counts.num_misses), 3),
        "mean_ttft_ms": round(1e3 * float(np.mean(engine.ttfts_s)), 1),
        "p90_ttft_ms": round(1e3 * float(np.quantile(engine.ttfts_s, 0.9)), 1),
        "steps": engine.num_steps,
    }


NAME_TO_PARTS = {
    "none": Parts(prompt_ends=False, divergences=False),
    "prompt ends": Parts(divergences=False),
    "divergences": Parts(prompt_ends=False),
    "prompt ends, divergences": Parts(),
    "all, 1 message end": Parts(message_ends=1),
    "all, 2 message ends": Parts(message_ends=2),
    "all, 4 message ends": Parts(message_ends=4),
    "all, 16 message ends": Parts(message_ends=MAX_MESSAGE_ENDS),
    "all but prompt ends": Parts(prompt_ends=False, message_ends=1),
    "all but divergences": Parts(divergences=False, message_ends=1),
    "prompt ends, divergences, every 1024": Parts(every_tokens=1024),
    "all, 1 message end, every 1024": Parts(message_ends=1, every_tokens=1024),
}


def main() -> None:
    """Run every policy over the same chats, of people and of agents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=60, help="how many chats of people are drawn")
    parser.add_argument("--rate", type=float, default=1.0, help="chats of people that begin in a second")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for are_agents in (False, True):
        scale = _AGENTS if are_agents else 1.0
        drawer = ChatDrawer(args.seed, are_agents=are_agents)
        chats = drawer.draw(max(1, round(args.chats * scale)), args.rate * scale)
        kind = {"chats": "agents" if are_agents else "people"}
        for name, parts in NAME_TO_PARTS.items():
            engine = VirtualEngine(PartialPolicy(parts))
            says_ends = parts.message_ends > 0
            print(json.dumps({**kind, "policy": name, **run(chats, engine, says_ends=says_ends)}), flush=True)


if __name__ == "__main__":
    main()
