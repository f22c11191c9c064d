"""A request in the engine and its sequences: plain state, changed by the scheduler only."""

from __future__ import annotations

from enum import Enum

from kvtransfer.blocks.keys import TOKEN_BYTES, extend_keys
from kvtransfer.request_facts import ServiceClass
from workers.messages.link import RequestKey, SampleState, Submission


class Phase(Enum):
    """The phase of a sequence; `Scheduler` draws the transitions."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTING = "preempting"
    HELD = "held"
    ENDED = "ended"


class LandingState(Enum):
    """Whether the KV of a request that is handed over has a place to go."""

    NEEDED = "needed"
    ASKED = "asked"
    READY = "ready"


class Hold(Enum):
    """The sequences that a waiting sequence keeps waiting behind it in line, whatever there is space for."""

    NOBODY = "nobody"
    # The sequences of its sharing group, whose share of the device it waits for.
    GROUP = "group"
    EVERYBODY = "everybody"


class StoreLoad(Enum):
    """Whether blocks that the device does not hold are to be had from the store, before it is admitted."""

    WANTED = "wanted"
    ASKED = "asked"
    DONE = "done"


# Requests are served in order of their due time: arrival plus the wait that their class allows
# (`Submission.due_s`, or the delay of their class where the gateway names none). Each step of priority moves
# it 10 s earlier, so no request starves.
DUE_PER_PRIORITY_S = 10.0
CLASS_DELAY_S: dict[ServiceClass, float] = {"interactive": 0.0, "standard": 5.0, "batch": 600.0}
# A preempted sequence waits before the sequences that arrived up to this much before it.
_PREEMPTED_S = 600.0

# Urgency; number of arrival; index of the sample.
Rank = tuple[float, int, int]


class Request:
    """One submission: what its samples have in common."""

    __slots__ = (
        "arrival",
        "arrived_at",
        "deadline",
        "due_at",
        "key",
        "landing",
        "landing_asked_at",
        "num_cached_tokens",
        "num_loaded_tokens",
        "num_prompt_tokens",
        "num_scored_tokens",
        "num_survived_steps",
        "output_limit",
        "pools",
        "prompt_done",
        "scheduled_at",
        "sequences",
        "submission",
        "urgency",
    )

    def __init__(self, submission: Submission, arrival: int, now: float, output_limit: int) -> None:
        self.submission = submission
        self.key: RequestKey = submission.request_id, submission.attempt
        self.arrival = arrival
        self.arrived_at = now
        due_s = (
            CLASS_DELAY_S[submission.facts.service_class] if submission.due_s is None else submission.due_s
        )
        # The time from which on it has waited too long, also where its class is paused.
        self.due_at = now + due_s
        self.urgency = self.due_at - DUE_PER_PRIORITY_S * submission.facts.priority
        self.deadline = None if submission.deadline_s is None else now + submission.deadline_s
        self.num_prompt_tokens = len(submission.prompt) // TOKEN_BYTES
        # Its leading tokens whose log-probabilities are reported, or are not asked for. The first has none.
        is_scored = submission.sampling.num_prompt_logprobs is not None
        self.num_scored_tokens = 1 if is_scored else self.num_prompt_tokens
        # Whether it ends with an embedding of its prompt.
        self.pools = submission.facts.pooling is not None
        # Tokens a sample may have in all: `max_tokens`, clipped to the context.
        self.output_limit = output_limit
        self.landing = LandingState.READY if submission.decode is None else LandingState.NEEDED
        self.landing_asked_at = 0.0
        self.num_cached_tokens = 0
        # The tokens whose KV came from the store, by tier.
        self.num_loaded_tokens: dict[str, int] = {}
        self.scheduled_at: float | None = None
        self.prompt_done = False
        # Of a suspect: its steps with a token of its own, alone; None before its first plan.
        self.num_survived_steps: int | None = None
        self.sequences = [Sequence(self, sample) for sample in submission.samples]

    @property
    def decodes_remotely(self) -> bool:
        """Whether it is handed over to a decode replica after its prompt."""
        return self.submission.decode is not None

    @property
    def is_held(self) -> bool:
        """Whether its prompt is done and being handed over."""
        return any(sequence.phase is Phase.HELD for sequence in self.sequences)

    @property
    def unfinished_samples(self) -> tuple[SampleState, ...]:
        """The samples that have no finish yet, with their output so far."""
        return tuple(
            SampleState(sequence.index, sequence.seed, sequence.output_bytes, sequence.mask_digest)
            for sequence in self.sequences
            if not sequence.finish
        )

    @property
    def num_reusable_tokens(self) -> int | None:
        """The most tokens that need not be computed where their KV is cached; None: all. The hidden state of
        each token says how likely the next one is."""
        if self.num_scored_tokens >= self.num_prompt_tokens:
            return None
        return self.num_scored_tokens - 1

    @property
    def progress(self) -> str:
        """The request's progress, for people."""
        if self.scheduled_at is None:
            return "before it was scheduled"
        return f"after {sum(sequence.num_output_tokens for sequence in self.sequences)} tokens of output"

    def count_loaded(self, num_tokens: dict[str, int]) -> None:
        """Add tokens whose KV came from the store, by tier."""
        for tier, count in num_tokens.items():
            self.num_loaded_tokens[tier] = self.num_loaded_tokens.get(tier, 0) + count

    def finish_of(self, sequence: Sequence, token: int, end_token_ids: frozenset[int]) -> str:
        """Return what the sequence's last token means: "stop", "length", or "" (it continues)."""
        sampling = self.submission.sampling
        num_output_tokens = sequence.num_tokens - self.num_prompt_tokens
        ends = token in sampling.stop_token_ids or (not sampling.ignore_eos and token in end_token_ids)
        # An end token that came too early was the only one that the grammar allowed.
        if ends and (num_output_tokens > sampling.min_tokens or self.submission.grammar is not None):
            return "stop"
        return "length" if num_output_tokens >= self.output_limit else ""


class Sequence:
    """One sample of a request. Lengths are tokens, counted from the prompt's first::

        0 ........ num_settled ........ num_scheduled ...... num_tokens ... num_expected
        KV in the pool    in plans not yet      to be computed      sampled by plans
                          reported              (tokens known)      not yet reported

    `forks` are the other samples while this one, the leader, computes the prompt for all of them.
    """

    __slots__ = (
        "awaits_grammar",
        "block_ids",
        "finish",
        "forks",
        "hold_at",
        "holds",
        "index",
        "keys",
        "last_step",
        "load",
        "mask_digest",
        "most_tokens",
        "num_expected_cached_tokens",
        "num_offloaded",
        "num_pending",
        "num_registered_blocks",
        "num_scheduled",
        "num_sent_blocks",
        "num_settled",
        "num_tokens",
        "num_writable",
        "phase",
        "preempted",
        "replaced",
        "request",
        "seed",
        "sharing_group",
        "slot",
        "slot_position",
        "tokens",
    )

    def __init__(self, request: Request, sample: SampleState) -> None:
        self.request = request
        self.index = sample.index
        self.seed = sample.seed
        self.mask_digest = sample.mask_digest
        # Whether nothing may be sampled for it, because its grammar is not compiled yet.
        self.awaits_grammar = False
        self.tokens = bytearray(request.submission.prompt + sample.output)
        self.num_tokens = len(self.tokens) // TOKEN_BYTES
        # The number of tokens with which it has its last one here; that of a request that is handed over is
        # its first new one.
        self.most_tokens = request.num_prompt_tokens + request.output_limit
        if request.decodes_remotely:
            self.most_tokens = self.num_tokens + 1
        self.keys = list(request.submission.block_keys)
        self.block_ids: list[int] = []
        self.forks: list[Sequence] = []
        self.phase = Phase.WAITING
        self.preempted = False
        self.load = StoreLoad.DONE
        # Whom it keeps waiting while its load lacks free blocks.
        self.holds = Hold.NOBODY
        self.finish = ""
        self.slot = -1
        # The state that the ranks know by slot: where it continues (-1: no plan has named it), and the first
        # `num_sent_blocks` of its table, except the blocks at the indices that were `replaced` since.
        self.slot_position = -1
        self.num_sent_blocks = 0
        self.replaced: set[int] = set()
        # The last plan that names this sequence.
        self.last_step = 0
        self.num_scheduled = 0
        self.num_settled = 0
        self.num_pending = 0
        # The tokens up to which its blocks are its own, as far as it has them: nobody else uses or can find
        # them.
        self.num_writable = 0
        self.num_registered_blocks = 0
        self.num_expected_cached_tokens = 0
        # The number of its `block_ids` in the ranks' host memory.
        self.num_offloaded = 0
        # The group to whose share of the device its blocks count.
        self.sharing_group = request.submission.facts.sharing_group
        # The most tokens of plans while it migrates to another replica; with these it is held.
        self.hold_at = 0

    @property
    def is_pausable(self) -> bool:
        """Whether it is of the class `batch`, and nobody waits for it: neither a replica to which it moves,
        nor one that keeps blocks for its hand-over."""
        request = self.request
        if request.submission.facts.service_class != "batch" or self.hold_at:
            return False
        return not request.decodes_remotely or request.landing is not LandingState.READY

    @property
    def rank(self) -> Rank:
        """The order of service, smallest first; the victim of a preemption is the largest."""
        return self.request.urgency, self.request.arrival, self.index

    @property
    def queue_rank(self) -> Rank:
        """Order of waiting: those that were preempted come before the others of their class and priority."""
        urgency, arrival, index = self.rank
        return urgency - _PREEMPTED_S * self.preempted, arrival, index

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def target(self) -> int:
        """The number of tokens up to which plans may go now: a leader stops where its forks begin."""
        return self.request.num_prompt_tokens if self.forks else self.num_tokens + self.num_pending

    @property
    def num_remaining(self) -> int:
        return self.target - self.num_scheduled

    @property
    def num_plannable(self) -> int:
        """The remaining tokens that a plan may compute: none that samples for lack of a grammar."""
        return self.num_remaining - self.awaits_grammar

    @property
    def is_plannable(self) -> bool:
        """Whether another plan may name it: it runs, and a token is still to be sampled here."""
        is_held_up = 0 < self.hold_at <= self.num_scheduled
        return self.phase is Phase.RUNNING and not self.is_finishing and not is_held_up

    @property
    def is_finishing(self) -> bool:
        """Whether its last token here is sampled by a plan that is not yet reported."""
        return self.num_tokens + self.num_pending >= self.most_tokens

    @property
    def samplers(self) -> tuple[Sequence, ...]:
        """The sequences that sample when the target is reached: none where an adopted leader only repairs the
        prompt, and where the prompt is embedded."""
        if not self.forks:
            return () if self.request.pools else (self,)
        return () if self.num_output_tokens else (self, *self.forks)

    @property
    def num_slots_needed(self) -> int:
        return max(1, len(self.samplers))

    def token_bytes(self, start: int, end: int) -> bytes:
        """Return tokens [start, end) as uint32; b"" for a token that is not known yet."""
        return bytes(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def token_at(self, position: int) -> int:
        start = position * TOKEN_BYTES
        return int.from_bytes(self.tokens[start : start + TOKEN_BYTES], "little")

    @property
    def output_bytes(self) -> bytes:
        return bytes(self.tokens[len(self.request.submission.prompt) :])

    def replace_block(self, index: int, block_id: int) -> None:
        """Put another block into the table; the next plan that names the sequence says so."""
        self.block_ids[index] = block_id
        if index < self.num_sent_blocks:
            self.replaced.add(index)

    def forget_slot(self) -> None:
        """Drop the freed slot, and with it the ranks' knowledge of the sequence."""
        self.slot = self.slot_position = -1
        self.num_sent_blocks = 0
        self.replaced.clear()

    def append(self, token: bytes) -> None:
        """Add a token that was sampled."""
        self.tokens += token
        self.num_tokens += 1

    def block_keys(self, num_blocks: int, block_tokens: int) -> list[bytes]:
        """Return the keys of the first `num_blocks` blocks, generated tokens included; their tokens must be
        known."""
        num_keys = len(self.keys)
        if num_keys < num_blocks:
            parent = self.keys[-1] if self.keys else self.request.submission.root_key
            tokens = self.token_bytes(num_keys * block_tokens, num_blocks * block_tokens)
            self.keys += extend_keys(parent, tokens, block_tokens)
        return self.keys[:num_blocks]
