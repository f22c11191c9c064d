"""A request in the engine and its sequences: plain state, which the scheduler alone changes."""

from __future__ import annotations

from enum import Enum

from kvtransfer.blocks.keys import TOKEN_BYTES, extend_keys
from kvtransfer.request_facts import ServiceClass
from workers.messages.link import RequestKey, SampleState, Submission
from workers.scheduler.group_table import GroupTable


class Phase(Enum):
    """The phase of a sequence. `Lifecycle` draws the transitions."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTING = "preempting"
    HELD = "held"
    ENDED = "ended"


class LandingState(Enum):
    """Whether the decode replica has reserved blocks for the KV of a request that is handed over."""

    NEEDED = "needed"
    ASKED = "asked"
    READY = "ready"


class HeldBack(Enum):
    """Which of the sequences behind it in line a waiting sequence holds back, even if there is space for
    them."""

    NOBODY = "nobody"
    # The sequences of its own sharing group: it waits for the group's share of the device.
    GROUP = "group"
    EVERYBODY = "everybody"


class StoreLoad(Enum):
    """The progress of the load of missing blocks from the store. A sequence is admitted only when it is
    DONE."""

    WANTED = "wanted"
    ASKED = "asked"
    DONE = "done"


# A replica serves requests in order of their due time (`Sequence.rank`): the arrival, plus the wait that the
# class allows (`Submission.due_s`, or the delay of the class if the gateway names none), minus 10 s for each
# step of priority. So no request starves.
DUE_PER_PRIORITY_S = 10.0
CLASS_DELAY_S: dict[ServiceClass, float] = {"interactive": 0.0, "standard": 5.0, "batch": 600.0}
# A preempted sequence goes before the sequences whose due time is up to this much earlier.
_PREEMPTED_S = 600.0

# Urgency; number of arrival; index of the sample.
Rank = tuple[float, int, int]


class Request:
    """One submission, with the state that its samples have in common."""

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
        # From this time on the request has waited too long, even if its class is paused.
        self.due_at = now + due_s
        self.urgency = self.due_at - DUE_PER_PRIORITY_S * submission.facts.priority
        self.deadline = None if submission.deadline_s is None else now + submission.deadline_s
        self.num_prompt_tokens = len(submission.prompt) // TOKEN_BYTES
        # The leading tokens of the prompt whose log-probabilities were reported or are not requested. The
        # first token has none.
        is_scored = submission.sampling.num_prompt_logprobs is not None
        self.num_scored_tokens = 1 if is_scored else self.num_prompt_tokens
        # Whether the request ends with an embedding of its prompt.
        self.pools = submission.facts.pooling is not None
        # The most output tokens of a sample: `max_tokens`, cut to the context and to the KV.
        self.output_limit = output_limit
        self.landing = LandingState.READY if submission.decode is None else LandingState.NEEDED
        self.landing_asked_at = 0.0
        self.num_cached_tokens = 0
        # The tokens whose KV came from the store, by tier.
        self.num_loaded_tokens: dict[str, int] = {}
        self.scheduled_at: float | None = None
        self.prompt_done = False
        # The steps that a suspect has survived alone, with a token each; None before its first plan.
        self.num_survived_steps: int | None = None
        self.sequences = [Sequence(self, sample) for sample in submission.samples]

    @property
    def decodes_remotely(self) -> bool:
        """Whether the request is handed over to a decode replica after its prompt."""
        return self.submission.decode is not None

    @property
    def is_held(self) -> bool:
        """Whether a sequence of the request is held: its KV is being handed over, or moved."""
        return any(sequence.phase is Phase.HELD for sequence in self.sequences)

    @property
    def unfinished_samples(self) -> tuple[SampleState, ...]:
        """The samples that have not finished, with their output so far."""
        return tuple(
            SampleState(sequence.index, sequence.seed, sequence.output_bytes, sequence.mask_digest)
            for sequence in self.sequences
            if not sequence.finish
        )

    @property
    def num_reusable_tokens(self) -> int | None:
        """The most leading tokens whose cached KV may be reused; None: all. A token whose successor needs a
        log-probability must be computed, since its hidden state gives that."""
        if self.num_scored_tokens >= self.num_prompt_tokens:
            return None
        return self.num_scored_tokens - 1

    @property
    def progress(self) -> str:
        """The progress of the request, for error messages."""
        if self.scheduled_at is None:
            return "before it was scheduled"
        return f"after {sum(sequence.num_output_tokens for sequence in self.sequences)} tokens of output"

    def count_loaded(self, num_tokens: dict[str, int]) -> None:
        """Add tokens whose KV came from the store, by tier."""
        for tier, count in num_tokens.items():
            self.num_loaded_tokens[tier] = self.num_loaded_tokens.get(tier, 0) + count

    def finish_of(self, sequence: Sequence, token: int, end_token_ids: frozenset[int]) -> str:
        """Return the finish reason after the sequence's last token: "stop", "length", or "" (it
        continues)."""
        sampling = self.submission.sampling
        num_output_tokens = sequence.num_tokens - self.num_prompt_tokens
        ends = token in sampling.stop_token_ids or (not sampling.ignore_eos and token in end_token_ids)
        # If an end token comes before `min_tokens`, the grammar allowed no other token.
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
        "group_tables",
        "hold_at",
        "holds_back",
        "index",
        "is_divergence_shared",
        "keys",
        "known_border",
        "last_step",
        "load",
        "mask_digest",
        "most_tokens",
        "num_expected_cached_tokens",
        "num_lost_states",
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
        # Whether plans must not sample for it yet: its grammar is being compiled.
        self.awaits_grammar = False
        self.tokens = bytearray(request.submission.prompt + sample.output)
        self.num_tokens = len(self.tokens) // TOKEN_BYTES
        # The number of tokens, prompt included, after which it needs no more plans here. A request that is
        # handed over samples one token.
        self.most_tokens = request.num_prompt_tokens + request.output_limit
        if request.decodes_remotely:
            self.most_tokens = self.num_tokens + 1
        self.keys = list(request.submission.block_keys)
        self.block_ids: list[int] = []
        self.forks: list[Sequence] = []
        self.phase = Phase.WAITING
        self.preempted = False
        self.load = StoreLoad.DONE
        # Whom it holds back while its load waits for free blocks.
        self.holds_back = HeldBack.NOBODY
        self.finish = ""
        self.slot = -1
        # What the ranks know of the slot: the position at which the sequence continues (-1: no plan has named
        # it), and the first `num_sent_blocks` blocks of its table, except those `replaced` since (indices).
        self.slot_position = -1
        self.num_sent_blocks = 0
        self.replaced: set[int] = set()
        # The last plan that names this sequence.
        self.last_step = 0
        self.num_scheduled = 0
        self.num_settled = 0
        self.num_pending = 0
        # From `num_scheduled` up to this many tokens, plans may write into its blocks: no other sequence uses
        # or can find them.
        self.num_writable = 0
        self.num_registered_blocks = 0
        self.num_expected_cached_tokens = 0
        # Its tables in the groups of layers with a window or a state; `block_ids` are those of the others.
        self.group_tables: list[GroupTable] = []
        # How many of its first blocks were cached without what windows or states need behind them: there
        # other prompts have left the way of this one.
        self.known_border = 0
        # Whether several have left the way of earlier ones right there.
        self.is_divergence_shared = False
        # How often its recurrent state was lost in a step that failed.
        self.num_lost_states = 0
        # The number of its `block_ids` in the ranks' host memory.
        self.num_offloaded = 0
        # The sharing group to which its blocks count.
        self.sharing_group = request.submission.facts.sharing_group
        # When plans have computed this many tokens, the sequence is held, since it moves to another replica;
        # 0: it does not move.
        self.hold_at = 0

    @property
    def is_pausable(self) -> bool:
        """Whether the pause of the class `batch` concerns the sequence: it is of that class, and no other
        replica reserves blocks for its move or hand-over."""
        request = self.request
        if request.submission.facts.service_class != "batch" or self.hold_at:
            return False
        return not request.decodes_remotely or request.landing is not LandingState.READY

    @property
    def rank(self) -> Rank:
        """The order of service: the smallest is served first, the largest is preempted first."""
        return self.request.urgency, self.request.arrival, self.index

    @property
    def queue_rank(self) -> Rank:
        """The order in which waiting sequences are admitted: `rank`, with preempted ones moved forward."""
        urgency, arrival, index = self.rank
        return urgency - _PREEMPTED_S * self.preempted, arrival, index

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def target(self) -> int:
        """The number of tokens up to which plans may compute now. A leader with forks stops behind the
        prompt."""
        return self.request.num_prompt_tokens if self.forks else self.num_tokens + self.num_pending

    @property
    def num_remaining(self) -> int:
        return self.target - self.num_scheduled

    @property
    def num_plannable(self) -> int:
        """The remaining tokens that a plan may compute: without the last one, which would sample, while the
        grammar is being compiled."""
        return self.num_remaining - self.awaits_grammar

    @property
    def is_plannable(self) -> bool:
        """Whether another plan may name the sequence: it runs, its last token here is not planned yet, and no
        move holds it up."""
        is_held_up = 0 < self.hold_at <= self.num_scheduled
        return self.phase is Phase.RUNNING and not self.is_finishing and not is_held_up

    @property
    def is_finishing(self) -> bool:
        """Whether plans have sampled its last token here, reported or not."""
        return self.num_tokens + self.num_pending >= self.most_tokens

    @property
    def samplers(self) -> tuple[Sequence, ...]:
        """The sequences that sample when the target is reached. An adopted leader that only recomputes the
        prompt has none, and neither has a prompt that is embedded."""
        if not self.forks:
            return () if self.request.pools else (self,)
        return () if self.num_output_tokens else (self, *self.forks)

    @property
    def num_slots_needed(self) -> int:
        return max(1, len(self.samplers))

    def token_bytes(self, start: int, end: int) -> bytes:
        """Return tokens [start, end) as uint32. Tokens that are not known yet are missing at the end."""
        return bytes(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def token_at(self, position: int) -> int:
        start = position * TOKEN_BYTES
        return int.from_bytes(self.tokens[start : start + TOKEN_BYTES], "little")

    @property
    def output_bytes(self) -> bytes:
        return bytes(self.tokens[len(self.request.submission.prompt) :])

    def replace_block(self, index: int, block_id: int) -> None:
        """Put another block into the table. The next plan that names the sequence tells the ranks."""
        self.block_ids[index] = block_id
        if index < self.num_sent_blocks:
            self.replaced.add(index)

    def forget_slot(self) -> None:
        """Drop the freed slot, and with it what the ranks know of the sequence."""
        self.slot = self.slot_position = -1
        self.num_sent_blocks = 0
        self.replaced.clear()
        for table in self.group_tables:
            table.forget_sent()

    def append(self, token: bytes) -> None:
        """Add a token that was sampled."""
        self.tokens += token
        self.num_tokens += 1

    def block_keys(self, num_blocks: int, block_tokens: int) -> list[bytes]:
        """Return the keys of the first `num_blocks` blocks, including blocks of generated tokens. All their
        tokens must be known."""
        num_keys = len(self.keys)
        if num_keys < num_blocks:
            parent = self.keys[-1] if self.keys else self.request.submission.root_key
            tokens = self.token_bytes(num_keys * block_tokens, num_blocks * block_tokens)
            self.keys += extend_keys(parent, tokens, block_tokens)
        return self.keys[:num_blocks]
