"""What gateways hear between two load reports, and how long their word on the class `batch` lasts."""

from __future__ import annotations

import numpy as np
import pytest_asyncio
from engine_fakes import LinkEnd
from msgspec.structs import replace

from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import ReplicaIdentity
from workers.messages.link import (
    LINK_UP_CODEC,
    LoadReport,
    News,
    PromptEmbedding,
    PromptLogprobs,
    QueueReport,
    RequestFailed,
    StepFrame,
    TokenDelta,
)
from workers.messages.sampling import PackedLogprobs
from workers.replica.gateway_links import LOAD_PERIOD_S, QUEUE_PERIOD_S, GatewayLinks
from workers.replica.requests import LOGPROB_PART_BYTES, parts_of

KEY = ("g", 1)
QUEUE = QueueReport(
    num_running=1,
    num_waiting=2,
    num_landings=0,
    num_backlog_tokens=300,
    num_free_blocks=9,
    num_context_tokens=70,
)


class Linked:
    """One gateway at an engine core whose queue is `queue`."""

    def __init__(self) -> None:
        self.clock = ManualClock(10.0)
        self.links = GatewayLinks(self.clock)
        self.end = LinkEnd("g")
        self.links.connected(KEY, self.end.stream)
        self.queue = QUEUE
        self.num_asked = 0

    def flush(self, wait_s: float = 0.0) -> list[StepFrame]:
        self.clock.advance(wait_s)
        self.links.flush(lambda: LoadReport(identity=ReplicaIdentity("r", 1), sequence=1), self._asked)
        frames = [LINK_UP_CODEC.decode(frame) for frame in self.end.sent()]
        assert all(isinstance(frame, StepFrame) for frame in frames)
        return [frame for frame in frames if isinstance(frame, StepFrame)]

    def _asked(self) -> QueueReport:
        self.num_asked += 1
        return self.queue


@pytest_asyncio.fixture
async def linked() -> Linked:
    linked = Linked()
    (first,) = linked.flush()
    assert first.load is not None
    assert first.queue is None
    linked.flush(QUEUE_PERIOD_S)  # what the report has shown
    return linked


async def test_a_change_of_the_queue_is_sent_and_nothing_else(linked: Linked) -> None:
    assert linked.flush(QUEUE_PERIOD_S) == []
    linked.queue = replace(QUEUE, num_backlog_tokens=200, num_context_tokens=80)
    assert linked.flush(QUEUE_PERIOD_S) == [StepFrame(queue=linked.queue)]
    assert linked.flush(QUEUE_PERIOD_S) == []
    linked.queue = replace(linked.queue, num_context_tokens=81, num_free_blocks=8)
    assert linked.flush(QUEUE_PERIOD_S) == [], "that changes with every token"


async def test_changes_are_sent_so_often_and_the_last_one_always(linked: Linked) -> None:
    frames = []
    for number in range(100):
        linked.queue = replace(QUEUE, num_backlog_tokens=number)
        frames += linked.flush(QUEUE_PERIOD_S / 10)
    frames += linked.flush(QUEUE_PERIOD_S)
    assert frames[-1].queue == linked.queue
    assert 8 <= len(frames) <= 11
    assert linked.num_asked <= 13


async def test_a_report_makes_it_unnecessary(linked: Linked) -> None:
    linked.queue = replace(QUEUE, num_running=7)
    (frame,) = linked.flush(LOAD_PERIOD_S)
    assert frame.load is not None
    assert frame.queue is None


async def test_who_gets_a_request_back_knows_at_once_what_waits_there(linked: Linked) -> None:
    """Between two reports, and sooner than changes are sent otherwise."""
    linked.queue = replace(QUEUE, num_backlog_tokens=500)
    assert linked.flush(QUEUE_PERIOD_S)[0].queue == linked.queue
    linked.queue = replace(QUEUE, num_backlog_tokens=900)
    assert linked.flush(QUEUE_PERIOD_S / 10) == []
    failure = RequestFailed("r", 1, "crowded", "900 tokens wait here")
    linked.links.post(KEY, failure)
    assert linked.flush() == [StepFrame(failures=(failure,), queue=linked.queue)]


async def test_news_can_go_ahead_of_the_report_that_is_due(linked: Linked) -> None:
    delta = TokenDelta("r", 1, 0, 0, bytes(4), (), "")
    linked.clock.advance(LOAD_PERIOD_S)
    linked.links.post(KEY, delta)
    linked.links.flush_news()
    linked.links.flush_news()
    ahead, after = linked.flush()
    assert ahead == StepFrame(deltas=(delta,))
    assert (after.deltas, after.load is None) == ((), False)


async def test_a_pause_lasts_until_it_is_said_otherwise_or_the_link_ends(linked: Linked) -> None:
    other = LinkEnd("h")
    linked.links.connected(("h", 1), other.stream)
    assert not linked.links.is_batch_paused
    for key in (KEY, ("h", 1)):
        linked.links.pause_batch(key, True)
    linked.links.pause_batch(KEY, False)
    assert linked.links.is_batch_paused, "the other gateway still wants it"
    linked.links.disconnected(("h", 1), other.stream)
    assert not linked.links.is_batch_paused
    linked.links.pause_batch(("h", 1), True)
    linked.links.pause_batch(("nobody", 1), True)
    assert not linked.links.is_batch_paused


async def test_what_is_read_of_prompts_is_cut_into_frames_in_its_order(linked: Linked) -> None:
    """A step of many chunks, and a token behind them: no frame is large, and the token comes last."""
    logprobs = PackedLogprobs(20, bytes(4 * 300), bytes(4 * 20 * 300), bytes(4 * 20 * 300))
    read = [PromptLogprobs("r", 1, 1 + 300 * number, logprobs) for number in range(100)]
    vectors = [PromptEmbedding(f"e{number}", 1, bytes(1 << 15)) for number in range(70)]
    token = TokenDelta("r", 1, 0, 0, bytes(4), (), "")
    posted: list[News] = [*read, token, *vectors]
    for news in posted:
        linked.links.post(KEY, news)
    frames = linked.flush()
    assert len(frames) > 5
    assert max(len(LINK_UP_CODEC.encode(frame)) for frame in frames) < 1_200_000
    assert [part for frame in frames for part in frame.prompt_logprobs] == read
    assert [it for frame in frames for it in frame.embeddings] == vectors
    assert [it for frame in frames for it in frame.deltas] == [token]
    (with_token,) = (number for number, frame in enumerate(frames) if frame.deltas)
    assert not any(frame.prompt_logprobs for frame in frames[with_token + 1 :])
    assert linked.flush() == []


def test_log_probabilities_of_a_prompt_are_sent_in_parts() -> None:
    """Those of a prompt of 32k tokens with 20 each, 5.4 MB, take as many as they must, and none is lost."""
    num_tokens, num_top = 32_767, 20
    drawn = np.random.default_rng(0).integers(0, 1 << 32, (41, num_tokens), np.uint32)
    top = drawn[1:].reshape(2, num_tokens, num_top)
    packed = PackedLogprobs(num_top, drawn[0].tobytes(), top[0].tobytes(), top[1].tobytes())
    parts = list(parts_of(PromptLogprobs("r", 1, 1, packed)))
    assert max(part.logprobs.num_bytes for part in parts) <= LOGPROB_PART_BYTES
    assert len(parts) == -(-num_tokens // (LOGPROB_PART_BYTES // 164))
    index = 1
    for part in parts:
        assert part.first_index == index
        assert part.logprobs.is_whole
        index += part.logprobs.num_tokens
    for name in ("logprobs", "top_ids", "top_logprobs"):
        assert b"".join(getattr(part.logprobs, name) for part in parts) == getattr(packed, name)
