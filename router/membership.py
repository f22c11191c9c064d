"""The replicas of a router: which may be chosen for a request, and which can take another one now."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

from kvtransfer.messages import ReplicaIdentity
from router.config import RouterConfig
from router.errors import NoReplicaError
from router.load import LoadTracker
from router.messages import RouteRequest
from router.placements import Placement
from router.rates import DEFAULT_BATCH_TOKENS

# Assumed for a replica that has not reported them.
DEFAULT_MAX_SEQUENCES = 64
ROLES = ("prefill", "decode", "both")


@dataclass(slots=True, eq=False)
class Member:
    """A replica that takes requests, or that leaves."""

    identity: ReplicaIdentity
    role: str
    # The tokens that were placed there: of equal choices, the replica with the least comes first.
    num_placed_tokens: int
    # Greater than those of all that were chosen before it; -1: it was never chosen.
    turn: int = -1
    is_leaving: bool = False
    # False: chosen only where nothing else is left.
    is_usable: bool = True


class Members:
    """The replicas of a router, in the order in which those of equal cost are chosen: the one where least was
    placed comes first. A change of what may be chosen moves `version`."""

    def __init__(self, config: RouterConfig, block_tokens: int, load: LoadTracker) -> None:
        self._steps_ahead = config.steps_ahead
        self._block_tokens = block_tokens
        self._load = load
        self._members: dict[str, Member] = {}
        self._turns = count()
        # The times at which replicas refused a request, until they are heard again.
        self._refused_at: dict[str, float] = {}
        self.version = 0

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._members

    def __iter__(self) -> Iterator[str]:
        """Iterate over all ids, those where least was placed first."""
        return iter(sorted(self._members, key=self.num_placed_tokens))

    @property
    def ids(self) -> Iterable[str]:
        """All ids, in the order in which replicas came."""
        return self._members

    def add(self, identity: ReplicaIdentity, role: str) -> None:
        """Add a replica, or change its role. A new epoch is usable."""
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
        known = self._members.get(identity.replica_id)
        if known is not None and known.identity.epoch == identity.epoch:
            if known.role != role:
                known.num_placed_tokens = self._least_placed(role)
            known.role = role
        else:
            num_tokens = self._least_placed(role) if known is None else known.num_placed_tokens
            turn = -1 if known is None else known.turn
            self._members[identity.replica_id] = Member(identity, role, num_tokens, turn)
        self.version += 1

    def remove(self, replica_id: str) -> None:
        """Forget a replica that is gone."""
        self._members.pop(replica_id, None)
        self._refused_at.pop(replica_id, None)
        self.version += 1

    def set_leaving(self, replica_id: str) -> None:
        """Choose this epoch of the replica for nothing new."""
        if (member := self._members.get(replica_id)) is not None:
            member.is_leaving = True
            self.version += 1

    def set_usable(self, replica_id: str, is_usable: bool) -> None:
        """Choose this epoch of the replica only where nothing else is left, or like any other again."""
        if (member := self._members.get(replica_id)) is not None:
            if is_usable and not member.is_usable:
                least = self._least_placed(member.role)
                member.num_placed_tokens = max(member.num_placed_tokens, least)
            member.is_usable = is_usable
            self.version += 1

    def chosen(self, replica_id: str, num_tokens: int) -> None:
        """Note that the replica was chosen for so many tokens of work."""
        member = self._members[replica_id]
        member.turn = next(self._turns)
        member.num_placed_tokens += num_tokens

    def turn(self, replica_id: str) -> int:
        """Return a number by which the least recently chosen of all comes first; -1: never chosen."""
        return self._members[replica_id].turn

    def num_placed_tokens(self, replica_id: str) -> int:
        """Return how much work was placed there, by which replicas of equal cost are ordered."""
        return self._members[replica_id].num_placed_tokens

    # ------------------------------------------------------------------------------ who may be chosen

    def compute_ids(self) -> Iterator[str]:
        """Return the replicas that may compute a prompt now: of role "prefill" or "both", and where there is
        none those of role "decode"."""
        here = [(name, it) for name, it in self._members.items() if not it.is_leaving and it.is_usable]
        able = [name for name, it in here if it.role != "decode"]
        return iter(able or [name for name, _ in here])

    def usable_ids(self) -> Iterator[str]:
        """Return the replicas that may be chosen for a request: one that decodes may compute its prompt,
        too."""
        return (name for name, it in self._members.items() if not it.is_leaving and it.is_usable)

    def num_by_side(self) -> tuple[int, int]:
        """Return how many replicas may compute prompts, and how many may decode."""
        roles = [it.role for it in self._members.values() if not it.is_leaving and it.is_usable]
        return len(roles) - roles.count("decode"), len(roles) - roles.count("prefill")

    def sides(self, request: RouteRequest, order: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the ids for the prefill and the decode side, in this order; no prefill ids if a replica may
        only serve alone. Raises `NoReplicaError`, naming the side that is missing."""
        usable = {
            replica_id: member
            for replica_id in order
            if not (member := self._members[replica_id]).is_leaving and replica_id not in request.excluded
        }
        if not request.facts.decodes:
            pinned = request.pinned_prefill or request.pinned_decode
            able = self._preferred(replica_id for replica_id in usable if pinned in ("", replica_id))
            if not able:
                raise NoReplicaError(self._missing("prefill or decode", request, pinned))
            return [], able
        decode_ids = self._preferred(
            replica_id
            for replica_id, member in usable.items()
            if member.role != "prefill" and request.pinned_decode in ("", replica_id)
        )
        if not decode_ids:
            raise NoReplicaError(self._missing("decode", request, request.pinned_decode))
        prefill_ids = self._preferred(
            replica_id
            for replica_id, member in usable.items()
            if member.role != "decode" and request.pinned_prefill in ("", replica_id)
        )
        if request.pinned_prefill:
            if request.pinned_prefill == request.pinned_decode:
                return [], decode_ids
            if not prefill_ids:
                raise NoReplicaError(self._missing("prefill", request, request.pinned_prefill))
        elif self._has_usable(decode_ids) and not self._has_usable(prefill_ids):
            return [], decode_ids  # a decode replica is a whole engine
        return prefill_ids, decode_ids

    def move_ids(self, request: RouteRequest) -> list[str]:
        """Return the ids of the replicas to which a running stream may migrate, regardless of pins."""
        return self._preferred(
            replica_id
            for replica_id, member in self._members.items()
            if member.role != "prefill" and not member.is_leaving and replica_id not in request.excluded
        )

    def no_target(self, request: RouteRequest) -> NoReplicaError:
        """Return the error for a stream that no decode replica can take."""
        return NoReplicaError(self._missing("decode", request, ""))

    # ------------------------------------------------------------------------------ who can take more

    def on_refused(self, replica_id: str, now: float) -> None:
        """Note that the replica has refused a request: it has no capacity until its next report."""
        if replica_id in self._members:
            self._refused_at[replica_id] = now

    def blocked_side(self, placement: Placement) -> Literal["", "prefill", "decode"]:
        """Return which side of a placement cannot take it now; "": both can. Who computes it must have less
        than `steps_ahead` steps of other work, and who decodes it, looked at first, a free sequence and free
        blocks, or nothing to do. What gateways hold does not count. One that is not usable takes nothing
        while another is, as while one request finds out whether it is well again. Whether one that is gone
        can, its gateway finds out."""
        compute_id, decode_id = placement.compute_id, placement.decode_id or placement.compute_id
        if compute_id not in self._members or decode_id not in self._members:
            return ""
        can_decode = self.can_decode(decode_id, placement.num_sequences, placement.num_prefill_tokens)
        if not can_decode or self._is_avoided(decode_id, "decode"):
            return "decode"
        is_avoided = bool(placement.decode_id) and self._is_avoided(compute_id, "prefill")
        return "prefill" if is_avoided or not self.can_compute(compute_id, placement.limited_group) else ""

    def waits_for_share(self, placement: Placement) -> bool:
        """Return whether only what was sent before of groups with a limited share of the KV, its own among
        them, keeps a placement waiting."""
        if not placement.limited_group or self.blocked_side(placement) != "prefill":
            return False
        return self.can_compute(placement.compute_id)

    def takes_more(self, replica_id: str) -> bool:
        """Return whether a replica could take another request now, of any kind."""
        return (
            (member := self._members.get(replica_id)) is not None
            and member.is_usable
            and self.can_compute(replica_id)
            and self.can_decode(replica_id, num_new_sequences=1, num_prompt_tokens=0)
        )

    def can_compute(self, replica_id: str, limited_group: str = "") -> bool:
        """Whether the replica has less than `steps_ahead` steps to compute before a request of this group
        (`LoadTracker.sent_backlog_tokens`)."""
        if self._has_refused(replica_id):
            return False
        state = self._load.state(replica_id)
        batch_tokens = state.report.max_batch_tokens or DEFAULT_BATCH_TOKENS
        num_tokens = self._load.sent_backlog_tokens(replica_id, limited_group)
        return num_tokens < self._steps_ahead * batch_tokens

    def can_decode(self, replica_id: str, num_new_sequences: int, num_prompt_tokens: int) -> bool:
        """Whether the replica has places and blocks for so much more, or nothing to do."""
        if self._has_refused(replica_id):
            return False
        state = self._load.state(replica_id)
        num_sequences = state.num_sent_sequences
        max_sequences = state.report.max_sequences or DEFAULT_MAX_SEQUENCES
        if num_sequences and num_sequences + num_new_sequences > max_sequences:
            return False
        prompt_blocks = -(-num_prompt_tokens // self._block_tokens)
        return not num_sequences or state.report.num_free_blocks >= prompt_blocks

    # ---------------------------------------------------------------------------------------- private

    def _least_placed(self, role: str) -> int:
        """Return what was placed at the usable replica of this role where that is least. Who comes begins
        with as much, or the others would be chosen for nothing before it has caught up."""
        return min(
            (it.num_placed_tokens for it in self._members.values() if it.role == role and it.is_usable),
            default=0,
        )

    def _is_avoided(self, replica_id: str, side: str) -> bool:
        """Whether the replica is not usable, while others of its side are."""
        if self._members[replica_id].is_usable:
            return False
        other = {"prefill": "decode", "decode": "prefill"}[side]
        return any(it.is_usable and not it.is_leaving and it.role != other for it in self._members.values())

    def _has_refused(self, replica_id: str) -> bool:
        """Whether the replica has refused a request, and not reported since."""
        refused_at = self._refused_at.get(replica_id)
        if refused_at is not None and self._load.state(replica_id).report.received_at > refused_at:
            del self._refused_at[replica_id]
            refused_at = None
        return refused_at is not None

    def _preferred(self, replica_ids: Iterable[str]) -> list[str]:
        """Return the usable ones; all where there is none."""
        all_ids = list(replica_ids)
        return [each for each in all_ids if self._members[each].is_usable] or all_ids

    def _has_usable(self, replica_ids: Iterable[str]) -> bool:
        return any(self._members[each].is_usable for each in replica_ids)

    def _missing(self, side: str, request: RouteRequest, pinned: str) -> str:
        other = {"prefill": "decode", "decode": "prefill"}.get(side)
        of_side = [item for item in self._members.values() if item.role != other]
        num_leaving = sum(item.is_leaving for item in of_side)
        num_excluded = sum(item.identity.replica_id in request.excluded for item in of_side)
        text = (
            f"no usable {side} replica: {len(of_side)} known, {num_leaving} leaving, {num_excluded} excluded"
        )
        return f"{text}; {pinned} was pinned" if pinned else text


def hashed(replica_id: str, seed: int) -> int:
    """Hash the id; multiplied, because checksums with two seeds differ by the same bits for all ids."""
    return zlib.crc32(replica_id.encode(), seed) * 0x9E3779B1 & 0xFFFFFFFF
