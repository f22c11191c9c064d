"""The messages of two gateways of one application, on two kinds of streams to the port of the other:

    FleetHello         then queries, each answered in turn                  (`Query`, `Answer`)
    FollowPlacements   then the placements of the other gateway, unasked    (`PlacementSnapshot`, then deltas)

The kinds have streams of their own, since a placement must not wait behind an answer of megabytes.
"""

from __future__ import annotations

from cluster.admission.quotas import QuotaUse
from cluster.gateway.request_recording import RecordedRequest
from cluster.gateway.resumed_calls import ResumeClaim
from cluster.metrics.admission_stats import AdmissionStats
from cluster.metrics.curves import SecondCounts
from cluster.metrics.ended_request import RequestInfo
from cluster.metrics.recent_outcomes import OutcomeStats
from kvtransfer.codec import Codec, Message, Part
from kvtransfer.errors import WireError

FLEET_PROTOCOL = 2
PLACEMENT_PROTOCOL = 2
# No query and no hello is longer: ids and tenants are bounded.
MAX_QUERY_BYTES = 4096
MAX_ANSWER_BYTES = 16 << 20
MAX_PLACEMENT_FRAME_BYTES = 2 << 20
# Placements of one gateway. A request beyond is not announced: it counts at the others once its replica
# reports it.
MAX_PLACEMENTS = 16_384
# Keys of the prompt of one placement; the keys beyond are not predicted elsewhere.
MAX_KEYS = 16_384
# Counts of one placement: tokens, blocks and sequences.
MAX_COUNT = 1 << 24
# A longer reason, of another gateway or of its failure, is cut.
MAX_REASON_CHARS = 300


class FleetHello(Message, frozen=True):
    """First frame of a connection for queries: whom it means to reach, since a port may have passed to
    somebody else."""

    protocol: int
    gateway_id: str


class FollowPlacements(Message, frozen=True):
    """First frame of a stream of placements: whom it means to reach. Placements come back on it until it
    ends."""

    protocol: int
    gateway_id: str


class FleetRefusal(Message, frozen=True):
    """Ends a connection: its hello or its query cannot be answered."""

    reason: str


class PlacementsRefused(Message, frozen=True):
    """Ends a stream: the receiver has no placements for it."""

    reason: str


class ExplainQuery(Message, frozen=True):
    """Queries the known facts of a request; `tenant` None: of any tenant."""

    request_id: str
    tenant: str | None


class ListQuery(Message, frozen=True):
    """Queries this many running requests, and as many that ended; `tenant` None: of all tenants."""

    limit: int
    tenant: str | None


class StatsQuery(Message, frozen=True):
    """Asks for totals, and for the seconds from this one of the asked gateway's clock on."""

    since: int


class RecordingQuery(Message, frozen=True):
    """Queries the recorded requests that arrived in the last `last_s`, from this number on."""

    last_s: float
    first_number: int = 0


class ExplainAnswer(Message, frozen=True):
    """The known facts of the request; None: nothing. `now` is the sender's clock, whose times these are."""

    now: float
    found: RequestInfo | None


class ListedRequest(Part, frozen=True):
    """A request in a list, the fields as in `RequestInfo`."""

    request_id: str
    tenant: str
    state: str
    reason: str
    started_at: float
    first_token_at: float
    ended_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_attempts: int
    # The replica of the last attempt; `prefill` is "" where the decode replica prefills by itself.
    prefill: str
    decode: str


class ListAnswer(Message, frozen=True):
    """The latest requests; `now` as in `ExplainAnswer`."""

    now: float
    requests: tuple[ListedRequest, ...]


class SessionEnded(Message, frozen=True):
    """Tells that a session of the console was ended by its user; see `EndedSession`."""

    session_id: bytes
    ends_at: float
    key_id: str = ""
    began_at: float = 0.0


class ResumeJudged(Message, frozen=True):
    """Answers a `ResumeClaim`; `now` as in `ExplainAnswer`."""

    now: float
    is_free: bool


class RecordingAnswer(Message, frozen=True):
    """A page of recorded requests, as in `RecordingPage`; `now` as in `ExplainAnswer`. `is_on` false: the
    gateway records nothing."""

    now: float
    requests: tuple[RecordedRequest, ...]
    next_number: int | None
    complete_since: float
    is_on: bool


class Noted(Message, frozen=True):
    """Answers a message that queries nothing; `now` as in `ExplainAnswer`."""

    now: float


class GatewayTotals(Part, frozen=True):
    """Requests of one gateway: those that run, and those that ended since its start; and whom it does not
    hear."""

    num_running: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    # Why it does not count the placements of another gateway, by the id of each.
    unheard: dict[str, str]
    # Why only a part of the tenants' limits applies there; "": all of them apply.
    quota_note: str = ""
    admission: AdmissionStats = AdmissionStats()
    outcomes: tuple[OutcomeStats, ...] = ()


class StatsAnswer(Message, frozen=True):
    """Totals, and the counts second by second. `now` is the sender's clock, `wall` the same as unix time."""

    now: float
    wall: float
    totals: GatewayTotals
    seconds: tuple[SecondCounts, ...]
    # The use of tenants with limits.
    quotas: tuple[QuotaUse, ...] = ()


class Placed(Message, frozen=True):
    """A placement, as in `router.placements.Placement`, in place of earlier ones of the request. Ages are
    seconds at the sender when the frame was made; `prefilled_age_s` None: there is no token yet. One that
    `is_held` waits at the sender until it is placed again."""

    request_id: str
    compute_id: str
    decode_id: str
    num_prefill_tokens: int
    num_new_blocks: int
    num_sequences: int
    age_s: float
    prefilled_age_s: float | None
    block_keys: tuple[bytes, ...]
    is_held: bool


class Prefilled(Message, frozen=True):
    """The first token of a request came this many seconds ago."""

    request_id: str
    age_s: float


class Finished(Message, frozen=True):
    """A request, or an attempt of it, has ended."""

    request_id: str


class PlacementSnapshot(Message, frozen=True):
    """All placements of the sender, as first frames of a stream; `is_last`: changes follow."""

    placed: tuple[Placed, ...]
    is_last: bool


class PlacementDelta(Message, frozen=True):
    """The changes, in order."""

    changes: tuple[Placed | Prefilled | Finished, ...]


Hello = FleetHello | FollowPlacements
Query = ExplainQuery | ListQuery | StatsQuery | SessionEnded | ResumeClaim | RecordingQuery
Answer = ExplainAnswer | ListAnswer | StatsAnswer | ResumeJudged | Noted | RecordingAnswer
Change = Placed | Prefilled | Finished
QUERY_CODEC: Codec[Hello | Query] = Codec(Hello | Query)
ANSWER_CODEC: Codec[Answer | FleetRefusal] = Codec(Answer | FleetRefusal)
PLACEMENT_CODEC: Codec[PlacementSnapshot | PlacementDelta | PlacementsRefused] = Codec(
    PlacementSnapshot | PlacementDelta | PlacementsRefused
)


def checked_size(frame: bytes, max_bytes: int) -> bytes:
    """Return the frame; `WireError` when it has more than `max_bytes` bytes."""
    if len(frame) > max_bytes:
        raise WireError(f"a frame of {len(frame)} bytes, where {max_bytes} are the most")
    return frame


def decode_query(frame: bytes) -> Hello | Query:
    """Return the message that a gateway has sent to the port of another; `WireError` when it is none."""
    return QUERY_CODEC.decode(checked_size(frame, MAX_QUERY_BYTES))
