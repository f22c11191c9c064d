"""Symptoms of the members of a cluster, both ways."""

from __future__ import annotations

import pytest
from doctor_harness import NOW, live, only, said

from cluster.doctor import members
from cluster.doctor.checks import Severity
from cluster.doctor.live_cluster import GatewayReply
from cluster.proto.enums import value_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb

OK, NOTE, WARNING, ERROR = Severity


@pytest.mark.parametrize(
    ("state", "age_s", "severity"),
    [
        ("refused", 0.1, ERROR),
        ("leaving", 0.1, NOTE),
        ("connecting", 0.1, WARNING),
        ("ready", 9.0, WARNING),
    ],
)
def test_replicas_that_are_not_ready_are_reported(state: str, age_s: float, severity: Severity) -> None:
    def change(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].state = value_of(admin_pb.ReplicaState, state)
        status.replicas[1].load.age_s = age_s

    assert [each for each, _ in said(members.replicas, live(change))] == [severity, OK]


def test_a_replica_whose_circuit_breaker_is_open_is_named_with_the_reason() -> None:
    def avoid(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].note = "waits for a snapshot; circuit breaker open: nothing was heard for 1.0 s"

    bad, good = members.replicas(live(avoid))
    assert (bad.severity, good.severity) == (WARNING, OK)
    assert "is avoided" in bad.seen
    assert "nothing was heard for 1.0 s" in bad.seen


def test_a_tenant_that_is_refused_because_of_its_limits_is_named_with_them() -> None:
    def limit(status: admin_pb.StatusResponse) -> None:
        status.quotas.add(tenant="idle", used={"requests_per_s": 0.5})
        status.quotas.add(tenant="busy", num_refused={"requests_per_s": 9, "concurrent_tokens": 2})

    result = only(members.quotas, live(limit))
    assert result.severity is NOTE
    assert result.seen.endswith("2 by concurrent_tokens, 9 by requests_per_s")
    assert "tenant busy" in result.seen
    assert not said(members.quotas, live())


def test_a_gateway_that_has_its_part_of_the_limits_alone_is_named() -> None:
    def divide(status: admin_pb.StatusResponse) -> None:
        status.gateways.add(
            gateway_id="gateway-x", quota_note="limits are divided: no store.redis_url is set"
        )

    seen = [text for severity, text in said(members.gateways, live(divide)) if severity is WARNING]
    assert any("gateway-x" in text and "no store.redis_url is set" in text for text in seen)


def test_classes_shares_and_refusals_of_a_gateway_are_reported_with_its_rung() -> None:
    def serve(status: admin_pb.StatusResponse) -> None:
        stats = status.gateways[0].admission
        stats.rung_name = "normal"
        stats.classes.add(service_class=pb.SERVICE_CLASS_INTERACTIVE, num_waiting=2)
        stats.classes.add(
            service_class=pb.SERVICE_CLASS_BATCH, num_waiting=5, num_refused={"shed": 3, "late": 7}
        )
        stats.flows.add(tenant="b", service_class=pb.SERVICE_CLASS_BATCH, served_s=10.0)
        stats.flows.add(tenant="a", service_class=pb.SERVICE_CLASS_INTERACTIVE, served_s=20.0)
        stats.flows.add(tenant="a", service_class=pb.SERVICE_CLASS_BATCH, served_s=10.0)

    def refuse(status: admin_pb.StatusResponse) -> None:
        serve(status)
        status.gateways[0].admission.classes[1].num_refused["late"] += 4

    def climb(status: admin_pb.StatusResponse) -> None:
        serve(status)
        status.gateways[0].admission.rung = 2
        status.gateways[0].admission.rung_name = "tokens_capped"

    well = only(members.admission, live(serve, before=serve))
    assert well.severity is OK
    assert well.seen == (
        "gateway g0 is not under load; waiting: interactive 2, batch 5; refused since its start: batch "
        "late 7, shed 3; share of the replicas' time lately: a 75%, b 25%"
    )
    refused = only(members.admission, live(refuse, before=serve))
    assert refused.severity is NOTE
    assert refused.seen.startswith("gateway g0 refused 4 requests while we looked")
    loaded = only(members.admission, live(climb, before=serve))
    assert loaded.severity is WARNING
    assert loaded.seen.startswith("gateway g0 is under load: tokens capped; waiting: interactive 2")


def test_a_gateway_whose_load_is_not_known_and_one_that_served_nothing_share_nothing() -> None:
    def idle(status: admin_pb.StatusResponse) -> None:
        status.gateways[1].admission.rung_name = "normal"

    assert not said(members.admission, live())
    assert only(members.admission, live(idle)).seen.endswith(
        "waiting: none; refused since its start: none; share of the replicas' time lately: none"
    )


def test_replicas_that_are_replaced_again_and_again_are_reported() -> None:
    def young(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].epoch = int((NOW - 40) * 1000)

    def young_gateway(status: admin_pb.StatusResponse) -> None:
        young(status)
        status.uptime_s = 50.0

    def scaled(status: admin_pb.StatusResponse) -> None:
        young(status)
        status.scaling_changes.add(at=NOW - 50, pool="decode", before=1, after=2, by="operator")

    result = only(members.flapping, live(young))
    assert result.severity is WARNING
    assert "pool decode: 1 of 1 replicas began" in result.seen
    assert "40 s ago" in result.seen
    assert not said(members.flapping, live(young_gateway))
    assert not said(members.flapping, live(scaled))
    assert not said(members.flapping, live())


def test_a_replica_that_comes_while_we_look_is_reported_once() -> None:
    def came(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].epoch = int(NOW * 1000)

    result = only(members.flapping, live(came, before=lambda status: None))
    assert result.seen == "d0 came while we looked"


def test_pools_below_what_is_wanted_pinned_or_lent() -> None:
    def missing(status: admin_pb.StatusResponse) -> None:
        status.pools[1].desired = 3

    def pinned(status: admin_pb.StatusResponse) -> None:
        status.pools[1].pinned = True
        status.pools[1].max = 4

    def by_hand(status: admin_pb.StatusResponse) -> None:
        status.pools[1].pinned = True

    def lent(status: admin_pb.StatusResponse) -> None:
        status.pools[0].num_reassigned = 1

    assert (WARNING, "pool decode: 1 of 3 replicas are ready") in said(members.pools, live(missing))
    assert [severity for severity, _ in said(members.pools, live(pinned))] == [OK, OK, NOTE]
    assert [severity for severity, _ in said(members.pools, live(by_hand))] == [OK, OK]
    assert [severity for severity, _ in said(members.pools, live(lent))] == [OK, NOTE, OK]


def test_gateways_must_answer_and_be_several() -> None:
    good = live()
    away = (*good.gateways[:1], GatewayReply("h:2", None, "UNAVAILABLE: refused"))
    assert [severity for severity, _ in said(members.gateways, live(replies=away))] == [WARNING, OK]
    assert only(members.gateways, live(replies=tuple(good.gateways[:1]))).severity is NOTE
    assert only(members.gateways, good).severity is OK


def test_clocks_of_gateways_are_compared_beyond_the_round_trip() -> None:
    status = live().status

    def skewed(skew_s: float, round_trip_s: float) -> list[Severity]:
        reply = GatewayReply("h:1", status, "", skew_s, round_trip_s)
        return [severity for severity, _ in said(members.clocks, live(replies=(reply,)))]

    assert skewed(0.5, 0.001) == [OK]
    assert skewed(-30.0, 0.001) == [WARNING]
    assert skewed(1.4, 1.0) == [OK]


def test_versions_are_compared() -> None:
    def other(status: admin_pb.StatusResponse) -> None:
        status.versions["ray"] = "2.59.0"

    def newer(status: admin_pb.StatusResponse) -> None:
        status.versions["tandem-serve"] = "0.2.0"

    mixed = only(members.versions, live(other=other))
    assert mixed.severity is WARNING
    assert "ray: 2.59.0, 2.60.0" in mixed.seen
    assert [severity for severity, _ in said(members.versions, live(newer))] == [NOTE, OK]


def test_shared_traffic_is_noted() -> None:
    def split(status: admin_pb.StatusResponse) -> None:
        status.traffic["tandem"] = 90
        status.traffic["tandem-v2"] = 10

    assert only(members.traffic, live(split)).seen.endswith("tandem 90, tandem-v2 10")
    assert not said(members.traffic, live())


def test_gateways_that_know_nobody_are_named_and_worse_where_others_reach_them() -> None:
    def open_to_all(status: admin_pb.StatusResponse) -> None:
        status.authentication = "none"

    assert only(members.authentication, live()).severity is OK
    result = only(members.authentication, live(open_to_all))
    assert result.severity is WARNING
    assert "NOT authenticated at h:1, h:2" in result.seen
    assert "tandem key new" in result.remedy
    assert only(members.authentication, live(other=open_to_all)).seen.startswith(
        "callers are NOT authenticated at h:2"
    )
    here = (GatewayReply("127.0.0.1:8782", live(open_to_all).status),)
    assert only(members.authentication, live(replies=here)).severity is NOTE


def test_a_gateway_that_does_not_hear_another_is_named() -> None:
    def cut(status: admin_pb.StatusResponse) -> None:
        status.gateways.add(gateway_id="g0").unheard["g1"] = "its stream ended"

    seen = [text for severity, text in said(members.gateways, live(cut)) if severity is WARNING]
    assert seen == ["gateway g0 does not hear what g1 places: its stream ended"]
