"""The router's interface types: load reports, requests, candidates and decisions.

KV events arrive as `kvtransfer.kv_events.KvEvents` and `KvSnapshot`. All sizes are tokens or blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

from kvtransfer.codec import Part
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts


class ReplicaLoad(Part, frozen=True):
    """A replica's last load report. A rate is 0 until it is measured."""

    identity: ReplicaIdentity
    received_at: float
    num_running: int
    num_waiting: int
    num_landings: int
    num_backlog_tokens: int
    num_free_blocks: int
    num_total_blocks: int
    prefill_tok_s: float
    decode_step_s: float
    transfer_tok_s: float
    # How fast blocks are loaded from the node's store, by tier ("dram", "nvme"); absent until measured.
    load_tok_s: dict[str, float] = {}
    # The longest context that it can serve alone, output included; 0 if unknown.
    max_local_tokens: int = 0
    # Coefficients of the time of steps, as in `router.rates`.
    prefill_token_s: float = 0.0
    attention_token_s: float = 0.0
    decode_base_s: float = 0.0
    decode_sequence_s: float = 0.0
    decode_context_s: float = 0.0
    # KV of the sequences that run.
    num_context_tokens: int = 0
    # The tokens of a step, and the sequences that can run; 0 if unknown.
    max_batch_tokens: int = 0
    max_sequences: int = 0
    # The time per output token that chunks of prompts leave to running sequences; 0: they are not limited.
    tpot_objective_s: float = 0.0
    # What a prompt takes along when it is handed over, beside KV of its tokens in layers without a window, in
    # tokens of such KV: of each of its last `window_tokens` in layers with one, and its states.
    window_tokens: int = 0
    window_token_ratio: float = 0.0
    state_tokens: float = 0.0


class QueueState(Part, frozen=True):
    """What of a replica's load changes with every step; sent between two reports."""

    num_running: int
    num_waiting: int
    num_landings: int
    num_backlog_tokens: int
    num_free_blocks: int
    num_context_tokens: int = 0


class RouteRequest(Part, frozen=True):
    """A request to place. `block_keys` are those of the prompt's full blocks, `excluded` replicas were tried
    and failed, and `pinned_prefill` and `pinned_decode` ("" if free) are a debug option. Of its facts: one
    that does not decode is computed by one replica, whatever its role; where costs are equal, requests of one
    `session` go to the same replicas, at all gateways; and of one that `is_private` nothing is found later,
    so that nobody is to expect it."""

    request_id: str
    facts: RequestFacts
    block_keys: tuple[bytes, ...]
    num_tokens: int
    max_new_tokens: int
    num_samples: int = 1
    excluded: tuple[str, ...] = ()
    pinned_prefill: str = ""
    pinned_decode: str = ""

    @property
    def left_keys(self) -> tuple[bytes, ...]:
        """The block keys that will be found where it was placed."""
        return () if self.facts.is_private else self.block_keys


class TimeLimit(NamedTuple):
    """The longest that a request may wait until its prompt is computed, and that its first token may take, in
    seconds from now."""

    wait_s: float = math.inf
    ttft_s: float = math.inf

    def allows(self, wait_s: float, prefill_s: float) -> bool:
        """Whether a choice is in time, with which the request waits for so long and is computed in that."""
        return wait_s <= self.wait_s and wait_s + prefill_s <= self.ttft_s

    def includes(self, prediction: Prediction) -> bool:
        """Return whether the predicted times are in time."""
        return self.allows(prediction.wait_s, prediction.prefill_s)


class Candidate(Part, frozen=True):
    """One replica as it looked in a decision, with every term of its cost in seconds.

    The prompt is matched + dram + nvme + uncached tokens: on the device, in the node's store, and to be
    computed. A "decode" candidate counts what is not on its device as uncached, because it must be sent.

    By the policies that price choices, `cost_s` is prefill + load + queue + pressure ("prefill", "local")
    or pressure ("decode"); `pressure_s` is what others suffer and what decoding there takes, plus
    penalties, named in `note`. `transfer_s` of a "prefill" candidate is what sending the whole prompt from
    there takes. A pair costs both costs, less `router.policies.cheapest_choice.OVERLAP` of the shorter
    `queue_s`, plus `transfer_s` times the uncached share of the prompt at the decode side. What is sent
    whatever the decode side has, windows and states, takes `once_s`, which is in the `cost_s` of a
    "prefill" candidate.
    """

    replica_id: str
    # "prefill", "decode" or "local" (the decode replica prefills by itself).
    side: str
    matched_tokens: int
    uncached_tokens: int
    # The time for the requests accepted there before.
    queue_s: float
    transfer_s: float
    pressure_s: float
    cost_s: float
    note: str = ""
    dram_tokens: int = 0
    nvme_tokens: int = 0
    # The times to load both, and to compute the uncached tokens.
    load_s: float = 0.0
    prefill_s: float = 0.0
    # The time of a decode step there, with the request.
    step_s: float = 0.0
    once_s: float = 0.0


class Candidates(Sequence[Candidate]):
    """The candidates of a decision, made when somebody reads them."""

    def __init__(self, make: Callable[[], list[Candidate]]) -> None:
        self._make: Callable[[], list[Candidate]] | None = make
        self._made: list[Candidate] = []

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._all()[index]

    def _all(self) -> list[Candidate]:
        if self._make is not None:
            self._made, self._make = self._make(), None
        return self._made


class Prediction(Part, frozen=True):
    """What a request will take where it was placed, in seconds. The queue counts all that was placed there
    before, also what is held back in gateways."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    load_s: float = 0.0
    transfer_s: float = 0.0
    # A decode step with the request: its first one, and then the time of each output token.
    step_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """The time until its prompt is computed. Blocks are loaded while the request is in the queue."""
        return max(self.queue_s, self.load_s)

    @property
    def ttft_s(self) -> float:
        """The time to the first token, which the replica that prefills samples."""
        return self.wait_s + self.prefill_s


class BlockPlace(Part, frozen=True):
    """Where a block is, or was. `tier` is "device", "dram" or "nvme"; "store": in one of the last two. One
    that `is_expected` is not there yet: another request will compute it."""

    replica_id: str
    tier: str
    is_expected: bool = False


class MissedBlocks(Part, frozen=True):
    """Blocks of a prompt, one behind the other, that had to be computed for the same reason, when the prompt
    was placed:

    - "new": nobody is remembered to have had them
    - "removed": nobody has them any more. They were last removed from the place, for the `reason` of
      `kvtransfer.kv_events.BlocksRemoved`, or because the replica has "left"; "": not known
    - "forgotten": somebody had them, and no removal is remembered
    - "elsewhere": other replicas have them, the first of which are the places
    - "expected": other replicas are to compute them
    - "unusable": the replica has their KV and cannot continue there, for want of a window's KV or a state, or
      since blocks before them lack
    """

    first: int
    num_blocks: int
    fate: str
    places: tuple[BlockPlace, ...] = ()
    reason: str = ""
    # How long ago the last and the first of them were removed.
    least_age_s: float = 0.0
    most_age_s: float = 0.0


class Decision(Part, frozen=True):
    """Where a request goes and why. `prefill` "" means that the decode replica prefills by itself.

    `prefill_cached_tokens` need not be computed where the prompt is prefilled (they are on the device or
    in the node's store), `decode_cached_tokens` are on the decode replica's device. The choice can be
    recomputed from `candidates` and `limit` alone (`router.policies.cheapest_choice.recompute`): the
    least cost of all pairs of two replicas and all "local" candidates that are in time wins. Ties go to
    "local", then to the first in `candidates`."""

    request_id: str
    policy: str
    prefill: str
    decode: str
    prefill_cached_tokens: int
    decode_cached_tokens: int
    candidates: Sequence[Candidate]
    reason: str
    prediction: Prediction = Prediction()
    # With more before it where it is computed another replica would have been better, as far as is known;
    # None: with no backlog, or other gateways send nothing there.
    most_backlog_tokens: int | None = None
    # Choices were left out that are later; None: none were.
    limit: TimeLimit | None = None
    # The prompt's blocks that have to be computed, up to the last that could be reused.
    missed: tuple[MissedBlocks, ...] = ()
    # The prompt's leading tokens whose KV any replica ever had, as far as is remembered: the prefix that a
    # cache without a limit would have.
    achievable_tokens: int = 0

    @property
    def compute_id(self) -> str:
        """The replica that computes the prompt."""
        return self.prefill or self.decode
