"""The console's curves of the last hours: what a point says, how many there are, and who records them."""

from __future__ import annotations

import sys

import msgspec
import pytest
from console_harness import ConsoleHarness
from gateway_harness import PROMPT
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.generate_options import GenerateOptions
from cluster.console.trend_recorder import TrendRecorder
from cluster.gateway.replica_connections import ReplicaView
from cluster.metrics.curves import Second
from cluster.metrics.trends import FINE, LONG, Gauges, TrendPoint, Trends
from kvtransfer.common.clock import SystemClock
from kvtransfer.messages import ReplicaIdentity
from workers.stats_record import DeviceMemory

NOTHING = Gauges(0, {}, None, 0, 0)
HOUR = 1_800_000_000 - 1_800_000_000 % LONG.span_s


def second(at: int, num_tokens: int = 0, ttft: float = 0.0) -> Second:
    made = Second(at)
    made.counts["num_output_tokens"] = num_tokens
    if ttft:
        made.ttft.add(ttft)
    return made


def test_a_point_sums_what_is_counted_and_keeps_the_highest_gauges() -> None:
    trends = Trends()
    for number in range(6):
        at = HOUR + number * FINE.period_s
        gauges = Gauges(number, {"decode": 0.1 * number}, 0.9 - 0.1 * number, 100, 10 * number)
        trends.add(at, [second(at, 5), second(at + 1, 15, ttft=0.1 * (number + 1))], gauges)
    series, points = trends.since(HOUR, 300)
    assert (series, len(points)) == (FINE, 6)
    assert [point.output_tok_s for point in points] == [2.0] * 6
    assert [point.hit_share for point in points] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    series, (point,) = trends.since(HOUR, LONG.span_s)
    assert series == LONG
    assert point.ttft == pytest.approx((0.3, 0.6, 0.6), rel=0.011)
    assert point == TrendPoint(HOUR, 2.0, 5, 0.25, {"decode": 0.5}, 0.9, point.ttft, None)


def test_nothing_measured_is_none_and_no_zero() -> None:
    trends = Trends()
    trends.add(HOUR, [], NOTHING)
    assert trends.since(HOUR, 60)[1] == [TrendPoint(HOUR, 0.0, 0, None, {}, None, None, None)]


def test_a_period_that_is_not_over_comes_with_its_end() -> None:
    trends = Trends()
    trends.add(HOUR, [second(HOUR, 60)], NOTHING)
    assert trends.since(HOUR, LONG.span_s)[1] == []
    # Nothing was recorded for an hour: the host slept.
    trends.add(HOUR + 3600, [], NOTHING)
    (point,) = trends.since(HOUR, LONG.span_s)[1]
    assert (point.at, point.output_tok_s) == (HOUR, 1.0)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=200))
def test_points_are_in_order_once_each_whatever_is_missing(gaps: list[int]) -> None:
    trends, at, recorded = Trends(), HOUR, []
    for gap in gaps:
        at += gap * FINE.period_s
        trends.add(at, [], NOTHING)
        recorded.append(at)
    assert [point.at for point in trends.since(0, FINE.span_s)[1]] == recorded[-360:]
    coarse = [point.at for point in trends.since(0, LONG.span_s)[1]]
    assert coarse == sorted(set(coarse))
    over = sorted({at - at % LONG.period_s for at in recorded if at + LONG.period_s <= recorded[-1]})
    assert coarse[-1:] >= over[-1:]


def test_two_days_take_no_more_memory_than_six_hours() -> None:
    trends = Trends()
    for number in range(2 * 24 * 360):
        at = HOUR + number * FINE.period_s
        trends.add(at, [second(at, 3, ttft=0.2)], Gauges(1, {"prefill": 0.5, "decode": 0.5}, 0.5, 10, 5))
    points = [point for span in (FINE.span_s, LONG.span_s) for point in trends.since(0, span)[1]]
    assert len(points) == 720
    size = sum(sys.getsizeof(part) for point in points for part in (point, *point))
    assert size < 1_000_000


async def test_the_gateway_records_what_clients_got(front: ConsoleHarness) -> None:
    client, services = front.harness.client(front.address), front.gateway
    recorder = TrendRecorder(
        services.fleet.stats, services.connections.views, lambda pool: pool == "decode", SystemClock()
    )
    await client.complete(PROMPT, GenerateOptions(seed=1, max_tokens=20))
    (newest,) = {int(each.at) for each in (await services.fleet.stats()).seconds if each.ttft.num_values}
    await recorder.record(newest)
    ((point,),) = (recorder.trends.since(0, 60)[1],)
    assert point.output_tok_s * FINE.period_s == 20
    assert point.ttft is not None
    assert set(point.role_to_kv_share) == {"prefill", "decode"}
    assert point.hit_share is None, "what replicas counted before they were heard has no time"


async def test_hits_are_what_grew_and_memory_is_that_of_the_fullest_gpu(front: ConsoleHarness) -> None:
    """Also of a replica that restarts: its totals begin anew."""

    def view(epoch: int, pool: str, num_queried: int, num_hit: int, used: int) -> ReplicaView:
        identity = ReplicaIdentity(f"{pool}-0", epoch)
        replica = front.gateway.connections.views()[0]
        assert replica.load is not None
        load = msgspec.structs.replace(
            replica.load,
            num_queried_tokens=num_queried,
            num_hit_tokens={"device": num_hit - 1, "dram": 1} if num_hit else {},
            memory=(DeviceMemory(used, 100), DeviceMemory(10, 100)),
        )
        return ReplicaView(msgspec.structs.replace(replica.record, identity=identity, pool=pool), load=load)

    views: list[ReplicaView] = []
    recorder = TrendRecorder(
        front.gateway.fleet.stats, lambda: views, lambda pool: pool == "decode", SystemClock()
    )
    totals = [(1, 900, 900), (1, 1000, 925), (2, 50, 50), (2, 150, 50)]
    for number, (epoch, num_queried, num_hit) in enumerate(totals):
        views[:] = [view(epoch, "decode", num_queried, num_hit, 60 + number), view(1, "prefill", 0, 0, 99)]
        await recorder.record(HOUR + number * FINE.period_s)
    points = recorder.trends.since(HOUR, 300)[1]
    assert [point.hit_share for point in points] == [None, 0.25, None, 0.0]
    # The memory of a pool on CPUs is fuller, and no GPU's.
    assert [point.gpu_memory_share for point in points] == [0.6, 0.61, 0.62, 0.63]


async def test_the_page_reads_points_and_wrong_spans_are_refused_by_name(front: ConsoleHarness) -> None:
    answer = await front.page.get("/console/api/trends?span_s=1800")
    assert (answer["span_s"], answer["period_s"]) == (1800, FINE.period_s)
    assert (await front.page.get("/console/api/trends?span_s=21600"))["period_s"] == LONG.period_s
    for value in (None, "", "-5", "1e3", "59", "21601", "9" * 5000):
        span = "" if value is None else f"?span_s={value}"
        status, fields = await front.page.ask("GET", f"/console/api/trends{span}")
        assert (status, fields["error"].startswith("span_s: ")) == (400, True), (span, fields)


@pytest.mark.slow
async def test_points_come_by_themselves_while_the_console_listens(front: ConsoleHarness) -> None:
    """Slow because a period takes ten seconds."""
    client = front.harness.client(front.address)
    await client.complete(PROMPT, GenerateOptions(seed=1, max_tokens=20))

    total = 0.0
    while not total:  # until the test's own time limit
        points = (await front.page.get("/console/api/trends?span_s=300"))["points"]
        total = FINE.period_s * sum(point["output_tok_s"] for point in points)
        await SystemClock().sleep(0.2)
    assert total == 20
