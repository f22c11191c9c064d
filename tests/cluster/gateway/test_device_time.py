"""The device time and the cost of tenants, and how many of their requests were good."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_harness import FINGERPRINT

from cluster.config import parse_config
from cluster.errors import ConfigError
from cluster.gateway.device_time import DeviceTime
from cluster.gateway.output_buffer import UnreadOutput
from cluster.gateway.replica_connections import ReplicaView
from cluster.gateway.request_recording import RequestRecording
from cluster.metrics.admission_stats import AdmissionStats
from cluster.metrics.config import CostConfig, RecordingConfig
from cluster.metrics.ended_request import Caller, EndedRequest, SampleResult, Summary
from cluster.metrics.exporters import GatewayMetrics
from cluster.metrics.gateway_counters import GatewayCounters, RequestObjectives
from cluster.metrics.recent_outcomes import MAX_AGE_S, NUM_TENANTS, OutcomeStats, RecentOutcomes
from cluster.metrics.scraped_registry import ScrapedRegistry
from cluster.metrics.tenant_usage import OTHERS
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.messages import ReplicaRecord
from cluster.text.preprocess import PreparedRequest, SampleStart
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import PROTOCOL_VERSION, CompatibilityRecord, ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from workers.messages.link import LoadReport, PrefillReport, StageTimes, TokenDelta
from workers.messages.sampling import SamplingParams

MEASURED: dict[str, Any] = {
    "prefill_token_s": 1e-3,
    "attention_token_s": 1e-6,
    "decode_base_s": 0.02,
    "decode_sequence_s": 1e-3,
    "decode_context_s": 1e-5,
}


def view(pool: str, *, tp: int = 1, num_stages: int = 1, **load: Any) -> ReplicaView:
    identity = ReplicaIdentity(f"{pool}-1", 1)
    record = ReplicaRecord(
        identity=identity,
        pool=pool,
        role=pool,
        address="a:1",
        model="m",
        compatibility=CompatibilityRecord(PROTOCOL_VERSION, FINGERPRINT, "float32", "float32", 16, 2, 2, 8),
        process_id=1,
        rank_process_ids=(),
        tp=tp,
        stages=tuple((number, number + 1) for number in range(num_stages)),
    )
    return ReplicaView(record, load=LoadReport(identity=identity, sequence=1, **load))


class Views(dict[str, ReplicaView]):
    """Replicas by id."""

    def find(self, replica_id: str) -> ReplicaView | None:
        return self.get(replica_id)


def test_a_prompt_takes_all_ranks_and_a_step_is_shared_by_its_sequences() -> None:
    views = Views(
        p=view("prefill", tp=2, num_stages=3, **MEASURED),
        d=view("decode", tp=2, num_stages=3, num_running=5, num_paused=1, **MEASURED),
    )
    times = DeviceTime(views)
    pool, device_s = times.of_prompt("p", 100, 200)
    assert pool == "prefill"
    assert device_s == pytest.approx(6 * (200e-3 + 200 * 200 * 1e-6))
    pool, device_s = times.of_output("d", 3, 50)
    assert pool == "decode"
    assert device_s == pytest.approx(2 * 3 * (0.02 / 4 + 1e-3 + 50e-5))


def test_before_a_replica_has_measured_its_rates_stand_in_and_before_those_nothing() -> None:
    views = Views(
        new=view("decode"),
        young=view("decode", prefill_tok_s=500.0, decode_step_s=0.03, num_running=3),
        unheard=ReplicaView(view("decode").record),
    )
    times = DeviceTime(views)
    assert times.of_prompt("young", 7, 100).device_s == pytest.approx(0.2)
    assert times.of_output("young", 2, 100).device_s == pytest.approx(0.02)
    for name in ("new", "unheard", "gone"):
        assert times.of_prompt(name, 0, 100).device_s == 0
        assert times.of_output(name, 1, 100).device_s == 0


# -------------------------------------------------------------------------------- counters and metrics


def prepared(name: str, tenant: str) -> PreparedRequest:
    return PreparedRequest(
        request_id=name,
        facts=RequestFacts(tenant=tenant),
        prompt=bytes(4 * 100),
        root_key=b"",
        block_keys=(),
        sampling=SamplingParams(max_tokens=8),
        samples=(SampleStart(0, 0),),
        deadline_at=None,
    )


class Served:
    """A gateway's counters over a prefill and a decode replica."""

    def __init__(self) -> None:
        self.views = Views(p=view("prefill", **MEASURED), d=view("decode", num_running=2, **MEASURED))
        self.counters = GatewayCounters(
            lambda replica_id: "",
            lambda: 1,
            objectives=RequestObjectives({"interactive": 1.0, "standard": 5.0}, 0.1),
            device_times=DeviceTime(self.views),
        )

    def run(self, name: str, tenant: str) -> None:
        self.counters.arrived(prepared(name, tenant), 0.0)
        self.counters.prefilled(PrefillReport(name, 1, 100, 40, StageTimes()), "p", 1.0)
        for at, replica_id, num_tokens in ((1.0, "p", 1), (1.1, "d", 2)):
            delta = TokenDelta(name, 1, 0, 0, bytes(4 * num_tokens), (), "")
            self.counters.streamed(replica_id, delta, at)

    def end(
        self,
        *,
        state: str = "finished",
        service_class: str = "standard",
        ttft_s: float = 0.5,
        tpot_s: float = 0.05,
        tenant: str = "acme",
    ) -> None:
        summary = None
        if state != "refused":
            summary = Summary(
                samples=(SampleResult(0, "length", 5),),
                num_prompt_tokens=100,
                num_attempts=1,
                started_at=10.0,
                first_token_at=10.0 + ttft_s,
                finished_at=10.0 + ttft_s + 4 * tpot_s,
                prefill_replica="",
                decode_replica="",
                prefill=None,
                hand_over=None,
            )
        ended = EndedRequest(
            "r", "", tenant, Caller(), state, "OK", "", 10.0, 20.0, summary, service_class=service_class
        )
        self.counters.ended(ended)

    def metrics(self, costs: CostConfig) -> str:
        registry = ScrapedRegistry(app="a", gateway="g", model="m")
        recording = RequestRecording(RecordingConfig(), ManualClock())
        status = admin_pb.StatusResponse()
        metrics = GatewayMetrics(registry, 0.0, costs)
        unread = UnreadOutput(1e6)
        list(metrics.update(self.counters, AdmissionStats(), status, 20.0, 0, recording, unread))
        return registry.text().decode()


def series(text: str, name: str) -> dict[str, float]:
    """The values of a metric by its labels, without those of the gateway."""
    lines = [line for line in text.splitlines() if line.startswith(f"tandem_{name}{{")]
    found = {}
    for line in lines:
        labels, value = line[len(f"tandem_{name}{{") :].split("} ")
        kept = [each for each in labels.split(",") if each.split("=")[0] not in ("app", "gateway", "model")]
        found[",".join(kept)] = float(value)
    return found


def test_tenants_pay_for_the_time_of_each_pool() -> None:
    served = Served()
    served.run("r", "acme")
    prompt_s = 60e-3 + 60 * (40 + 30) * 1e-6
    output_s = 2 * (0.02 / 2 + 1e-3 + 103 * 1e-5)  # the first token came with the prompt
    text = served.metrics(CostConfig())
    assert series(text, "tenant_device_seconds_total") == {
        'pool="prefill",tenant="acme"': pytest.approx(prompt_s),
        'pool="decode",tenant="acme"': pytest.approx(output_s),
    }
    assert series(text, "tenant_cost_total") == {}
    one = series(served.metrics(CostConfig(device_hour=7200.0)), "tenant_cost_total")
    assert one == {'tenant="acme"': pytest.approx(2 * (prompt_s + output_s))}
    own = CostConfig(device_hour=7200.0, pools={"decode": 3600.0})
    both = series(served.metrics(own), "tenant_cost_total")
    assert both == {'tenant="acme"': pytest.approx(2 * prompt_s + output_s)}
    of_one = series(served.metrics(CostConfig(pools={"decode": 3600.0})), "tenant_cost_total")
    assert of_one == {'tenant="acme"': pytest.approx(output_s)}


def test_good_requests_keep_the_objectives_of_their_class() -> None:
    served = Served()
    served.end()
    served.end(ttft_s=4.0)
    served.end(ttft_s=6.0)
    served.end(tpot_s=0.11)
    served.end(service_class="interactive", ttft_s=2.0)
    served.end(service_class="batch", ttft_s=900.0, tpot_s=2.0)
    served.end(state="failed")
    served.end(state="refused", service_class="batch")
    served.end(state="refused", service_class="")  # invalid
    text = served.metrics(CostConfig())
    assert series(text, "tenant_class_requests_total") == {
        'class="standard",outcome="good",tenant="acme"': 2,
        'class="standard",outcome="late",tenant="acme"': 2,
        'class="standard",outcome="failed",tenant="acme"': 1,
        'class="interactive",outcome="late",tenant="acme"': 1,
        'class="batch",outcome="good",tenant="acme"': 1,
        'class="batch",outcome="refused",tenant="acme"': 1,
    }
    tokens = series(text, "tenant_class_output_tokens_total")
    assert tokens['class="standard",outcome="good",tenant="acme"'] == 10
    assert 'class="batch",outcome="refused",tenant="acme"' not in tokens


def test_many_tenants_have_few_series() -> None:
    served = Served()
    for number in range(500):
        served.run(f"r{number}", f"t{number}")
        served.end(tenant=f"t{number}")
    text = served.metrics(CostConfig(device_hour=1.0))
    names = "tenant_device_seconds_total", "tenant_class_requests_total", "tenant_cost_total"
    assert [len(series(text, name)) for name in names] == [42, 21, 21]
    assert sum(series(text, "tenant_class_requests_total").values()) == 500


def test_the_latest_outcomes_are_those_of_the_busiest_tenants_by_name() -> None:
    outcomes = RecentOutcomes()
    for number in range(NUM_TENANTS + 5):
        for _ in range(2 if number < NUM_TENANTS else 1):
            outcomes.add(f"t{number:02}", "standard", "good", 100.0)
    outcomes.add("", "batch", "late", 100.0)
    outcomes.add("", "batch", "good", 101.0)
    outcomes.add("", "batch", "good", 101.0)
    stats = outcomes.stats(102.0)
    assert stats[0] == OutcomeStats("default", "batch", {"late": 1, "good": 2})
    others = [it for it in stats if it.tenant == OTHERS]
    assert others == [OutcomeStats(OTHERS, "standard", {"good": 2 + 5})]
    assert len(stats) == NUM_TENANTS + 1
    assert outcomes.stats(100.5 + MAX_AGE_S) == (OutcomeStats("default", "batch", {"good": 2}),)
    assert outcomes.stats(102.0 + MAX_AGE_S) == ()


def test_prices_are_of_pools_that_there_are() -> None:
    file = {"model": "m", "pools": [{"name": "decode", "role": "decode"}]}
    with pytest.raises(ConfigError, match=r"costs.pools.prefill: there is no pool of this name"):
        parse_config({**file, "costs": {"pools": {"prefill": 2.0}}}, "test")
    with pytest.raises(ConfigError, match=r"costs.device_hour"):
        parse_config({**file, "costs": {"device_hour": 0}}, "test")
