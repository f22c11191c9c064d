"""What `tandem status` and the doctor show of who was served, and who was refused."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb


class TenantShare(NamedTuple):
    """A tenant's recent part of the replicas' time, and the parts of its classes: `share` is the sum of
    these."""

    tenant: str
    share: float
    class_to_share: dict[str, float]


def tenant_shares(admissions: Iterable[admin_pb.AdmissionStatus]) -> list[TenantShare]:
    """Return the shares of all tenants at these gateways together, the largest first."""
    served: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for admission in admissions:
        for flow in admission.flows:
            served[flow.tenant][name_of(pb.ServiceClass, flow.service_class)] += flow.served_s
    total_s = sum(sum(of_tenant.values()) for of_tenant in served.values())
    shares = [
        TenantShare(
            tenant,
            sum(of_tenant.values()) / total_s,
            {name: served_s / total_s for name, served_s in of_tenant.items()},
        )
        for tenant, of_tenant in served.items()
        if total_s > 0
    ]
    return sorted(shares, key=lambda it: (-it.share, it.tenant))


def class_shares(shares: Iterable[TenantShare]) -> dict[str, float]:
    """Return the part that each class had, of all tenants together."""
    total: dict[str, float] = {}
    for tenant in shares:
        for name, share in tenant.class_to_share.items():
            total[name] = total.get(name, 0.0) + share
    return total


def tenant_outcomes(gateways: Iterable[admin_pb.GatewayStatus]) -> dict[str, Counter[str]]:
    """Return how the latest requests of each tenant were served, at these gateways together; the tenants with
    most requests first."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for gateway in gateways:
        for each in gateway.outcomes:
            found[each.tenant].update(each.num_requests)
    return dict(sorted(found.items(), key=lambda item: (-item[1].total(), item[0])))


def good_share(outcomes: Counter[str]) -> float | None:
    """Return the part of requests that was good, of all but cancelled ones; None: there are no others."""
    num_counted = outcomes.total() - outcomes["cancelled"]
    return outcomes["good"] / num_counted if num_counted else None


def reasons_text(num_refused: Mapping[str, int]) -> str:
    """Return `aged 1, late 7`."""
    return ", ".join(f"{reason} {count}" for reason, count in sorted(num_refused.items()) if count)
