"""What each part of the policy for snapshots of states saves: `python -m benchmarks.snapshots`.

With `--snapshots 13,52` it compares instead, at these budgets, eviction by worth with eviction of what was
used least recently; with `--trace FILE` over requests in Mooncake's format, in place of chats.

Drawn chats run through the scheduler, with its pools and its policy, in virtual time: no model computes, and
the answers are those that were drawn. Sizes are those of Qwen3-Next 80B on one device with 16 GB for KV: a
state takes as much memory as 191 blocks of 16 tokens, and a quarter of the memory for KV is for snapshots.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.drawn_chats import END, ChatDrawer, ChatTurn, DrawnChat
from cluster.bench.trace_file import TRACE_BLOCK_TOKENS, read_trace
from kvtransfer.blocks.keys import extend_keys
from workers.config import EngineConfig
from workers.messages.link import MAX_MESSAGE_ENDS, SampleState, Submission
from workers.messages.rank_channel import StepPlan, StepReport
from workers.messages.sampling import SamplingParams
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.sequence import Sequence
from workers.scheduler.snapshot_policy import SnapshotPolicy

MAX_SEQUENCES = 16
# The blocks of states that running sequences need.
_NUM_WORKING = 3 * MAX_SEQUENCES + 2
# What a step takes, and what each sequence that decodes and each token of a prompt adds.
STEP_S, SEQUENCE_S, TOKEN_S = 0.01, 1e-4, 4e-5
# Agents ask several times for each question: so many chats of theirs stand for one of a person.
_AGENTS = 0.2
# The trace has more requests than the device of the chats can serve: ten times the memory, and a third of the
# rate. Answers are not in the prompts that follow them, so they are short.
_TRACE_SCALE = 3.0
_TRACE_ANSWER = 8
# Ids of blocks begin at 0, special tokens are below this.
_FIRST_TOKEN = 16
_ROOT_KEY = b"root"


class Memory(NamedTuple):
    """The memory of a replica: a snapshot for each 764 blocks of 16 tokens, if it is not set otherwise."""

    block_tokens: int = 16
    num_blocks: int = 40_000
    num_snapshots: int = 52


_TRACE_MEMORY = Memory(TRACE_BLOCK_TOKENS, 12_500, 523)


class RecentPool(GroupPool):
    """Evicts what was released least recently: nothing is worth more."""

    def register(self, block_id: int, key: bytes, group: str, worth: int = 0) -> bool:
        return super().register(block_id, key, group)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the policy that are on. Of `message_ends` a prompt keeps so many."""

    prompt_ends: bool = True
    divergences: bool = True
    message_ends: int = 0
    every_tokens: int = 0


class PartialPolicy(SnapshotPolicy):
    """A policy some of whose parts are off."""

    def __init__(self, parts: Parts, block_tokens: int) -> None:
        super().__init__(block_tokens, parts.every_tokens, parts.message_ends)
        self._parts = parts

    def _divergences(self, sequence: Sequence) -> Iterable[int]:
        return super()._divergences(sequence) if self._parts.divergences else ()

    def _ends_of_prompt(self, sequence: Sequence) -> Iterable[int]:
        return super()._ends_of_prompt(sequence) if self._parts.prompt_ends else ()


class VirtualEngine:
    """A scheduler whose plans take virtual time, and whose answers are known."""

    def __init__(self, parts: Parts, memory: Memory, pool: type[GroupPool] = GroupPool) -> None:
        config = EngineConfig(max_batch_tokens=4096, chunk_tokens=4096, max_sequences=MAX_SEQUENCES)
        kv, num_states = (
            BlockPool(memory.num_blocks, memory.block_tokens),
            _NUM_WORKING + memory.num_snapshots,
        )
        self.scheduler = Scheduler(
            config,
            kv,
            eos_token_ids=(END,),
            max_context_tokens=1 << 20,
            group_pools=[pool(2, num_states, has_states=True, kv=kv)],
            snapshots=PartialPolicy(parts, memory.block_tokens),
        )
        self._block_tokens = memory.block_tokens
        self._says_ends = parts.message_ends > 0
        self.num_computed_tokens = 0
        self.num_steps = 0
        self.ttfts_s: list[float] = []
        self.now = 0.0
        self._answers: dict[int, np.ndarray] = {}
        self._arrivals: dict[str, float] = {}
        self._slot_to_answer: dict[int, tuple[np.ndarray, int]] = {}

    def submit(self, number: int, turn: ChatTurn) -> None:
        """Queue the request, which arrives now."""
        prompt = turn.prompt.astype("<u4").tobytes()
        ends = turn.message_ends if self._says_ends else ()
        ends = (*ends[:1], *ends[1:][1 - MAX_MESSAGE_ENDS :])
        self._answers[number] = turn.answer
        self._arrivals[str(number)] = self.now
        submission = Submission(
            *(str(number), 1, "", "", 0, prompt, _ROOT_KEY),
            extend_keys(_ROOT_KEY, prompt, self._block_tokens),
            (SampleState(0, number),),
            SamplingParams(max_tokens=len(turn.answer) + 1),
            *(None, None),
            message_ends=ends,
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
        self.now += STEP_S + num_decodes * SEQUENCE_S + num_prompt_tokens * TOKEN_S
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


def run(chats: list[DrawnChat], engine: VirtualEngine) -> dict[str, Any]:
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
            engine.submit(len(request_to_chat) - 1, turn)
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


def read_requests(file: Path, num_requests: int) -> list[DrawnChat]:
    """Return the first requests of a trace, each as a chat of one turn."""
    chats: list[DrawnChat] = []
    for request in itertools.islice(read_trace(file), num_requests):
        tokens = np.repeat(np.asarray(request.hash_ids) + _FIRST_TOKEN, request.block_tokens)
        answer = np.asarray([*[_FIRST_TOKEN] * min(_TRACE_ANSWER, request.output_length), END])
        turn = ChatTurn(tokens[: request.input_length], (), answer, 0.0)
        chats.append(DrawnChat(request.timestamp_ms / 1e3 * _TRACE_SCALE, [turn]))
    return chats


def compare_policies(kind: dict[str, Any], chats: list[DrawnChat], memory: Memory) -> None:
    """Run every policy over the same chats."""
    for name, parts in NAME_TO_PARTS.items():
        found = run(chats, VirtualEngine(parts, memory))
        print(json.dumps({**kind, "policy": name, **found}), flush=True)


def compare_evictions(
    kind: dict[str, Any], chats: list[DrawnChat], memory: Memory, budgets: Iterable[int]
) -> None:
    """Run the default policy over the same chats, with both evictions at each budget."""
    parts = NAME_TO_PARTS["all, 1 message end"]
    for num_snapshots in budgets:
        for name, pool in (("recent use", RecentPool), ("worth", GroupPool)):
            engine = VirtualEngine(parts, memory._replace(num_snapshots=num_snapshots), pool)
            shown = {**kind, "num_snapshots": num_snapshots, "eviction": name}
            print(json.dumps({**shown, **run(chats, engine)}), flush=True)


def main() -> None:
    """Compare policies, or evictions, over chats of people and of agents, or over a trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=60, help="how many chats of people are drawn")
    parser.add_argument("--rate", type=float, default=1.0, help="chats of people that begin in a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--snapshots", help="compare evictions at these numbers of snapshots")
    parser.add_argument("--trace", type=Path, help="a trace of requests in Mooncake's format")
    parser.add_argument("--requests", type=int, default=3000, help="how many of the trace")
    args = parser.parse_args()
    loads: list[tuple[str, list[DrawnChat], Memory]] = []
    if args.trace is not None:
        loads.append(("trace", read_requests(args.trace, args.requests), _TRACE_MEMORY))
    else:
        for name, scale in (("people", 1.0), ("agents", _AGENTS)):
            drawer = ChatDrawer(args.seed, are_agents=name == "agents")
            chats = drawer.draw(max(1, round(args.chats * scale)), args.rate * scale)
            loads.append((name, chats, Memory()))
    for name, chats, memory in loads:
        kind = {"chats": name, "seed": args.seed}
        if args.snapshots is None:
            compare_policies(kind, chats, memory)
        else:
            compare_evictions(kind, chats, memory, map(int, args.snapshots.split(",")))


if __name__ == "__main__":
    main()
