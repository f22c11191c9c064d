"""Grammars of the requests that are here: the sampling rank compiles each once while it is needed.

    first request arrives --CompileGrammar--> compiling --GrammarCompiled--> ready
                                                 |
                                                 +--error--> its requests fail
    last request leaves --ReleaseGrammar--> the rank may forget it

Until its grammar is ready a request is computed, but nothing is sampled for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.errors import QueueFullError
from workers.messages.link import RequestKey, Submission
from workers.messages.rank_channel import CompileGrammar, GrammarCompiled, GrammarOrder, ReleaseGrammar
from workers.scheduler.sequence import Request

# As many different ones as the rank keeps compiled; the requests beyond go elsewhere.
MAX_GRAMMARS = 256


@dataclass(slots=True)
class _Needed:
    """A grammar that requests here need."""

    is_ready: bool = False
    requests: dict[RequestKey, Request] = field(default_factory=dict)


class NeededGrammars:
    """Which grammars are needed, and which of them are ready."""

    def __init__(self) -> None:
        self._digest_to_needed: dict[bytes, _Needed] = {}
        self._orders: list[GrammarOrder] = []
        # Orders to compile that the rank has not answered, also of grammars that were released since: it may
        # have forgotten these before it compiles them again.
        self._digest_to_num_due: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._digest_to_needed)

    def check_limit(self, submission: Submission) -> None:
        """Raise `QueueFullError` if the submission's grammar is one too many."""
        grammar = submission.grammar
        if grammar is None or grammar.digest in self._digest_to_needed or len(self) < MAX_GRAMMARS:
            return
        raise QueueFullError(f"{len(self)} grammars are in use here, which is the limit")

    def arrive(self, request: Request) -> None:
        """Let a request that is new here wait for its grammar, if it has one that is not ready."""
        grammar = request.submission.grammar
        if grammar is None:
            return
        needed = self._digest_to_needed.get(grammar.digest)
        if needed is None:
            needed = self._digest_to_needed[grammar.digest] = _Needed()
            self._orders.append(CompileGrammar(grammar))
            self._digest_to_num_due[grammar.digest] = self._digest_to_num_due.get(grammar.digest, 0) + 1
        needed.requests[request.key] = request
        _set_waiting(request, not needed.is_ready)

    def leave(self, request: Request) -> None:
        """Release the grammar of a request that is over here, if it was the last one with it."""
        grammar = request.submission.grammar
        if grammar is None:
            return
        needed = self._digest_to_needed[grammar.digest]
        del needed.requests[request.key]
        if not needed.requests:
            del self._digest_to_needed[grammar.digest]
            self._orders.append(ReleaseGrammar(grammar.digest))

    def compiled(self, report: GrammarCompiled) -> list[Request]:
        """Take in that a grammar is ready, or refused. Returns the requests that cannot be served."""
        num_due = self._digest_to_num_due.pop(report.digest, 1) - 1
        if num_due:  # the answer that counts is still to come
            self._digest_to_num_due[report.digest] = num_due
            return []
        needed = self._digest_to_needed.get(report.digest)
        if needed is None:
            return []
        if report.error:
            return list(needed.requests.values())
        needed.is_ready = True
        for request in needed.requests.values():
            _set_waiting(request, False)
        return []

    def take_orders(self) -> list[GrammarOrder]:
        """Return what the sampling rank must be told since the last call, in order."""
        orders, self._orders = self._orders, []
        return orders


def _set_waiting(request: Request, is_waiting: bool) -> None:
    for sequence in request.sequences:
        sequence.awaits_grammar = is_waiting
