"""Grammars of the requests that are here: the sampling rank compiles each once while it is needed.

    first request arrives --> waiting --CompileGrammar--> compiling --GrammarCompiled--> ready
                                 |                            |
                                 |                            +--error--> its requests fail
    last request leaves ---------+----ReleaseGrammar--> the rank may forget it

Until its grammar is ready a request is computed, but nothing is sampled for it. The rank compiles one grammar
after another, some of which take seconds. So it is given few at a time, and tenants take turns."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from workers.errors import QueueFullError
from workers.messages.link import RequestKey, Submission
from workers.messages.rank_channel import CompileGrammar, GrammarCompiled, GrammarOrder, ReleaseGrammar
from workers.messages.sampling import Grammar
from workers.scheduler.sequence import Request

# The number of compiled grammars that the rank keeps; the requests beyond go elsewhere.
MAX_GRAMMARS = 256
# The number of grammars that one tenant leaves to the others.
KEPT_FOR_OTHERS = MAX_GRAMMARS // 4
# The number of grammars with the rank, which so has work until the next order comes.
_MOST_DUE = 2


@dataclass(slots=True)
class _Needed:
    """A grammar that requests here need, of the tenants `tenant_to_num`."""

    grammar: Grammar
    is_ordered: bool = False
    is_ready: bool = False
    requests: dict[RequestKey, Request] = field(default_factory=dict)
    tenant_to_num: Counter[str] = field(default_factory=Counter)


class NeededGrammars:
    """Which grammars are needed, and which of them are ready."""

    def __init__(self) -> None:
        self._digest_to_needed: dict[bytes, _Needed] = {}
        self._releases: list[ReleaseGrammar] = []
        # The grammars that wait for each tenant, in order; the tenant whose turn is next comes first.
        self._tenant_to_waiting: OrderedDict[str, dict[bytes, None]] = OrderedDict()
        self._tenant_to_num: Counter[str] = Counter()
        # Orders to compile that the rank has not answered, also of grammars that were released since: it may
        # have forgotten these before it compiles them again.
        self._digest_to_num_due: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._digest_to_needed)

    def check_limit(self, submission: Submission) -> None:
        """Raise `QueueFullError` if the submission's grammar is one too many."""
        grammar, num_needed = submission.grammar, len(self)
        if grammar is None or grammar.digest in self._digest_to_needed:
            return
        if num_needed >= MAX_GRAMMARS:
            raise QueueFullError(f"{num_needed} grammars are in use here, which is the limit")
        most = MAX_GRAMMARS - KEPT_FOR_OTHERS
        if self._tenant_to_num[submission.facts.tenant] >= most:
            raise QueueFullError(f"{most} grammars of this tenant are in use here, which is its limit")

    def arrive(self, request: Request) -> None:
        """Let a request that is new here wait for its grammar, if it has one that is not ready."""
        grammar, tenant = request.submission.grammar, request.submission.facts.tenant
        if grammar is None:
            return
        needed = self._digest_to_needed.get(grammar.digest)
        if needed is None:
            needed = self._digest_to_needed[grammar.digest] = _Needed(grammar)
        needed.requests[request.key] = request
        needed.tenant_to_num[tenant] += 1
        if needed.tenant_to_num[tenant] == 1:
            self._tenant_to_num[tenant] += 1
            if not needed.is_ordered:
                self._tenant_to_waiting.setdefault(tenant, {})[grammar.digest] = None
        _set_waiting(request, not needed.is_ready)

    def leave(self, request: Request) -> None:
        """Release the grammar of a request that is over here, if it was the last one with it."""
        grammar, tenant = request.submission.grammar, request.submission.facts.tenant
        if grammar is None:
            return
        needed = self._digest_to_needed[grammar.digest]
        del needed.requests[request.key]
        needed.tenant_to_num[tenant] -= 1
        if not needed.tenant_to_num[tenant]:
            del needed.tenant_to_num[tenant]
            self._wait_no_more(tenant, grammar.digest)
            self._tenant_to_num[tenant] -= 1
            if not self._tenant_to_num[tenant]:
                del self._tenant_to_num[tenant]
        if not needed.requests:
            del self._digest_to_needed[grammar.digest]
            if needed.is_ordered:
                self._releases.append(ReleaseGrammar(grammar.digest))

    def compiled(self, report: GrammarCompiled) -> list[Request]:
        """Take in that a grammar is ready, or refused; return the requests that cannot be served."""
        self._digest_to_num_due[report.digest] -= 1
        if self._digest_to_num_due[report.digest] > 0:  # the answer that counts is still to come
            return []
        del self._digest_to_num_due[report.digest]
        needed = self._digest_to_needed.get(report.digest)
        if needed is None or not needed.is_ordered:
            return []
        if report.error:
            return list(needed.requests.values())
        needed.is_ready = True
        for request in needed.requests.values():
            _set_waiting(request, False)
        return []

    def take_orders(self) -> list[GrammarOrder]:
        """Return the orders of grammars for the sampling rank since the last call, in order."""
        orders: list[GrammarOrder] = [*self._releases]
        self._releases.clear()
        while self._tenant_to_waiting and self._digest_to_num_due.total() < _MOST_DUE:
            tenant, waiting = next(iter(self._tenant_to_waiting.items()))
            self._tenant_to_waiting.move_to_end(tenant)
            needed = self._digest_to_needed[next(iter(waiting))]
            for each in needed.tenant_to_num:
                self._wait_no_more(each, needed.grammar.digest)
            needed.is_ordered = True
            self._digest_to_num_due[needed.grammar.digest] += 1
            orders.append(CompileGrammar(needed.grammar))
        return orders

    def _wait_no_more(self, tenant: str, digest: bytes) -> None:
        waiting = self._tenant_to_waiting.get(tenant, {})
        waiting.pop(digest, None)
        if not waiting:
            self._tenant_to_waiting.pop(tenant, None)


def _set_waiting(request: Request, is_waiting: bool) -> None:
    for sequence in request.sequences:
        sequence.awaits_grammar = is_waiting
