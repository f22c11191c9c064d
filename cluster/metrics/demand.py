"""Total the demand: the requests to gateways and how they served them. The autoscaler forecasts from it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cluster.proto.tandem.v1 import admin_pb2 as admin_pb


@dataclass(slots=True)
class Demand:
    """Totals of one gateway since its start, or of all gateways between two samples; the fields are those of
    `tandem.v1.Demand`, which describes them."""

    num_arrived: int = 0
    num_sequences: int = 0
    num_prompts: int = 0
    num_computed_tokens: int = 0
    computed_tokens_squared: float = 0.0
    num_ended: int = 0
    num_output_tokens: int = 0
    output_tokens_squared: float = 0.0
    num_first_tokens: int = 0
    num_late_first_tokens: int = 0
    num_gaps: int = 0
    num_late_gaps: int = 0
    num_refused: int = 0

    def prompt(self, num_computed_tokens: int) -> None:
        """Count a prompt whose prefill was reported."""
        self.num_prompts += 1
        self.num_computed_tokens += num_computed_tokens
        self.computed_tokens_squared += num_computed_tokens**2

    def ended(self, output_lengths: Iterable[int]) -> None:
        """Count the continuations of a request that ended, each after this many tokens."""
        for num_tokens in output_lengths:
            self.num_ended += 1
            self.num_output_tokens += num_tokens
            self.output_tokens_squared += num_tokens**2

    def first_token(self, is_late: bool) -> None:
        """Count the first token of a request."""
        self.num_first_tokens += 1
        self.num_late_first_tokens += is_late

    def gaps(self, num_gaps: int, are_late: bool) -> None:
        """Count the gaps before further tokens of a continuation."""
        self.num_gaps += num_gaps
        self.num_late_gaps += num_gaps * are_late

    def values(self) -> tuple[float, ...]:
        """Return the fields in their order."""
        return _values(self)

    def plus(self, other: Demand) -> Demand:
        """Return the sum of both."""
        return Demand(*(mine + its for mine, its in self._pairs(other)))

    def since(self, before: Demand) -> Demand:
        """Return the difference. Where a counter decreased, the gateway was restarted and all its values are
        new."""
        pairs = self._pairs(before)
        has_restarted = any(now < then for now, then in pairs)
        return self if has_restarted else Demand(*(now - then for now, then in pairs))

    def _pairs(self, other: Demand) -> list[tuple[Any, Any]]:
        return list(zip(_values(self), _values(other), strict=True))


_NAMES = tuple(field.name for field in dataclasses.fields(Demand))
_values = operator.attrgetter(*_NAMES)


def demand_message(demand: Demand) -> admin_pb.Demand:
    """Return the totals as the public message."""
    return admin_pb.Demand(**dict(zip(_NAMES, _values(demand), strict=True)))


def demand_of(message: admin_pb.Demand) -> Demand:
    """Return the totals in the public message."""
    return Demand(*(getattr(message, name) for name in _NAMES))
