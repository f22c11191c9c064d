"""A replica's load as of now: its last report, with the placements that the report does not show."""

from __future__ import annotations

from typing import NamedTuple

from router.messages import ReplicaLoad
from router.rates import Rates


class CurrentLoad(NamedTuple):
    """A replica's load as of now: its last report, with the requests that the report does not show added.
    Before the first report, the report's counts and rates are 0 and `received_at` is -inf."""

    role: str
    report: ReplicaLoad
    # Prompt tokens accepted there (or on the way there) and not yet computed.
    backlog_tokens: int
    # Sequences that decode there, wait there, or are on their way there.
    num_sequences: int
    # Blocks free for another request, without those that gateways hold; negative when more is on its way than
    # fits.
    num_free_blocks: int
    rates: Rates
    # The parts of `backlog_tokens` and `num_sequences` that gateways still hold.
    num_queued_tokens: int = 0
    num_queued_sequences: int = 0
    # How many sequences can run there at once; 0 if unknown.
    num_places: float = 0.0
    # The time for which a sequence has such a place, from its first token to its end.
    residence_s: float = 0.0
    # Prompts that are on their way there and will decode elsewhere.
    num_coming_prompts: int = 0
    # When it last had prompts to compute, by which it measures what they take, or was first heard.
    had_prompts_at: float = float("inf")

    @property
    def num_requests(self) -> int:
        """The sequences that decode, wait or are on their way there, and the prompts that are."""
        return self.num_sequences + self.num_coming_prompts

    @property
    def num_sent_sequences(self) -> int:
        """The sequences that decode there, wait there, or are on their way there, without those that gateways
        hold."""
        return self.num_sequences - self.num_queued_sequences

    @property
    def place_s(self) -> float:
        """The time from one sequence that ends to the next, when all places are taken."""
        return self.residence_s / self.num_places if self.num_places else 0.0

    @property
    def submitted_place_wait_s(self) -> float:
        """The time until the sequences sent there have a place, and the next one too."""
        return self.place_wait(0.0)

    def queue(self, queued_part: float) -> float:
        """Return the time of the backlog, with that part of the tokens that gateways hold."""
        num_sent_tokens = self.backlog_tokens - self.num_queued_tokens
        return (num_sent_tokens + queued_part * self.num_queued_tokens) * self.rates.token_s

    def place_wait(self, queued_part: float) -> float:
        """Return the time until the sequences sent there, that part of those that gateways hold, and one
        sequence more have a place."""
        num_before = self.num_sent_sequences + queued_part * self.num_queued_sequences
        return max(0.0, num_before + 1 - self.num_places) * self.place_s

    def submitted_wait_s(self, num_queued_tokens: int) -> float:
        """Return how long a request would wait for all that was placed there, `num_queued_tokens` less."""
        queue_s = (self.backlog_tokens - num_queued_tokens) * self.rates.token_s
        return max(queue_s, self.submitted_place_wait_s)
